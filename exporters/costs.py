"""What a signature computes, whatever runtime it is written for."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from exporters.program import ProgramSignature
from exporters.tracing import DTYPES


def macs(signature: ProgramSignature, batch: int) -> int:
    """Multiply-accumulates of one run on `batch` samples: convolutions and matrix products.

    Counted ahead of all decompositions, so that it says what is asked for, not how it is done.
    Nothing is computed: the tensors are fake.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        signature.function(
            {
                port.name: torch.zeros(
                    [batch if size is None else size for size in port.shape],
                    dtype=DTYPES[port.dtype],
                )
                for port in signature.inputs
            }
        )
    return int(counter.get_total_flops()) // 2  # a multiplication and an addition each
