"""Data files are memory-mapped, not loaded, and checked piece by piece."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bundles import (
    CLASSES,
    SAMPLE_SHAPE,
    BundleOf,
    everything,
    rewrite,
    samples,
    tiny_model,
    write_data,
)
from commands import Agent, refusal, run_code
from device_agent.data import array_files
from device_agent.data.local_data import LocalData, load_data
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.update import read_update
from device_agent.system import disk_space
from device_agent.system.disk_space import MappedArray, open_npy
from device_agent.training.batching import classes_in, held_out
from profiles.errors import DataError, StorageError
from refusals import refused
from trainings import train_bundle

MB = 1 << 20


def load(source: object, unpack_to: Path | None = None) -> LocalData:
    return load_data(str(source), SAMPLE_SHAPE, LabelRule(CLASSES), unpack_to=unpack_to)


def as_folder(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return folder


@pytest.mark.parametrize("kind", ["npz", "folder", "fortran", "format 2"])
def test_files_are_mapped(tmp_path: Path, kind: str) -> None:
    x, y = samples(30, seed=0)
    path = tmp_path / "local.npz"
    match kind:
        case "npz":
            np.savez(path, other=np.arange(7), x=x, y=y)
        case "folder":
            path = as_folder(tmp_path / "local", x, y)
        case "fortran":
            np.savez(path, x=np.asfortranarray(x), y=y)
        case "format 2":
            path = as_folder(tmp_path / "local", x, y)
            with (path / "x.npy").open("wb") as file:
                np.lib.format.write_array(file, x, version=(2, 0))
    local = load(path)
    np.testing.assert_array_equal(local.x, x)
    np.testing.assert_array_equal(local.y, y)
    assert len(local.mapped) == 2
    assert not local.x.flags.writeable
    some = np.array([29, 0, 7])
    np.testing.assert_array_equal(local.samples(some), x[some])


def test_the_fingerprint_does_not_depend_on_the_file_format(tmp_path: Path) -> None:
    x, y = samples(30, seed=0)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "b.npz", y=y, x=x)
    places = [tmp_path / "a.npz", tmp_path / "b.npz", as_folder(tmp_path / "c", x, y)]
    fingerprints = {load(place).fingerprint for place in places}
    assert len(fingerprints) == 1
    x[3, 0, 0, 0] = np.nextafter(x[3, 0, 0, 0], np.float32(9))
    np.savez(tmp_path / "d.npz", x=x, y=y)
    assert load(tmp_path / "d.npz").fingerprint not in fingerprints


PROGRAM = """
import json, sys
given = json.loads(sys.argv[1])
from pathlib import Path
import device_agent.runtime.onnx_runtime
from device_agent.system import process_memory as memory
from device_agent.training.standalone_training import train
memory.reset_peak()
idle = memory.resident_bytes()
done = train(given["bundle"], given["data"], "update", threads=1)
print(json.dumps({"samples": done.samples, "growth": memory.peak_bytes() - idle}))
"""


@pytest.mark.long
def test_training_uses_less_memory_than_its_data(bundle_of: BundleOf, tmp_path: Path) -> None:
    count = 200 * MB // (4 * int(np.prod(SAMPLE_SHAPE)))
    order = np.random.default_rng(0)
    x = np.lib.format.open_memmap(
        tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(count, *SAMPLE_SHAPE)
    )
    x[:] = order.standard_normal(SAMPLE_SHAPE, dtype=np.float32)
    del x
    np.save(tmp_path / "y.npy", order.integers(CLASSES, size=count))
    given = {"bundle": str(quick(bundle_of("slice"), tmp_path)), "data": str(tmp_path)}
    done = run_code(PROGRAM, json.dumps(given), cwd=tmp_path).succeeded()
    memory = json.loads(done.stdout)
    assert memory["samples"] == count
    assert memory["growth"] < 80 * MB  # 35 MB of it are the labels and the order of samples


def quick(bundle: Path, folder: Path) -> Path:
    """A copy of `bundle` that trains in few large batches."""
    shutil.copytree(bundle, folder / "bundle")
    rewrite(
        folder / "bundle",
        lambda manifest: manifest["schedule"][-1].update(epochs=1, batch_size=4096),
    )
    return folder / "bundle"


@pytest.mark.parametrize("held", [True, False])
def test_compressed_arrays_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    x, y = samples(50, seed=0)
    np.savez_compressed(tmp_path / "local.npz", x=x, y=y)
    monkeypatch.setattr(array_files, "IN_MEMORY_BYTES", x.nbytes * 2 if held else x.nbytes)
    local = load(tmp_path / "local.npz", tmp_path / "unpacked")
    np.testing.assert_array_equal(local.x, x)
    np.testing.assert_array_equal(local.y, y)
    assert [array.array is local.x for array in local.mapped] == ([] if held else [True])
    assert (tmp_path / "unpacked" / "x.npy").exists() == (not held)


def test_unpacking_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path / "plain.npz")
    x, y = samples(50, seed=0)
    np.savez_compressed(tmp_path / "local.npz", x=x, y=y)
    monkeypatch.setattr(array_files, "IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(array_files, "room", lambda folder: 1000)
    with refused("storage.too-little-space", needed_bytes=x.nbytes + 128, free_bytes=1000) as error:
        load(tmp_path / "local.npz", tmp_path / "unpacked")
    assert isinstance(error.value, StorageError)
    assert "local.npz is compressed. Unpacking x.npy needs" in str(error.value)
    load(tmp_path / "plain.npz", tmp_path / "unpacked")


def test_int32_numbers_are_converted_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.random.default_rng(0).integers(20, size=(5000, 2)).astype(np.int32)
    np.savez(tmp_path / "local.npz", x=words, y=words[:, 0].astype(np.int64) % 2)
    monkeypatch.setattr(array_files, "IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(array_files, "PIECE_BYTES", 1000)
    local = load_data(
        str(tmp_path / "local.npz"),
        (2,),
        LabelRule(1),
        "int64",
        20,
        unpack_to=tmp_path / "unpacked",
    )
    assert local.x.dtype == np.int64
    assert not local.x.flags.owndata
    np.testing.assert_array_equal(local.x, words)


@pytest.mark.parametrize("row", [0, 17, 49])
@pytest.mark.parametrize(("name", "value"), [("x", np.nan), ("x", -np.inf), ("y", 8), ("y", -1)])
def test_every_piece_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int, name: str, value: float
) -> None:
    monkeypatch.setattr(array_files, "PIECE_BYTES", 500)
    x, y = samples(50, seed=0)
    {"x": x, "y": y}[name][row] = value
    code, values = "data.label-out-of-range", {"label": value}
    if name == "x":
        code, values = "data.not-finite", {"sample": row, "number": str(np.float32(value))}
    with refused(code, **values):
        load(as_folder(tmp_path / "local", x, y))


def test_pieces_cover_the_array_once() -> None:
    array = np.arange(1000).reshape(100, 10)
    for size in (1, 80, 81, 799, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(array_files, "PIECE_BYTES", size)
            parts = [array[rows] for rows in array_files.row_slices(array)]
        np.testing.assert_array_equal(np.concatenate(parts), array)
        assert max(part.nbytes for part in parts) <= max(size, 80)


@pytest.mark.parametrize(
    ("change", "code", "values", "message"),
    [
        ("no labels", "data.missing-array", {"array": "y"}, "has no y.npy"),
        (
            "truncated",
            "data.unreadable-file",
            {"reason": "it is truncated"},
            "local is not a folder of readable .npy files",
        ),
        (
            "objects",
            "data.unreadable-file",
            {"reason": "it contains pickled objects"},
            "local is not a folder of readable .npy files",
        ),
        ("text", "data.unreadable-file", {}, "local is not a folder of readable .npy files"),
        ("one array", "data.unreadable-file", {}, "x.npy is a single array"),
    ],
)
def test_folders_that_hold_no_data(
    tmp_path: Path, change: str, code: str, values: dict[str, object], message: str
) -> None:
    x, y = samples(9, seed=0)
    place = path = as_folder(tmp_path / "local", x, y)
    match change:
        case "no labels":
            (path / "y.npy").unlink()
        case "truncated":
            (path / "x.npy").write_bytes((path / "x.npy").read_bytes()[:-1])
        case "objects":
            np.save(path / "x.npy", np.array([{}, {}], object), allow_pickle=True)
        case "text":
            (path / "x.npy").write_text("1, 2\n")
        case "one array":
            place = path / "x.npy"
    with refused(code, message, path=str(place), **values):
        load(place)


def test_an_empty_array_is_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty((0, 3), np.float32))
    mapped = open_npy(tmp_path / "a.npy")
    assert isinstance(mapped, MappedArray)
    assert mapped.array.shape == (0, 3)


@pytest.mark.parametrize("most", [1, 50, 1 << 30])
def test_rows_in_any_order(
    most: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, one, a run, runs apart, backwards and twice, as numpy indexes them.

    A run is read in pieces of at most so many bytes, and of at least one row of 24.
    """
    monkeypatch.setattr(disk_space, "LARGEST_READ", most)
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((40, 3, 2), np.float32)
    np.save(tmp_path / "a.npy", x)
    mapped = open_npy(tmp_path / "a.npy")
    runs = [np.arange(start, start + 5) for start in draw.integers(35, size=4)]
    for indices in ([], [7], range(40), np.concatenate(runs), range(9, -1, -1), [3, 3, 4, 4]):
        wanted = np.array(indices, np.int64)
        np.testing.assert_array_equal(mapped.rows(wanted), x[wanted])


def test_a_run_of_rows_in_a_file_that_became_shorter(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((40, 3), np.float32))
    mapped = open_npy(tmp_path / "a.npy")
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate((tmp_path / "a.npy").stat().st_size - 1)
    assert len(mapped.rows(np.arange(39))) == 39
    with refused("data.changed-while-read"):
        mapped.rows(np.arange(30, 40))


def test_a_file_that_is_truncated_during_training(bundle_of: BundleOf, tmp_path: Path) -> None:
    source = write_data(tmp_path / "local.npz", count=2000)
    begun: list[int] = []

    def cut() -> None:
        begun.append(1)
        if len(begun) == 10:
            source.write_bytes(b"")  # as numpy.savez does before it writes a file again

    with refused("data.changed-while-read", path=str(source)) as error:
        train_bundle(bundle_of("full"), str(source), tmp_path / "out", threads=1, on_batch=cut)
    assert isinstance(error.value, DataError)
    assert "and rename it" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["local.npz"]


def test_data_with_a_single_class_cause_a_warning(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    x, _ = samples(9, seed=0)
    np.savez(tmp_path / "local.npz", x=x, y=np.full(9, 3))
    done = agent("train", bundle_of("full"), "--data", "local.npz", "--out", "update").succeeded()
    assert done.stderr.startswith(
        "local.npz: every sample has the class 3. The model learns nothing about the other classes "
        "from these data.\n"
        "epoch 1 of 2: loss "
    )


@pytest.mark.parametrize("family", ["full", "slice", "cp"])
def test_validation(bundle_of: BundleOf, tmp_path: Path, family: str, said: list[str]) -> None:
    """The held-out samples are evaluated and not trained on."""
    x, y = samples(40, seed=0)
    np.savez(tmp_path / "all.npz", x=x, y=y)
    apart = held_out(40, 0.25)
    assert len(set(apart.tolist())) == 10
    rest = np.setdiff1d(np.arange(40), apart)
    np.savez(tmp_path / "rest.npz", x=x[rest], y=y[rest])
    record = train_bundle(
        bundle_of(family), str(tmp_path / "all.npz"), tmp_path / "a", threads=1, validation=0.25
    ).record
    said = [line for line in said if ": loss " not in line]
    assert [evaluation.samples for evaluation in record.validation] == [10, 10]
    assert (record.samples, len(said)) == (30, 2)
    last = record.validation[-1]
    assert last.correct is not None
    assert said[-1] == (
        f"epoch 2 of 2: validation loss {last.loss:.4f}, accuracy {last.correct / 10:.1%}"
    )
    train_bundle(bundle_of(family), str(tmp_path / "rest.npz"), tmp_path / "b", threads=1)
    _, trained = read_update(tmp_path / "a")
    _, expected = read_update(tmp_path / "b")
    for name, array in expected.items():
        np.testing.assert_allclose(trained[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_validation_agrees_with_pytorch(bundle_of: BundleOf, tmp_path: Path) -> None:
    """Loss and accuracy of the last epoch are those of PyTorch with the uploaded weights."""
    x, y = samples(40, seed=0)
    np.savez(tmp_path / "local.npz", x=x, y=y)
    record = train_bundle(
        bundle_of("full"), str(tmp_path / "local.npz"), tmp_path / "a", threads=1, validation=0.25
    ).record
    _, tensors = read_update(tmp_path / "a")
    model, _ = tiny_model()
    model.load_state_dict({n: torch.from_numpy(a) for n, a in tensors.items()}, strict=False)
    apart = held_out(40, 0.25)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(x[apart]))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[apart]))
    assert record.validation[-1].loss == pytest.approx(float(loss), rel=1e-4)
    right = int((logits.argmax(1).numpy() == y[apart]).sum())
    assert record.validation[-1].correct == right


def test_too_few_samples_to_validate(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    write_data(tmp_path / "few.npz", count=4)
    before = everything(tmp_path)
    done = agent(
        "train", bundle_of("full"), "--data", "few.npz", "--out", "u", "--validation", "0.1"
    )
    assert refusal(done) == (
        "With a validation share of 0.1, 4 of 4 samples remain for training and 0 for validation. "
        "Training needs at least 2, validation at least 1."
    )
    assert everything(tmp_path) == before


def test_classes_of_the_trained_samples() -> None:
    y = np.array([0, 3, 3, 5])
    np.testing.assert_array_equal(classes_in(y, np.array([0, 1]), 6), [1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(classes_in(np.array([0, 1]), np.arange(2), 1), [1])
