"""Reading a safetensors file without copying it."""

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES = {"F32": np.float32, "I64": np.int64}
"""What tensors of updates may be."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor in the file's header; `data_offsets` are bytes [start, stop) behind it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name: parts of one buffer, into which it is read once.

    Raises SafetensorError where it is no safetensors file of float32 and int64 tensors.
    """
    with safe_open(path, framework="numpy"):
        pass  # it checks that the header and all offsets are sound
    buffer = np.fromfile(path, np.uint8)
    begin = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
    header = msgspec.json.decode(buffer[8:begin].tobytes(), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    entries = {name: msgspec.json.decode(raw, type=Tensor) for name, raw in header.items()}
    return {name: _tensor(buffer[begin:], entry, name) for name, entry in entries.items()}


def _tensor(data: np.ndarray, entry: Tensor, name: str) -> np.ndarray:
    if entry.dtype not in DTYPES:
        raise SafetensorError(f"{name!r} is {entry.dtype}; F32 and I64 are taken")
    return data[slice(*entry.data_offsets)].view(DTYPES[entry.dtype]).reshape(entry.shape)
