"""The reader without copies gives what safetensors' own gives."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from device_agent.formats.tensor_files import read_tensors, tensors_in
from profiles.json_decoding import MalformedError

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
    st.tuples(shapes, st.sampled_from([np.float32, np.int64])),
    max_size=4,
)
SLOW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(tensors)
def test_it_reads_what_safetensors_reads(
    tmp_path: Path, table: dict[str, tuple[tuple[int, ...], type]]
) -> None:
    draw = np.random.default_rng(0)
    arrays = {n: np.array(draw.normal(size=s) * 100, d) for n, (s, d) in table.items()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(arrays, metadata={"a": "b"}))
    assert_same(read_tensors(path), load_file(path))
    assert_same(tensors_in(bytearray(path.read_bytes())), load_file(path))


def assert_same(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name], array)


HALF = save({"h": np.zeros(2, np.half)})


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 64, HALF])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SafetensorError):
        read_tensors(tmp_path / "x")
    with pytest.raises((SafetensorError, MalformedError)):
        tensors_in(bytearray(data))


def file_of(shape: list[int], first: int, end: int, spaces: int = 0) -> bytearray:
    """A file with 16 bytes after its header, which says where the tensor `x` is."""
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [first, end]}
    header = json.dumps({"x": entry}).encode()
    header += b" " * (-len(header) % 8 + spaces)
    numbers = np.arange(4, dtype=np.float32).tobytes()
    return bytearray(len(header).to_bytes(8, "little") + header + numbers)


@pytest.mark.parametrize(
    ("shape", "first", "end"),
    [([4], 0, 12), ([3], 0, 16), ([4], 4, 20), ([4], -16, 0), ([-4], 0, -16), ([-2, -2], 0, 16)],
)
def test_tensors_outside_the_file_are_refused(shape: list[int], first: int, end: int) -> None:
    data = file_of(shape, first, end)
    with pytest.raises(SafetensorError, match="not inside"):
        tensors_in(data)
    with pytest.raises(SafetensorError):
        load(bytes(data))


def test_tensors_that_are_not_aligned_are_read() -> None:
    data = file_of([2, 2], 0, 16, spaces=3)
    tensor = tensors_in(data)["x"]
    assert tensor.flags.aligned
    np.testing.assert_array_equal(tensor, load(bytes(data))["x"])
