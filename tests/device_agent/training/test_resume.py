"""A killed training resumes from its checkpoint, and its update is the same."""

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundles import BundleOf, everything, rewrite, write_data
from device_agent.training import schedule_interpreter
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_folder import CHECKPOINT, training_folder
from killing import Job, Trainer, training_process
from log_messages import logged
from parameters import long_one
from profiles.errors import InputError
from refusals import refused
from trainings import train_bundle

EPOCHS = 4
SAMPLES = 130
OFTEN_S = 0.005
"""Time between checkpoints, so short that kills fall between checkpoints of one epoch."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with training_process(tmp_path_factory.mktemp("trainer")) as process:
        yield process


@pytest.fixture(scope="module")
def jobs(bundle_of: BundleOf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Trainings of a family with recordings, also in float16, and of one with a personal model."""
    folder = tmp_path_factory.mktemp("jobs")
    data = write_data(folder / "local.npz", count=SAMPLES)
    by_family = {}
    for family in ("slice", "cp"):
        longer = shutil.copytree(bundle_of(family), folder / family)
        rewrite(longer, lambda manifest: shorten(manifest["schedule"][-1]))
        by_family[family] = Job(str(longer), str(data), "", checkpoint_s=OFTEN_S)
    half = shutil.copytree(by_family["slice"].bundle, folder / "half")
    rewrite(half, lambda manifest: [s.update(dtype="float16") for s in manifest["schedule"][:-1]])
    judged = replace(by_family["slice"], evaluation=True)
    return by_family | {
        "float16": replace(by_family["slice"], bundle=str(half)),
        "evaluated": judged,
    }


def shorten(training: dict[str, Any]) -> None:
    """Train EPOCHS epochs, with two runs of a step at most: kills repeat a training many times."""
    training["epochs"] = EPOCHS
    size = training["batch_size"]
    training["batches"] = EPOCHS * -(-SAMPLES // size) - 1  # the last epoch ends early
    for step in training["steps"]:
        step["times"] = min(step["times"], 2)


def placed(job: Job, folder: Path) -> Job:
    """`job` with all of its output in `folder`."""
    folder.mkdir()
    return replace(job, out=str(folder / "update"), personal=str(folder / "own.safetensors"))


def undisturbed(trainer: Trainer, job: Job, folder: Path) -> tuple[dict[str, bytes], float]:
    """Run `job` without a kill; return its output files and its duration in seconds."""
    start = schedule_interpreter.time.monotonic()
    assert trainer.run(placed(job, folder)) == 0
    return everything(folder), schedule_interpreter.time.monotonic() - start


def resumed(trainer: Trainer, job: Job, folder: Path) -> dict[str, bytes]:
    """Start `job` again in `folder`, and return the output files."""
    over = Path(job.out).exists() and not (training_folder(Path(job.out)) / CHECKPOINT).exists()
    assert (trainer.run(job) == 0) != over  # it was killed after the end, so the update exists
    return everything(folder)


def kill_often(
    trainer: Trainer, job: Job, folder: Path, kills: int, order: np.random.Generator
) -> None:
    undisturbed(trainer, job, folder / "first")  # loads the libraries
    expected, seconds = undisturbed(trainer, job, folder / "whole")
    killed = 0
    while killed < kills:
        used = placed(job, folder / str(killed))
        after = float(order.uniform(0, seconds))
        if trainer.kill(used, after) == 0:  # it ended before the kill
            shutil.rmtree(folder / str(killed))
            continue
        update = resumed(trainer, used, folder / str(killed))
        assert update == expected, f"killed after {after} s"
        killed += 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["slice", "float16", "cp"])
def test_killed_at_random_moments(
    trainer: Trainer, jobs: dict[str, Job], tmp_path: Path, family: str, seed: int
) -> None:
    kill_often(trainer, jobs[family], tmp_path, 8, np.random.default_rng(seed))


@pytest.mark.long
@pytest.mark.parametrize("family", ["slice", "cp"])
def test_killed_at_a_hundred_random_moments(
    trainer: Trainer, jobs: dict[str, Job], tmp_path: Path, family: str, seed: int
) -> None:
    kill_often(trainer, jobs[family], tmp_path, 100, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("family", "before", "step"),
    [
        ("slice", True, 8),
        ("evaluated", True, 11),
        long_one(("slice", True, 1)),
        long_one(("evaluated", True, 1)),
        long_one(("float16", True, 1)),
        long_one(("cp", True, 1)),
        # Killed after a write leaves on disk what killed before the next one does.
        long_one(("slice", False, 1)),
        long_one(("cp", False, 1)),
    ],
)
def test_killed_at_every_write(
    trainer: Trainer,
    jobs: dict[str, Job],
    tmp_path: Path,
    family: str,
    before: bool,
    step: int,
    seed: int,
) -> None:
    job = replace(jobs[family], checkpoint_s=60)
    expected, _ = undisturbed(trainer, job, tmp_path / "whole")
    for stop in range(1 + seed % step, 200, step):
        used = placed(job, tmp_path / str(stop))
        status = trainer.run(replace(used, stop=stop, before=before))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert resumed(trainer, used, tmp_path / str(stop)) == expected, f"killed at write {stop}"
    assert stop > 10


class Stopped(KeyboardInterrupt):
    """Stands for the user's Ctrl-C."""


def stop_after(epochs: int) -> schedule_interpreter.OnEpoch:
    def on_epoch(epoch: int, of: int, loss: float) -> None:
        if epoch == epochs:
            raise Stopped

    return on_epoch


def interrupted(job: Job, folder: Path, **options: object) -> Path:
    """Interrupt `job` after two epochs; return the path of its update, which is not there yet."""
    out = folder / "stopped"
    with pytest.raises(Stopped):
        train_bundle(job.bundle, job.data, out, threads=1, on_epoch=stop_after(2), **options)
    assert (training_folder(out) / CHECKPOINT).is_file()
    assert not out.exists()
    return out


@pytest.mark.parametrize("due_at", [0, 38], ids=["never", "in the second stage"])
def test_stages_that_a_kill_repeats(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due_at: int
) -> None:
    """None behind a checkpoint: its source is gone when a stage ends, so there is a newer one."""
    job, begun, opened = jobs["slice"], [], []

    def stop() -> None:
        begun.append(1)
        if len(begun) == 69:  # each of two stages has 33 batches
            raise Stopped

    original = ScheduleRun.open
    with monkeypatch.context() as patched:
        due = lambda timer: len(begun) == due_at  # noqa: E731 - a method in the place of another
        patched.setattr(schedule_interpreter.IntervalTimer, "due", due)
        with pytest.raises(Stopped):
            train_bundle(job.bundle, job.data, tmp_path / "out", threads=1, on_batch=stop)
    assert (training_folder(tmp_path / "out") / CHECKPOINT).exists() == (due_at > 0)
    monkeypatch.setattr(
        ScheduleRun, "open", lambda run, name: (opened.append(name), original(run, name))[1]
    )
    train_bundle(job.bundle, job.data, tmp_path / "out", threads=1)
    stages = [name for name in opened if name.startswith("forward_")]
    assert stages == ([] if due_at else ["forward_0", "forward_1"])
    train_bundle(job.bundle, job.data, tmp_path / "whole", threads=1)
    assert everything(tmp_path / "out") == everything(tmp_path / "whole")


def test_a_resumed_training_does_not_repeat_finished_epochs(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs["slice"]
    out = interrupted(job, tmp_path)
    opened: list[str] = []
    original = ScheduleRun.open
    monkeypatch.setattr(
        ScheduleRun, "open", lambda run, name: (opened.append(name), original(run, name))[1]
    )
    heard: list[int] = []
    with logged() as said:
        record = train_bundle(
            job.bundle, job.data, out, threads=1,
            on_epoch=lambda epoch, of, loss: heard.append(epoch),
        ).record  # fmt: skip
    assert opened == ["train"]
    assert heard == [3, 4]
    assert [line for line in said if not line.startswith("epoch")] == [
        "Continuing the interrupted training: epoch 3, batch 1."
    ]
    assert record == train_bundle(job.bundle, job.data, tmp_path / "whole", threads=1).record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped", "whole"]


@pytest.mark.parametrize("change", ["data", "seed", "validation", "bundle", "damaged", "lost"])
def test_a_training_with_other_inputs_starts_from_the_beginning(
    jobs: dict[str, Job], tmp_path: Path, change: str
) -> None:
    job = jobs["slice"]
    out = interrupted(job, tmp_path)
    bundle, data, options = job.bundle, job.data, dict[str, object]()
    scratch = training_folder(out)
    match change:
        case "data":  # one number of one sample
            with np.load(data) as file:
                x, y = file["x"], file["y"]
            x.flat[0] += 1
            data = str(tmp_path / "other.npz")
            np.savez(data, x=x, y=y)
        case "seed":
            options["seed"] = 1
        case "validation":
            options["validation"] = 0.2
        case "bundle":
            bundle = shutil.copytree(bundle, tmp_path / "bundle")
            rewrite(bundle, lambda manifest: manifest["schedule"][-1].update(epochs=3))
        case "damaged":
            (scratch / CHECKPOINT).write_bytes((scratch / CHECKPOINT).read_bytes()[:-9])
        case "lost":
            for recording in scratch.glob("*.npy"):
                recording.unlink()
    with logged() as said:
        train_bundle(bundle, data, out, threads=1, **options)
    train_bundle(bundle, data, tmp_path / "whole", threads=1, **options)
    assert not any("Continuing" in line for line in said)
    assert everything(out) == everything(tmp_path / "whole")
    assert not scratch.exists()


@pytest.mark.parametrize("file", ["recording", "checkpoint"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, None], ids=["head", "middle", "tail", "emptied"])
def test_a_file_altered_on_disk_costs_only_time(
    jobs: dict[str, Job], tmp_path: Path, file: str, part: float | None
) -> None:
    job = jobs["slice"]
    out = interrupted(job, tmp_path)
    scratch = training_folder(out)
    path = scratch / CHECKPOINT if file == "checkpoint" else next(scratch.glob("*.npy"))
    data = bytearray(path.read_bytes())
    if part is not None:
        data[int(part * len(data))] ^= 16
    path.write_bytes(b"" if part is None else data)
    with logged() as said:
        train_bundle(job.bundle, job.data, out, threads=1)
    train_bundle(job.bundle, job.data, tmp_path / "whole", threads=1)
    assert [line for line in said if not line.startswith("epoch")] == []
    assert everything(out) == everything(tmp_path / "whole")
    assert not scratch.exists()


def test_a_recording_altered_while_it_is_made(
    bundle_of: BundleOf, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedError(KeyboardInterrupt):
        pass

    def stop() -> None:
        begun.append(1)
        if len(begun) == 4:
            raise StoppedError

    begun: list[int] = []
    monkeypatch.setattr(schedule_interpreter, "CHECKPOINT_S", 0.0)
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        train_bundle(bundle_of("slice"), data, out, threads=1, on_batch=stop)
    [recording] = training_folder(out).glob("*.npy")
    data_before = bytearray(recording.read_bytes())
    data_before[200] ^= 16
    recording.write_bytes(data_before)
    train_bundle(bundle_of("slice"), data, out, threads=1)
    train_bundle(bundle_of("slice"), data, tmp_path / "whole", threads=1)
    assert everything(out) == everything(tmp_path / "whole")


def test_an_error_in_the_data_keeps_the_checkpoint(jobs: dict[str, Job], tmp_path: Path) -> None:
    job = jobs["slice"]
    out = interrupted(job, tmp_path)
    before = everything(tmp_path)
    with refused("data.missing-file", path=str(tmp_path / "unplugged.npz")):
        train_bundle(job.bundle, str(tmp_path / "unplugged.npz"), out, threads=1)
    assert everything(tmp_path) == before


def test_only_one_process_trains_an_update(jobs: dict[str, Job], tmp_path: Path) -> None:
    job = jobs["slice"]
    refusals: list[BaseException] = []

    def second(epoch: int, of: int, loss: float) -> None:
        with refused("update.already-training", path=str(tmp_path / "out")) as error:
            train_bundle(job.bundle, job.data, tmp_path / "out", threads=1)
        refusals.append(error.value)

    train_bundle(job.bundle, job.data, tmp_path / "out", threads=1, on_epoch=second)
    assert refusals
    assert all(isinstance(error, InputError) for error in refusals)


def test_recordings_in_memory_are_repeated_after_a_restart(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs["slice"]
    monkeypatch.setattr("device_agent.training.activation_cache.room", lambda folder: 0)
    out = interrupted(job, tmp_path)
    assert [path.name for path in training_folder(out).iterdir()] == [CHECKPOINT]
    heard: list[int] = []
    train_bundle(
        job.bundle, job.data, out, threads=1,
        on_epoch=lambda epoch, of, loss: heard.append(epoch),
    )  # fmt: skip
    assert heard == [3, 4]
    monkeypatch.undo()
    train_bundle(job.bundle, job.data, tmp_path / "whole", threads=1)
    assert everything(out) == everything(tmp_path / "whole")


def test_a_jump_of_the_wall_clock_is_harmless(
    jobs: dict[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs["slice"]
    out = interrupted(job, tmp_path)
    monkeypatch.setattr(schedule_interpreter.time, "time", lambda: 0.0)  # 1970
    train_bundle(job.bundle, job.data, out, threads=1)
    monkeypatch.undo()
    train_bundle(job.bundle, job.data, tmp_path / "whole", threads=1)
    assert everything(out) == everything(tmp_path / "whole")
