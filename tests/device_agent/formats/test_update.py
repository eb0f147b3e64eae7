"""Updates: written whole or not at all, and never read when anything about them is wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from bundles import everything, flip_a_bit
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import RECORD, TENSORS, UpdateRecord, read_update, write_update
from refusals import refused

Arrays = dict[str, np.ndarray]
TABLE = (
    TensorEntry(name="w", role="parameter", dtype="float32", shape=(2, 3), stands_for="w"),
    TensorEntry(name="n", role="buffer", dtype="int64", shape=(), stands_for="n"),
)
FINE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
WRITTEN = UpdateRecord(
    bundle="b" * 64,
    base="a" * 64,
    submodel="full",
    samples=21,
    steps=10,
    loss_first=2.0,
    loss_last=1.0,
    tensors=TABLE,
    file=fingerprint(b""),
)


@dataclass(frozen=True)
class Wrong:
    """Tensors that do not fit TABLE, and the error for them."""

    tensors: Arrays
    code: str
    values: dict[str, object]


W, N = FINE["w"], FINE["n"]
NOT_FINITE: tuple[str, dict[str, object]] = ("update.not-finite", {"tensor": "w"})


def wrong_shape(dtype: str, shape: list[int]) -> tuple[str, dict[str, object]]:
    return "update.wrong-shape", {
        "tensor": "w", "found_dtype": dtype, "found_shape": shape,
        "expected_dtype": "float32", "expected_shape": [2, 3],
    }  # fmt: skip


WRONG = {
    "nan": Wrong({"w": np.full((2, 3), np.nan, np.float32), "n": N}, *NOT_FINITE),
    "inf": Wrong({"w": np.full((2, 3), -np.inf, np.float32), "n": N}, *NOT_FINITE),
    "one nan": Wrong({"w": np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), "n": N}, *NOT_FINITE),
    "shape": Wrong({"w": W.T.copy(), "n": N}, *wrong_shape("float32", [3, 2])),
    "type": Wrong({"w": W.astype(np.float64), "n": N}, *wrong_shape("float64", [2, 3])),
    "missing": Wrong({"w": W}, "update.missing-tensor", {"tensor": "n"}),
    "extra": Wrong({**FINE, "z": W}, "update.unexpected-tensor", {"tensor": "z"}),
}


def forge(folder: Path, tensors: Arrays, **changes: object) -> Path:
    """An update folder with a correct hash, for valid and invalid content."""
    data = save(tensors)
    record = json.loads(msgspec.json.encode(WRITTEN))
    entry = fingerprint(data)
    record.update(file={"size": entry.size, "sha256": entry.sha256}, **changes)
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps(record))
    (folder / TENSORS).write_bytes(data)
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record = write_update(tmp_path / "update", WRITTEN, FINE)
    again, tensors = read_update(tmp_path / "update")
    assert again == record
    assert set(everything(tmp_path)) == {"update", f"update/{RECORD}", f"update/{TENSORS}"}
    assert record.file == fingerprint((tmp_path / "update" / TENSORS).read_bytes())
    for name, array in FINE.items():
        np.testing.assert_array_equal(tensors[name], array)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_not_written(tmp_path: Path, kind: str) -> None:
    with refused(WRONG[kind].code, **WRONG[kind].values):
        write_update(tmp_path / "update", WRITTEN, WRONG[kind].tensors)
    assert everything(tmp_path) == {}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_not_read(tmp_path: Path, kind: str) -> None:
    folder = forge(tmp_path / "update", WRONG[kind].tensors)
    with refused(WRONG[kind].code, str(folder), **WRONG[kind].values):
        read_update(folder)


@pytest.mark.parametrize("loss", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["loss_first", "loss_last"])
def test_a_loss_that_is_not_finite(tmp_path: Path, which: str, loss: float) -> None:
    record = msgspec.structs.replace(WRITTEN, **{which: loss})
    with refused("update.diverged"):
        write_update(tmp_path / "update", record, FINE)
    assert everything(tmp_path) == {}


def test_an_update_is_never_replaced(tmp_path: Path) -> None:
    write_update(tmp_path / "update", WRITTEN, FINE)
    before = everything(tmp_path)
    with refused("file.exists", path=str(tmp_path / "update")):
        write_update(tmp_path / "update", WRITTEN, FINE)
    assert everything(tmp_path) == before


MALFORMED: tuple[str, dict[str, object]] = ("update.malformed-record", {})


def cut(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1])


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / RECORD).read_bytes())
        (folder / RECORD).write_text(json.dumps({**record, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "code", "values", "named"),
    [
        (lambda f: flip_a_bit(f / TENSORS), "update.altered-file", {"file": TENSORS}, RECORD),
        (cut, "update.altered-file", {"file": TENSORS}, "size or SHA-256"),
        (lambda f: (f / RECORD).unlink(), "update.missing-file", {"file": RECORD}, ""),
        (lambda f: (f / TENSORS).unlink(), "update.missing-file", {"file": TENSORS}, ""),
        (lambda f: (f / RECORD).write_text("{"), *MALFORMED, RECORD),
        (lambda f: (f / RECORD).write_text("[]"), *MALFORMED, RECORD),
        (edit(version=2), "update.wrong-version", {"found": 2, "supported": 1}, RECORD),
        (edit(surprise=1), *MALFORMED, "`surprise`"),
        (edit(samples="many"), *MALFORMED, "Expected `int`"),
        (edit(loss_last=None), *MALFORMED, "Expected `float`"),
    ],
)
def test_a_damaged_update(
    tmp_path: Path,
    damage: Callable[[Path], None],
    code: str,
    values: dict[str, object],
    named: str,
) -> None:
    folder = tmp_path / "update"
    write_update(folder, WRITTEN, FINE)
    damage(folder)
    with refused(code, **values) as caught:
        read_update(folder)
    said = str(caught.value)
    assert str(folder) in said
    assert named in said


def test_something_that_is_no_update(tmp_path: Path) -> None:
    with refused("update.missing-file", str(tmp_path / "nowhere"), file=RECORD):
        read_update(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with refused("update.not-a-folder", path=str(tmp_path / "file")):
        read_update(tmp_path / "file")


def test_tensors_in_another_format(tmp_path: Path) -> None:
    folder = forge(tmp_path / "update", FINE)
    data = b"no safetensors"
    (folder / TENSORS).write_bytes(data)
    entry = fingerprint(data)
    edit(file={"size": entry.size, "sha256": entry.sha256})(folder)
    with refused("update.unreadable-tensors", file=TENSORS):
        read_update(folder)
