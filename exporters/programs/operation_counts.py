"""Counts the multiply-accumulates of a signature, independently of any runtime."""

import math
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

    Operations are counted before any decomposition, so that the count does not depend on how a
    runtime computes the result.

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

    The tensors that `run` creates are fake, so that nothing is computed.

    Args:
        run: A function without arguments.

    Returns:
        Multiply-accumulates.
    """
    # The counter does not know the CPU's fused attention kernel. The MATH backend makes attention
    # plain matrix products instead.
    formulas = {
        loop.overloadpacket: loop_flops,
        torch.ops.aten.convolution_backward: convolution_gradient_flops,
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    # Recorded graphs hold constants that are real tensors.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with sdpa_kernel(SDPBackend.MATH), fake, counter, RecurrenceLoops():
        run()
    return int(counter.get_total_flops()) // 2  # a multiply-accumulate is two operations


def loop_flops(
    step: str, states: Shapes, inputs: Shapes, constants: Shapes, *rest: object, **out: object
) -> int:
    """Count the operations of a loop: the operations of one step, times the number of steps.

    `states`, `inputs` and `constants` are the shapes of the loop's tensors.
    """
    shapes = [*states, *(shape[1:] for shape in inputs), *constants]
    with FlopCounterMode(display=False) as counter:
        STEPS[step].function(*(torch.empty(list(shape)) for shape in shapes))
    return inputs[0][0] * int(counter.get_total_flops())


def convolution_gradient_flops(
    grad: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    output_mask: Sequence[bool],
    *rest: object,
    **out: object,
) -> int:
    """Operations of the gradients of a convolution.

    The gradients of `x` and of `weight` each take as many operations as the convolution. PyTorch's
    formula ignores the groups in the weight gradient: for a depthwise convolution with n channels,
    PyTorch's count is n times too high.
    """
    pixels = math.prod((x if transposed else grad)[2:])
    macs = x[0] * pixels * math.prod(weight)
    return 2 * macs * sum(map(bool, output_mask[:2]))
