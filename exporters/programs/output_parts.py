"""Packs the outputs of a model into one tensor, and takes them apart again.

`device_agent/formats/packing.py` does the same with numpy arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from device_agent.formats.manifest import SAFE_LIMIT, Part
from device_agent.formats.packing import columns, packed_size

PREFERRED = "logits"
"""If a loss names no output, it takes the one with this name from a dictionary of outputs."""


def pack_outputs(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors (batch, ...) side by side, as one tensor (batch, k).

    A tensor without axes is one number for the batch, which each sample gets.
    """
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
    wide = [tensor if tensor.dim() else tensor.expand(rows) for tensor in tensors]
    # `flatten` would need an axis after the batch.
    return torch.cat([tensor.reshape(rows, -1) for tensor in wide], 1)


def part_of(packed: Tensor, part: Part, parts: Sequence[Part]) -> Tensor:
    """Take one part from a packed tensor (batch, k), in its shape and type.

    The result is contiguous, as layers return it, so that `view` can join the batch with other
    axes.
    """
    own = packed[:, columns(parts)[part.name]].reshape(packed.shape[0], *part.shape).contiguous()
    return own.to(torch.int64) if part.dtype == "int64" else own


def unpack(packed: Tensor, parts: Sequence[Part]) -> Any:
    """Take a packed tensor (batch, k) apart into what the model returns.

    Returns:
        A dictionary; a tuple if the names are numbers; nested if names have dots. A single part
        without a name is the tensor itself.
    """
    if parts[0].name == "":
        return part_of(packed, parts[0], parts)
    return nest({part.name: part_of(packed, part, parts) for part in parts})


def random_labels(parts: Sequence[Part], rows: int, generator: torch.Generator) -> Tensor:
    """Random packed labels: classes, and numbers from 0 to 1."""
    shapes = [(rows, packed_size([part])) for part in parts]
    drawn = [
        torch.randint(part.limit or SAFE_LIMIT, shape, generator=generator).float()
        if part.dtype == "int64"
        else torch.rand(shape, generator=generator)
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


def nest(named: Mapping[str, Any]) -> Any:
    """Nest the values whose names begin alike, such as `boxes.0` and `boxes.1`."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in named.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = value
    nested = {
        name: group[""] if list(group) == [""] else nest(group) for name, group in groups.items()
    }
    numbered = list(nested) == [str(number) for number in range(len(nested))]
    return tuple(nested.values()) if numbered else nested
