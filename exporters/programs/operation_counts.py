"""What a signature computes, whatever runtime it is written for."""

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import DTYPES
from exporters.recurrence.loop_operator import STEPS, loop
from exporters.recurrence.recurrent_layers import OpenRecurrence

Shapes = Sequence[Sequence[int]]


def macs(signature: ProgramSignature, batch: int) -> int:
    """Multiply-accumulates of one run on `batch` samples: convolutions and matrix products.

    Counted ahead of all decompositions, so that it says what is asked for, not how it is done.
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
    """Multiply-accumulates of what `run` does: convolutions and matrix products.

    Nothing is computed: the tensors that it makes are fake. Recurrent layers are loops, one step
    of which tells; attention is its products, as the counter knows no kernel of processors.
    """
    counter = FlopCounterMode(display=False, custom_mapping={loop.overloadpacket: loop_flops})
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with sdpa_kernel(SDPBackend.MATH), fake, counter, OpenRecurrence():
        run()
    return int(counter.get_total_flops()) // 2  # a multiplication and an addition each


def loop_flops(
    step: str, states: Shapes, inputs: Shapes, constants: Shapes, *rest: object, **out: object
) -> int:
    """Multiplications and additions of a loop over tensors of these shapes: of a step, times T."""
    one = [*states, *(shape[1:] for shape in inputs), *constants]
    with FlopCounterMode(display=False) as counter:
        STEPS[step].function(*(torch.empty(list(shape)) for shape in one))
    return inputs[0][0] * int(counter.get_total_flops())
