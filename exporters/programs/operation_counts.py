"""Counts the multiply-accumulates of a signature, independently of any runtime."""

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES
from exporters.recurrence.loop_operator import STEPS, loop
from exporters.recurrence.recurrent_layers import RecurrenceLoops

Shapes = Sequence[Sequence[int]]


def macs(signature: ProgramSignature, batch: int) -> int:
    """Count the multiply-accumulates of convolutions and matrix products in one run.

    The count is taken before any decomposition, so that it does not depend on how a runtime
    computes the result.

    Args:
        signature: The signature to run.
        batch: Number of samples.

    Returns:
        Multiply-accumulates.
    """
    return macs_of(
        lambda: signature.function(
            {
                port.name: torch.zeros(
                    [batch if size is None else size for size in port.shape],
                    dtype=DTYPES[port.dtype],
                )
                for port in signature.inputs
            }
        )
    )


def macs_of(run: Callable[[], object]) -> int:
    """Count the multiply-accumulates of convolutions and matrix products when calling `run`.

    Tensors created by `run` are fake, so that nothing is computed.

    Args:
        run: A function without arguments.

    Returns:
        Multiply-accumulates.
    """
    # The counter does not know the CPU's fused attention kernel. The MATH backend makes attention
    # plain matrix products instead.
    counter = FlopCounterMode(display=False, custom_mapping={loop.overloadpacket: loop_flops})
    # Recorded graphs hold constants that are real tensors.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with sdpa_kernel(SDPBackend.MATH), fake, counter, RecurrenceLoops():
        run()
    return int(counter.get_total_flops()) // 2  # a multiply-accumulate is two operations


def loop_flops(
    step: str, states: Shapes, inputs: Shapes, constants: Shapes, *rest: object, **out: object
) -> int:
    """Operations of a loop over tensors of these shapes: those of one step, times the steps."""
    one = [*states, *(shape[1:] for shape in inputs), *constants]
    with FlopCounterMode(display=False) as counter:
        STEPS[step].function(*(torch.empty(list(shape)) for shape in one))
    return inputs[0][0] * int(counter.get_total_flops())
