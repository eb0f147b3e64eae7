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

from bundles import everything
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import RECORD, TENSORS, UpdateRecord, read_update, write_update
from profiles.errors import InputError, UpdateError

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
    """Tensors that do not fit TABLE, and what is said of them."""

    tensors: Arrays
    message: str


W, N = FINE["w"], FINE["n"]
WRONG = {
    "nan": Wrong({"w": np.full((2, 3), np.nan, np.float32), "n": N}, "'w' holds a number that is"),
    "inf": Wrong({"w": np.full((2, 3), -np.inf, np.float32), "n": N}, "'w' .* not finite"),
    "one nan": Wrong(
        {"w": np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), "n": N},
        "training diverged. Lower the learning rate and train again",
    ),
    "shape": Wrong({"w": W.T.copy(), "n": N}, r"'w' is float32 \(3, 2\); .* says float32 \(2, 3\)"),
    "type": Wrong({"w": W.astype(np.float64), "n": N}, r"'w' is float64 \(2, 3\); its bundle says"),
    "missing": Wrong({"w": W}, "the tensor 'n' is missing; the update is not from this bundle"),
    "extra": Wrong({**FINE, "z": W}, "unexpected tensor 'z'; the update is not from this bundle"),
}


def forge(folder: Path, tensors: Arrays, **changes: object) -> Path:
    """An update folder whose hash is right, whatever is in it."""
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
    with pytest.raises(UpdateError, match=WRONG[kind].message):
        write_update(tmp_path / "update", WRITTEN, WRONG[kind].tensors)
    assert everything(tmp_path) == {}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tensors_are_not_read(tmp_path: Path, kind: str) -> None:
    folder = forge(tmp_path / "update", WRONG[kind].tensors)
    with pytest.raises(UpdateError, match=rf"update:? .*{WRONG[kind].message}"):
        read_update(folder)


@pytest.mark.parametrize("loss", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["loss_first", "loss_last"])
def test_a_loss_that_is_not_finite(tmp_path: Path, which: str, loss: float) -> None:
    record = msgspec.structs.replace(WRITTEN, **{which: loss})
    with pytest.raises(UpdateError, match=r"The loss is not finite: .* Lower the learning rate\."):
        write_update(tmp_path / "update", record, FINE)
    assert everything(tmp_path) == {}


def test_an_update_is_never_replaced(tmp_path: Path) -> None:
    write_update(tmp_path / "update", WRITTEN, FINE)
    before = everything(tmp_path)
    with pytest.raises(InputError, match="update exists already"):
        write_update(tmp_path / "update", WRITTEN, FINE)
    assert everything(tmp_path) == before


def flip(folder: Path) -> None:
    data = bytearray((folder / TENSORS).read_bytes())
    data[-1] ^= 1
    (folder / TENSORS).write_bytes(data)


def cut(folder: Path) -> None:
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1])


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / RECORD).read_bytes())
        (folder / RECORD).write_text(json.dumps({**record, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, r"update\.safetensors is not the file that update\.json describes"),
        (cut, r"\(size or SHA-256 differ\): copy the update again"),
        (lambda f: (f / RECORD).unlink(), r"is no update: update\.json is missing"),
        (lambda f: (f / TENSORS).unlink(), r"is no update: update\.safetensors is missing"),
        (lambda f: (f / RECORD).write_text("{"), r"update\.json is not an update record"),
        (lambda f: (f / RECORD).write_text("[]"), r"update\.json is not an update record"),
        (edit(version=2), r"update\.json has version 2; this program reads 1"),
        (edit(surprise=1), r"update\.json is not an update record: .*`surprise`"),
        (edit(samples="many"), r"update\.json is not an update record: Expected `int`"),
        (edit(loss_last=None), r"update\.json is not an update record: Expected `float`"),
    ],
)
def test_a_damaged_update(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "update"
    write_update(folder, WRITTEN, FINE)
    damage(folder)
    with pytest.raises(UpdateError, match=message) as error:
        read_update(folder)
    assert str(folder) in str(error.value)


def test_something_that_is_no_update(tmp_path: Path) -> None:
    with pytest.raises(UpdateError, match=r"nowhere is no update: update\.json is missing"):
        read_update(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UpdateError, match="file is a file; an update is a folder"):
        read_update(tmp_path / "file")


def test_tensors_in_another_format(tmp_path: Path) -> None:
    folder = forge(tmp_path / "update", FINE)
    data = b"no safetensors"
    (folder / TENSORS).write_bytes(data)
    entry = fingerprint(data)
    edit(file={"size": entry.size, "sha256": entry.sha256})(folder)
    with pytest.raises(UpdateError, match=r"update\.safetensors cannot be read"):
        read_update(folder)
