"""Packs the outputs of a model into one tensor, and takes them apart again.

`device_agent/formats/packing.py` does this with numpy arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from device_agent.formats.manifest import SAFE_LIMIT, Part
from device_agent.formats.packing import columns, packed_size

PREFERRED = "logits"
"""If a loss names no output, it takes the output with this name from a dictionary of outputs."""


def pack_outputs(tensors: Sequence[Tensor], rows: Any) -> Tensor:
    """Put tensors (batch, ...) of `rows` samples side by side, as one tensor (batch, k)."""
    # `flatten` would need an axis after the batch.
    return torch.cat([tensor.reshape(rows, -1) for tensor in tensors], 1)


def part_of(packed: Tensor, part: Part, parts: Sequence[Part]) -> Tensor:
    """Take one part from a packed tensor (batch, k), in its shape and type.

    The result is contiguous, like the results of layers, so that `view` can join the batch with
    other axes.
    """
    own = packed[:, columns(parts)[part.name]].reshape(packed.shape[0], *part.shape).contiguous()
    return own.to(torch.int64) if part.dtype == "int64" else own


def unpack(packed: Tensor, parts: Sequence[Part]) -> Any:
    """Take a packed tensor (batch, k) apart into the result of the model.

    Returns:
        A dictionary, or a tuple if the names are numbers. If names have dots, the result is nested.
        If there is a single part without a name, the result is the tensor itself.
    """
    if parts[0].name == "":
        return part_of(packed, parts[0], parts)
    return nest({part.name: part_of(packed, part, parts) for part in parts})


def random_labels(
    parts: Sequence[Part], rows: int, generator: torch.Generator, *, with_ends: bool = True
) -> Tensor:
    """Random packed labels: classes, and numbers from 0 to 1.

    If `with_ends` is set, a quarter of the numbers is 0 and a quarter is 1. Some losses compare
    labels with 0 and 1 to find the places of objects. Other losses are not finite for 0 and 1.
    """

    def numbers(shape: tuple[int, int]) -> Tensor:
        drawn = torch.rand(shape, generator=generator)
        if with_ends:
            drawn = (2 * drawn - 0.5).clamp(0, 1)
        return drawn

    shapes = [(rows, packed_size([part])) for part in parts]
    drawn = [
        torch.randint(part.limit or SAFE_LIMIT, shape, generator=generator).float()
        if part.dtype == "int64"
        else numbers(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]
    return torch.cat(drawn, 1)


def described_parts(parts: Sequence[Part]) -> str:
    """The outputs in a few words, such as "kind (batch, 10), box (batch, 4)"."""
    if not parts:
        return "no output that a loss can take"
    return ", ".join(
        f"{part.name} ({', '.join(('batch', *map(str, part.shape)))})".strip() for part in parts
    )


class Named(dict[str, Any]):
    """Values by name. They are also attributes, as in data classes."""

    def __getattr__(self, name: str) -> Any:
        """The value `name`. Raises AttributeError."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def nest(named: Mapping[str, Any]) -> Any:
    """Nest the values whose names begin alike, such as `boxes.0` and `boxes.1`."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = value
    nested = {
        name: group[""] if list(group) == [""] else nest(group) for name, group in groups.items()
    }
    numbers = [str(number) for number in range(len(nested))]
    return tuple(map(nested.get, numbers)) if nested.keys() == set(numbers) else Named(nested)
