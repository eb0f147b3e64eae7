"""The reader without copies gives what safetensors' own gives."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from device_agent.formats.tensor_files import read_tensors

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
    found, expected = read_tensors(path), load_file(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


HALF = save({"h": np.zeros(2, np.half)})


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 64, HALF])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SafetensorError):
        read_tensors(tmp_path / "x")
