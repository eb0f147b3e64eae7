"""Records transformers with the masks that they are given.

PyTorch's transformers compare a mask with a causal one, to choose a faster kernel. Recording cannot
follow a decision about values, and the graph needs no other kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from torch import Tensor
from torch.nn.modules import transformer

LOCK = Lock()


def is_declared_causal(
    mask: Tensor | None, is_causal: bool | None = None, size: object = None
) -> bool:
    """Whether the caller says that `mask` is causal."""
    return is_causal is True


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Context in which a mask is causal only if the caller says so."""
    # The function is a global of torch: two threads must not replace it at the same time.
    with LOCK:
        original = transformer._detect_is_causal_mask
        transformer._detect_is_causal_mask = is_declared_causal
        try:
            yield
        finally:
            transformer._detect_is_causal_mask = original
