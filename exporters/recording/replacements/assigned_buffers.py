"""Records assignments of new tensors to a model's buffers, such as `self.mean = new`, as writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def assignments_write() -> Iterator[None]:
    """Context in which an assignment to a buffer copies the new values into the buffer's tensor.

    Without this context, an assignment replaces the tensor, and torch does not record replacements
    in modules inside the model. If the new tensor has another shape or type than the buffer, the
    assignment still replaces the buffer's tensor.
    """
    assign = nn.Module.__setattr__

    def write(module: nn.Module, name: str, value: Any) -> None:
        buffer = module.__dict__.get("_buffers", {}).get(name)
        if isinstance(buffer, Tensor) and isinstance(value, Tensor) and fits(buffer, value):
            buffer.copy_(value)
        else:
            assign(module, name, value)

    nn.Module.__setattr__ = write  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]


def fits(buffer: Tensor, value: Tensor) -> bool:
    """Whether `value` is another tensor than `buffer`, with the same shape and type."""
    same = buffer.shape == value.shape and buffer.dtype == value.dtype
    return value is not buffer and same
