"""Several arrays as one, on the page: the same numbers and refusals as the agent's."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_agent.data.packed_arrays import packed_array
from device_agent.formats.manifest import Part
from device_agent.formats.packing import columns, pack, unpack
from page_modules import run_with
from profiles.errors import DataError

pytestmark = pytest.mark.web

PARTS = (
    Part(name="wave", shape=(2, 3), output="numbers"),
    Part(name="word", shape=(2,), dtype="int64", limit=9),
    Part(name="", shape=(), dtype="int64"),
)
SCRIPT = """
const [parts, arrays, indices] = JSON.parse(given[0]);
const filled = parts.map((part) => ({ dtype: "float32", limit: null, output: null, ...part }));
const rows = arrays.map(({ dtype, shape, numbers }) => {
  const [n, ...rowShape] = shape;
  const size = rowShape.reduce((product, side) => product * side, 1);
  const whole = dtype === "int64";
  const data = whole ? BigInt64Array.from(numbers.map(BigInt)) : Float32Array.from(numbers);
  const read = (chosen) => {
    const taken = [...chosen].flatMap((row) => [...data.subarray(row * size, (row + 1) * size)]);
    return { dtype, shape: [chosen.length, ...rowShape], data: data.constructor.from(taken) };
  };
  return { dtype, rowShape, rows: n, read, close() {} };
});
try {
  page.checkParts("y", "a.npz", filled, rows);
  const packed = new page.PackedRows(rows, filled).read(Int32Array.from(indices));
  const { shape, data } = packed;
  const first = { ...packed, shape: [1, shape[1]], data: data.slice(0, shape[1]) };
  const outputs = page
    .outputsOf(first, filled)
    .map(({ name, form, output }) => [name, form, output.shape, [...output.data]]);
  const names = page.arrayNames("y", filled);
  console.log(JSON.stringify({ names, shape, data: [...data], outputs }));
} catch (error) {
  console.log(JSON.stringify({ code: error.code, values: error.fault?.values }));
}
"""


def arrays(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "wave": draw.standard_normal((5, 2, 3), dtype=np.float32),
        "word": draw.integers(9, size=(5, 2)),
        "": draw.integers(2**24, size=5),
    }


def on_page(folder: Path, given: dict[str, np.ndarray], indices: list[int]) -> dict:
    described = [
        {"dtype": str(own.dtype), "shape": own.shape, "numbers": own.ravel().tolist()}
        for own in (given[part.name] for part in PARTS)
    ]
    asked = json.dumps([msgspec.to_builtins(PARTS), described, indices])
    return json.loads(run_with("packing", SCRIPT, folder, asked))


def test_the_page_packs_as_the_agent(tmp_path: Path, seed: int) -> None:
    given, indices = arrays(seed), [3, 0, 4]
    packed = on_page(tmp_path, given, indices)
    expected = pack(given, PARTS)[indices]
    assert packed["names"] == ["y_wave", "y_word", "y"]
    assert packed["shape"] == list(expected.shape)
    np.testing.assert_array_equal(np.float32(packed["data"]), expected.ravel())
    cut = unpack(expected[:1], PARTS)
    for part, (name, form, shape, numbers) in zip(PARTS, packed["outputs"], strict=True):
        assert (name, form, shape) == (part.name, "numbers", [1, *part.shape])
        np.testing.assert_array_equal(np.float32(numbers), cut[part.name].ravel())
    assert list(columns(PARTS)) == ["wave", "word", ""]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("word", lambda own: np.where(np.arange(10).reshape(5, 2) == 7, 9, own)),
        ("word", lambda own: np.where(np.arange(10).reshape(5, 2) == 7, -1, own)),
        ("word", lambda own: np.where(np.arange(10).reshape(5, 2) == 7, -100, own)),
        ("", lambda own: np.where(np.arange(5) == 3, 2**24, own)),
        ("", lambda own: np.where(np.arange(5) == 3, -100, own)),
        ("word", lambda own: own.astype(np.float32)),
        ("wave", lambda own: own.reshape(5, 3, 2)),
    ],
)
def test_the_page_refuses_what_the_agent_refuses(tmp_path: Path, seed: int, name, change) -> None:
    given = arrays(seed)
    given[name] = change(given[name])
    named = {f"y_{key}" if key else "y": own for key, own in given.items()}
    try:
        packed_array("y", named, PARTS, "a.npz")
        code = None
    except DataError as error:
        code = error.code
    refusal = on_page(tmp_path, given, [0])
    assert refusal.get("code", "").split("/")[0] == (
        "data.wrong-shape" if code == "data.wrong-type" else code or ""
    )
    if code is not None:
        assert refusal["values"]["name"] == f"a.npz ({'y_' + name if name else 'y'})"
    if code == "data.number-out-of-range":
        assert refusal["values"]["sample"] == 3
