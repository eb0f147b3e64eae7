"""Training real bundles: the update, the personal model, and the files left on the disk."""

import shutil
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from bundles import (
    BATCH,
    EPOCHS,
    FAMILIES,
    BundleOf,
    diverging,
    everything,
    rewrite,
    samples,
    tiny_model,
    write_data,
)
from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.input_summary import summary_of
from device_agent.formats.manifest import Record, Train, uploaded
from device_agent.formats.update import RECORD, read_update
from device_agent.runtime.runtime_choice import Session
from device_agent.training.activation_cache import Recording
from device_agent.training.bundle_training import ScheduleRun
from device_agent.training.schedule_interpreter import ignore_epoch
from device_agent.training.training_options import TrainingOptions
from log_messages import logged
from parameters import some_long
from profiles.errors import BundleError, DataError, EdgeTailorError, InputError, UpdateError
from refusals import refused
from trainings import train_bundle

SAMPLES = 21
BATCHES = SAMPLES // BATCH  # the remaining sample joins the last batch


@pytest.mark.parametrize("bundle", some_long(FAMILIES, "cp"), indirect=True)
def test_every_family_learns(bundle: Path, tmp_path: Path) -> None:
    longer = shutil.copytree(bundle, tmp_path / "bundle")
    rewrite(longer, lambda manifest: manifest["schedule"][-1].update(epochs=10))
    source = str(write_data(tmp_path / "local.npz", count=60))
    record = train_bundle(longer, source, tmp_path / "out", threads=1).record
    assert record.loss_last < record.loss_first


def test_what_training_writes(bundle: Path, data: str, tmp_path: Path) -> None:
    heard: list[tuple[int, int, float]] = []
    trained = train_bundle(
        bundle, data, tmp_path / "out", threads=1, on_epoch=lambda *epoch: heard.append(epoch)
    )
    record, tensors = read_update(tmp_path / "out")
    opened = open_bundle(bundle)
    assert trained.record == record
    assert (record.samples, record.steps) == (SAMPLES, EPOCHS * BATCHES)
    assert (record.bundle, record.base) == (opened.sha256, opened.manifest.base)
    assert record.submodel == opened.manifest.submodel
    assert record.tensors == uploaded(opened.manifest.tensors)
    assert heard == [(1, EPOCHS, record.loss_first), (2, EPOCHS, record.loss_last)]
    sent = opened.load(entry.name for entry in record.tensors)
    assert all(not np.array_equal(tensors[name], sent[name]) for name in sent)


def test_a_summary_of_the_inputs_is_written_only_if_it_is_wanted(
    bundle: Path, data: str, tmp_path: Path
) -> None:
    train_bundle(bundle, data, tmp_path / "plain")
    assert b'"inputs"' not in (tmp_path / "plain" / RECORD).read_bytes()
    train_bundle(bundle, data, tmp_path / "summarized", summarized=True)
    record, _ = read_update(tmp_path / "summarized")
    assert record.inputs == summary_of(np.load(data)["x"])


def test_fewer_samples_than_a_batch_are_said(bundle: Path, tmp_path: Path) -> None:
    size = max(i.batch_size for i in open_bundle(bundle).manifest.schedule if isinstance(i, Train))
    for count, few in ((size, False), (size - 1, True)):
        data = write_data(tmp_path / f"{count}.npz", count)
        with logged() as said:
            train_bundle(bundle, str(data), tmp_path / str(count))
        text = f"{count} samples: fewer than a batch of {size}, so every step trains on all of"
        assert any(line.startswith(text) for line in said) == few


def test_one_thread_and_one_seed_give_the_same_bytes(
    bundle: Path, data: str, tmp_path: Path
) -> None:
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        train_bundle(bundle, data, tmp_path / name, threads=1, seed=seed)
    first, again, other = (everything(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first != other


class GaveUpError(Exception):
    """The user stopped the training."""


def give_up(epoch: int, epochs: int, loss: float) -> None:
    raise GaveUpError


@pytest.mark.parametrize("kind", ["diverged", "bad data", "bad bundle", "stopped"])
def test_a_failure_leaves_nothing_behind(
    bundle: Path, data: str, tmp_path: Path, kind: str
) -> None:
    used, source, on_epoch, error = bundle, data, ignore_epoch, EdgeTailorError
    match kind:
        case "diverged":
            used, error = diverging(bundle, tmp_path / "bundle"), UpdateError
        case "bad data":
            source, error = str(tmp_path / "nowhere.npz"), DataError
        case "bad bundle":
            used, error = tmp_path, BundleError
        case "stopped":
            on_epoch, error = give_up, GaveUpError
    before = everything(tmp_path)
    with pytest.raises(error):
        train_bundle(used, source, tmp_path / "new" / "out", threads=1, on_epoch=on_epoch)
    after = everything(tmp_path)
    after.pop("new", None)
    assert after == before


def test_divergence_suggests_a_lower_learning_rate(bundle: Path, data: str, tmp_path: Path) -> None:
    used = diverging(bundle, tmp_path / "bundle")
    with refused("update.diverged", "ower the learning rate"):
        train_bundle(used, data, tmp_path / "out", threads=1)


@pytest.mark.parametrize("folder", [False, True], ids=["archive", "mapped"])
def test_divergence_names_a_suspiciously_large_value(
    bundle: Path, tmp_path: Path, folder: bool
) -> None:
    x, y = samples(21, seed=0)
    x[17, 0, 2, 3] = -3e38
    source = tmp_path / "local"
    source.mkdir()
    np.save(source / "x.npy", x)
    np.save(source / "y.npy", y)
    if not folder:
        source = tmp_path / "local.npz"
        np.savez(source, x=x, y=y)
    with refused("update.diverged", data=str(source), array="x", sample=17) as error:
        train_bundle(bundle, str(source), tmp_path / "out", threads=1)
    assert f"in {source}, x[17] is -3e+38" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_divergence_ends_the_training_at_once(bundle: Path, data: str, tmp_path: Path) -> None:
    ended: list[int] = []
    used = diverging(bundle, tmp_path / "bundle")
    with refused("update.diverged") as error:
        train_bundle(
            used, data, tmp_path / "out", threads=1, on_epoch=lambda *epoch: ended.append(epoch[0])
        )
    assert isinstance(error.value, UpdateError)
    assert str(error.value).endswith("Lower the learning rate.")
    assert not ended


def test_success_leaves_only_the_update(bundle: Path, data: str, tmp_path: Path) -> None:
    train_bundle(bundle, data, tmp_path / "out", threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_update_is_not_touched(bundle: Path, data: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="out exists already"):
        train_bundle(bundle, data, tmp_path / "out")
    assert everything(tmp_path) == {"out": b"folder"}


class Watched(ScheduleRun):
    """Records which tensors are in memory each time a session is opened."""

    def watch(self) -> None:
        self.held: list[tuple[str, set[str]]] = []
        self.opened: list[weakref.ref[Session]] = []

    def open(self, name: str) -> Session:
        assert not any(session() for session in self.opened), "the stage before is still there"
        session = super().open(name)
        self.held.append((name, set(self.state)))
        self.opened.append(weakref.ref(session))
        return session


def watched(bundle: Bundle, scratch: Path, samples_: LocalData) -> Watched:
    run = Watched(bundle, samples_, scratch, TrainingOptions(threads=1), {})
    run.watch()
    return run


@pytest.fixture
def local() -> LocalData:
    return LocalData(*samples(SAMPLES, seed=0))


def recordings(bundle: Bundle) -> list[Record]:
    return [step for step in bundle.manifest.schedule if isinstance(step, Record)]


def test_slice_holds_one_stage_at_a_time(
    bundle_of: BundleOf, tmp_path: Path, local: LocalData
) -> None:
    bundle = open_bundle(bundle_of("slice"))
    run = watched(bundle, tmp_path, local)
    stages = recordings(bundle)
    assert len(stages) == 2
    for stage in stages:
        run.record(stage)
        assert run.state == {}
        assert [path.name for path in tmp_path.iterdir()] == [f"{stage.target}.npy"]
    run.run_schedule()
    for name, held in run.held:
        ports = bundle.manifest.signatures[name].inputs
        assert held == {port.state for port in ports if port.state is not None}
    frozen = [frozen_names(bundle, name) for name, _ in run.held]
    assert frozen[0]
    assert frozen[1]
    assert frozen[0].isdisjoint(frozen[1])
    assert not frozen[-1]


def frozen_names(bundle: Bundle, signature: str) -> set[str]:
    """The model's tensors that are constants in the graph of `signature`."""
    model, _ = tiny_model()
    graph = onnx.load(bundle.graph(signature)).graph
    return {tensor.name for tensor in graph.initializer} & model.state_dict().keys()


def test_slice_records_what_the_prefix_computes(
    bundle_of: BundleOf, tmp_path: Path, local: LocalData
) -> None:
    bundle = open_bundle(bundle_of("slice"))
    run = watched(bundle, tmp_path, local)
    *_, last = stages = recordings(bundle)
    for stage in stages:
        run.record(stage)
    model, _ = tiny_model()
    model.eval()
    with torch.no_grad():
        expected = model[:-1](torch.from_numpy(local.x)).numpy()  # type: ignore[index]
    on_disk = np.load(tmp_path / f"{last.target}.npy", mmap_mode="r")
    np.testing.assert_allclose(on_disk, expected, rtol=1e-4, atol=1e-5)
    some = np.array([5, 0, 20])
    np.testing.assert_array_equal(run.recordings[last.target].read(some), on_disk[some])


def test_slice_changes_only_what_it_trains(bundle_of: BundleOf, data: str, tmp_path: Path) -> None:
    record = train_bundle(bundle_of("slice"), data, tmp_path / "out", threads=1).record
    assert [entry.name for entry in record.tensors] == ["classifier.weight", "classifier.bias"]


def test_a_recording_that_does_not_fit_the_disk(tmp_path: Path) -> None:
    with refused("storage.too-little-space", path=str(tmp_path), needed_bytes=4 * 10**15) as error:
        Recording(tmp_path / "r.npy", 10**9, (10**6,))
    assert 0 < int(str(error.value.values["free_bytes"])) < 4 * 10**15
    assert everything(tmp_path) == {}


def test_the_personal_model_stays_and_is_trained_further(
    bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    bundle = open_bundle(bundle_of("cp"))
    own = {e.name: e.shape for e in bundle.manifest.tensors if e.role == "personal"}

    def trained(name: str, kept: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        given = {} if kept is None else {key: array.copy() for key, array in kept.items()}
        done = train_bundle(bundle.folder, data, tmp_path / name, threads=1, personal=given)
        _, tensors = read_update(tmp_path / name)
        assert own.keys().isdisjoint(tensors)
        assert {key: array.shape for key, array in done.personal.items()} == own
        assert all(np.array_equal(given[key], kept[key]) for key in kept or {})
        return done.personal

    first = trained("first", None)
    second = trained("second", first)
    for name in own:
        assert not np.array_equal(second[name], first[name])
    assert distance(first, trained("afresh", None)) == 0
    assert distance(second, first) > 0


def test_the_personal_model_starts_where_it_was_left(
    bundle_of: BundleOf, tmp_path: Path, local: LocalData
) -> None:
    bundle = open_bundle(bundle_of("cp"))
    entries = [e for e in bundle.manifest.tensors if e.role == "personal"]
    kept = {e.name: np.full(e.shape, 0.5, np.float32) for e in entries}
    run = ScheduleRun(bundle, local, tmp_path, TrainingOptions(threads=1), dict(kept))
    run.initialise(bundle.manifest.schedule[0])  # type: ignore[arg-type]
    run.open("personal_step")
    assert all(np.array_equal(run.state[name], kept[name]) for name in kept)


def distance(tensors: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(sum(np.linalg.norm(tensors[name] - other[name]) for name in tensors))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "cp"])
def test_other_families_keep_nothing(
    bundle_of: BundleOf, data: str, tmp_path: Path, family: str
) -> None:
    assert train_bundle(bundle_of(family), data, tmp_path / "out", threads=1).personal == {}


@pytest.mark.parametrize("count", [2, 3, BATCH + 1])
def test_few_samples(bundle: Path, tmp_path: Path, count: int) -> None:
    source = str(write_data(tmp_path / "few.npz", count))
    record = train_bundle(bundle, source, tmp_path / "out", threads=1).record
    assert (record.samples, record.steps) == (count, EPOCHS)
