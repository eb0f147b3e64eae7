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

DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "I64": np.int64}
"""The types that tensors of updates may have."""

ALIGNMENT = 8
"""Tensors begin at multiples of this many bytes in the file."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in the header of a file.

    Its bytes have the positions `data_offsets`, [start, stop), counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read the tensors `names`, or all tensors, from a file. Each tensor gets its own memory.

    If memory runs out, this function raises MemoryError. The reader of the safetensors library
    would end the process instead.

    Raises:
        SafetensorError: The file is not a safetensors file of float32 and int64 tensors, or a
            tensor in `names` is missing.
    """
    with safe_open(path, framework="numpy"):
        pass  # opening checks the header and all offsets
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _header(file.read(length))
        tensors = {}
        for name in header if names is None else names:
            if name not in header:
                raise SafetensorError(f"it lacks the tensor {name!r}")
            entry = decode_json(header[name], Tensor)
            tensors[name] = _tensor(file, 8 + length, entry, name)
    return tensors


def tensors_in(data: bytearray) -> dict[str, np.ndarray]:
    """Read the tensors in `data`, the content of a safetensors file, without copying them.

    Raises:
        SafetensorError: A tensor is not float32 or int64, or is not inside the file.
        MalformedError: `data` does not begin with the header of a safetensors file.
    """
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = _header(bytes(data[8:begin])).items()
    return {name: _view(data, begin, decode_json(raw, Tensor), name) for name, raw in entries}


def _view(data: bytearray, begin: int, entry: Tensor, name: str) -> np.ndarray:
    dtype, (first, end) = _dtype(entry, name), entry.data_offsets
    size = math.prod(entry.shape) * np.dtype(dtype).itemsize
    inside = 0 <= first <= end <= len(data) - begin
    if not inside or end - first != size or min(entry.shape, default=0) < 0:
        raise SafetensorError(f"{name!r} is not inside the file")
    tensor = np.ndarray(entry.shape, dtype, data, begin + first)
    return np.require(tensor, requirements="A")  # other writers may not align their tensors


def _header(data: bytes) -> dict[str, msgspec.Raw]:
    """Decode the header of a file: the entry of each tensor, without the metadata."""
    header = decode_json(data, dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return header


def _dtype(entry: Tensor, name: str) -> type[np.generic]:
    if entry.dtype not in DTYPES:
        raise SafetensorError(f"{name!r} has type {entry.dtype}; the type must be F32 or I64")
    return DTYPES[entry.dtype]


def _tensor(file: BinaryIO, begin: int, entry: Tensor, name: str) -> np.ndarray:
    dtype = _dtype(entry, name)
    file.seek(begin + entry.data_offsets[0])
    # fromfile allocates the array itself, so there is no copy as with frombuffer(file.read()).
    tensor = np.fromfile(file, dtype, math.prod(entry.shape))
    if tensor.size < math.prod(entry.shape):
        raise SafetensorError(f"{name!r} is truncated")
    return tensor.reshape(entry.shape)


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Replace `path` atomically with a safetensors file of float32 and int64 `tensors`."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    # The format requires tensors aligned to their item size, so the widest types come first.
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
