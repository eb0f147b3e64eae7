"""`--runtime auto`: real sessions, and a clock of the test that says how long they took."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bundles import BATCH, EPOCHS, BundleOf, write_data
from commands import Agent
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.manifest import Record
from device_agent.formats.update import TENSORS, read_update
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.fastest_runtime import LEAST_GAIN, Work, work_of
from device_agent.training.trials.runtime_trial import Request, Trial
from parameters import some_long
from runtime_trials import OTHER, OWN, Clocked, Made, choose, never
from trainings import train_bundle

pytest.importorskip("openvino", reason="needs the extra [openvino]")

CASES = [("slice", OTHER, OWN), ("slice", OWN, OTHER), ("full", OTHER, OWN), ("cp", OTHER, OWN)]


@pytest.mark.parametrize(("family", "fast", "slow"), some_long(CASES, *CASES[1:]))
def test_the_faster_one_trains_as_if_it_had_been_given_by_name(
    family: str, fast: str, slow: str, bundle_of: BundleOf, data: str, tmp_path: Path, file: Path
) -> None:
    bundle = open_bundle(bundle_of(family))
    clocked = Clocked({fast: 0.001, slow: 0.002})
    assert choose(bundle, file, clocked) == fast
    assert [one.runtime for one in clocked.tried] == [OTHER, OWN, *([OWN] if fast == OTHER else [])]
    name = "onnxruntime" if fast == OWN else "openvino"
    updates = {}
    for runtime in ("auto", name):
        # The trials are remembered: a new one would show another clock's times.
        found = train_bundle(
            *(bundle.folder, data, tmp_path / runtime),
            **{"runtime": runtime, "threads": 1, "trials": file, "on_batch": lambda: None},
        )
        updates[runtime] = load_file(tmp_path / runtime / TENSORS)
        assert found.record.steps
    assert updates["auto"].keys() == updates[name].keys()
    assert all(np.array_equal(updates["auto"][key], one) for key, one in updates[name].items())


def test_later_rounds_do_not_try_again(full: Bundle, file: Path, said: list[str]) -> None:
    choose(full, file, Made({OWN: 2.0, OTHER: 1.0}))
    said.clear()
    assert choose(full, file, never) == OTHER
    [line] = said
    assert line.startswith("Runtime: openvino 20")
    assert "with onnxruntime 1." in line


@pytest.mark.parametrize("other", ["threads", "memory", "bundle", "graph", "version", "damage"])
def test_what_was_not_tried_is_tried(
    other: str,
    full: Bundle,
    bundle_of: BundleOf,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    choose(full, file, Made({OWN: 2.0, OTHER: 1.0}))
    clocked, options = Made({OWN: 1.0, OTHER: 2.0}), TrainingOptions(threads=1)
    match other:
        case "threads":
            options = TrainingOptions(threads=2)
        case "memory":
            options = TrainingOptions(threads=1, max_memory=10**9)
        case "bundle":
            full = open_bundle(bundle_of("low-rank"))
        case "graph":  # as another version of the server writes it
            full = replace(full, folder=shutil.copytree(full.folder, tmp_path / "later"))
            full.graph("train").write_bytes(full.graph("train").read_bytes() + b"\x12\x00")
        case "version":
            monkeypatch.setattr(
                "device_agent.training.trials.remembered_trials.describe", lambda name: f"{name} 99"
            )
        case _:
            file.write_bytes(file.read_bytes()[:-3])
    assert choose(full, file, clocked, options=options) == OWN
    assert len(clocked.tried) == 2
    assert choose(full, file, never, options=options) == OWN


def test_a_choice_that_cannot_be_remembered_is_made(
    full: Bundle, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "taken").touch()
    assert choose(full, tmp_path / "taken" / "f.json", Made({OWN: 2.0, OTHER: 1.0})) == OTHER
    assert sum("is not remembered" in line for line in said) == 3


def test_before_a_change_the_own_runtime_gets_a_second_trial(full: Bundle, file: Path) -> None:
    """The first was slow because of another program; of each time the shorter counts."""
    times = {OTHER: [(2.0, 1.0)], OWN: [(1.0, 9.0), (5.0, 0.9)]}

    def measure(request: Request) -> Trial:
        start_s, train_s = times[request.runtime].pop(0)
        return Trial(start_s=start_s, train_s=train_s)

    assert choose(full, file, measure) == OWN
    assert times == {OTHER: [], OWN: []}
    [kept] = json.loads(file.read_bytes())["trials"].values()
    assert (kept[OWN]["start_s"], kept[OWN]["train_s"]) == (1.0, 0.9)
    assert choose(full, file, never) == OWN


def gained(share: float) -> dict[str, float]:
    return {OWN: 1.0, OTHER: 1.0 - share}


def test_a_small_gain_is_not_worth_the_memory(full: Bundle, tmp_path: Path) -> None:
    small, large = LEAST_GAIN - 0.01, LEAST_GAIN + 0.01
    assert choose(full, tmp_path / "small", Made(gained(small))) == OWN
    assert choose(full, tmp_path / "large", Made(gained(large))) == OTHER


def test_a_slow_start_is_no_gain_in_a_short_training(full: Bundle, file: Path) -> None:
    def measure(request: Request) -> Trial:
        own = request.runtime == OWN
        return Trial(start_s=0.1 if own else 3.0, train_s=0.2 if own else 0.1)

    assert choose(full, file, measure, Work(starts=1, recorded=0, trained=28)) == OWN
    assert choose(full, file, never, Work(starts=1, recorded=0, trained=35)) == OTHER
    assert choose(full, file, never, Work(starts=2, recorded=0, trained=35)) == OWN


@pytest.mark.parametrize("family", ["full", "slice"])
def test_the_work_is_what_a_training_runs(family: str, bundle_of: BundleOf, tmp_path: Path) -> None:
    """A training announces every batch that it records or trains."""
    bundle = open_bundle(bundle_of(family))
    announced: list[None] = []
    data = write_data(tmp_path / "local.npz", 21)
    record = train_bundle(
        *(bundle.folder, data, tmp_path / "update"), on_batch=lambda: announced.append(None)
    ).record
    work = work_of(bundle, 21, 0)
    stages = sum(isinstance(one, Record) for one in bundle.manifest.schedule)
    assert work.trained == record.steps
    assert work.recorded * stages == len(announced) - record.steps


def test_sessions_start_for_each_size_of_a_batch_and_after_a_validation(full: Bundle) -> None:
    assert work_of(full, 5 * BATCH, 0).starts == 1
    assert work_of(full, 5 * BATCH + 2, 0).starts == 2
    assert work_of(full, 6 * BATCH, BATCH).starts == EPOCHS
    assert work_of(full, 6 * BATCH + 2, BATCH).starts == 2 * EPOCHS


def test_the_command_tries_and_remembers(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = write_data(tmp_path / "local.npz")
    options = ("--data", data, "--runtime", "auto", "--threads", 1)
    done = agent("train", bundle_of("full"), "--out", "one", *options)
    assert done.code == 0
    assert done.stderr.count("Trying") == 2
    [trials] = json.loads((tmp_path / "cache/edgetailor-agent/runtimes.json").read_text())[
        "trials"
    ].values()
    assert trials.keys() == {OWN, OTHER}
    again = agent("train", bundle_of("full"), "--out", "two", *options)
    assert (again.code, again.stderr.count("Trying")) == (0, 0)
    assert read_update(tmp_path / "one")[0].file == read_update(tmp_path / "two")[0].file
