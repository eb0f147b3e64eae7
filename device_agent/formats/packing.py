"""Packs several arrays into one, because a bundle has one array of samples, labels and outputs.

Each array, or part, is flattened to (n, k) and converted to float32. The parts are side by side on
axis 1.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from device_agent.formats.manifest import SAMPLES, Manifest, Part

LARGEST_ID = 2**24
"""float32 holds all integers below this number exactly."""


def size_of(part: Part) -> int:
    """How many numbers a sample has in `part`."""
    return math.prod(part.shape)


def packed_size(parts: Sequence[Part]) -> int:
    """How many numbers a sample has in all `parts`."""
    return sum(map(size_of, parts))


def array_name(prefix: str, part: Part) -> str:
    """The name of a part's array in a file: `x_NAME` or `y_NAME`.

    Examples:
        >>> array_name("y", Part(name="box", shape=(4,))), array_name("y", Part(name="", shape=()))
        ('y_box', 'y')
    """
    return f"{prefix}_{part.name}" if part.name else prefix


def in_files(parts: Sequence[Part]) -> list[Part]:
    """The `parts` that files contain. No file contains labels with a limit of 0."""
    return [part for part in parts if part.limit != 0]


def columns(parts: Sequence[Part]) -> dict[str, slice]:
    """The columns of each part in the packed array, by name.

    Examples:
        >>> columns([Part(name="box", shape=(2, 2)), Part(name="kind", shape=())])
        {'box': slice(0, 4, None), 'kind': slice(4, 5, None)}
    """
    slices, start = {}, 0
    for part in parts:
        slices[part.name] = slice(start, start + size_of(part))
        start += size_of(part)
    return slices


def pack(arrays: Mapping[str, np.ndarray], parts: Sequence[Part]) -> np.ndarray:
    """Pack arrays (n, *shape), given by the names of their parts, into float32 (n, k)."""
    return np.concatenate(
        [arrays[part.name].reshape(len(arrays[part.name]), -1) for part in parts],
        axis=1,
        dtype=np.float32,
        casting="unsafe",
    )


def unpack(packed: np.ndarray, parts: Sequence[Part]) -> dict[str, np.ndarray]:
    """Take the arrays of all parts from `packed` (n, k), in the shapes and types of the parts.

    Examples:
        >>> parts = [Part(name="box", shape=(2,)), Part(name="kind", shape=(), dtype="int64")]
        >>> unpack(np.array([[0.5, 1.5, 7.0]], np.float32), parts)
        {'box': array([[0.5, 1.5]], dtype=float32), 'kind': array([7])}
    """
    return {
        part.name: packed[:, own].reshape(len(packed), *part.shape).astype(part.dtype, copy=False)
        for part, own in zip(parts, columns(parts).values(), strict=True)
    }


def sample_parts(manifest: Manifest) -> tuple[Part, ...]:
    """The arrays that are packed into the samples of a bundle; empty for samples of one array."""
    return next(
        (
            port.packed
            for signature in manifest.signatures.values()
            for port in signature.inputs
            if port.kind == "samples" and port.name == SAMPLES and port.packed
        ),
        (),
    )


def output_parts(manifest: Manifest, signature: str) -> tuple[Part, ...]:
    """The outputs that `signature` packs into one array. Empty if there is a single output."""
    return manifest.signatures[signature].outputs[0].packed
