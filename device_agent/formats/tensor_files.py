"""Reading and writing safetensors files without a second copy in memory."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from device_agent.formats.atomic_files import stream_file
from profiles.json_decoding import decode_json

DTYPES = {"F32": np.float32, "I64": np.int64}
"""The types that tensors of updates may have."""

ALIGNMENT = 8
"""Tensors begin at multiples of this many bytes in the file."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in the header of a file. `data_offsets` are the bytes [start, stop) after it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read the tensors `names`, or all tensors, from a file; each gets its own memory.

    The reader of the safetensors library ends the process when memory runs out. This one raises
    MemoryError.

    Raises:
        SafetensorError: The file is not a safetensors file of float32 and int64 tensors, or it
            lacks one of `names`.
    """
    with safe_open(path, framework="numpy"):
        pass  # opening checks the header and all offsets
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = decode_json(file.read(length), dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        found = {}
        for name in header if names is None else names:
            if name not in header:
                raise SafetensorError(f"it lacks the tensor {name!r}")
            entry = decode_json(header[name], Tensor)
            found[name] = _tensor(file, 8 + length, entry, name)
    return found


def _tensor(file: BinaryIO, begin: int, entry: Tensor, name: str) -> np.ndarray:
    if entry.dtype not in DTYPES:
        raise SafetensorError(f"{name!r} has type {entry.dtype}; the type must be F32 or I64")
    file.seek(begin + entry.data_offsets[0])
    # fromfile allocates the array itself, so there is no copy as with frombuffer(file.read()).
    found = np.fromfile(file, DTYPES[entry.dtype], math.prod(entry.shape))
    if found.size < math.prod(entry.shape):
        raise SafetensorError(f"{name!r} is truncated")
    return found.reshape(entry.shape)


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Replace `path` atomically with a safetensors file of float32 and int64 `tensors`."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    # The format wants tensors aligned to their item size, so the widest come first.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        header[name] = Tensor(names[array.dtype], array.shape, (begin, end))
    about = msgspec.json.encode(header)
    # JSON allows trailing spaces; they align the first tensor.
    about += b" " * (-len(about) % ALIGNMENT)

    def write(file: BinaryIO) -> None:
        file.write(len(about).to_bytes(8, "little") + about)
        for _, array in ordered:
            file.write(np.ascontiguousarray(array).data)

    stream_file(path, write)
