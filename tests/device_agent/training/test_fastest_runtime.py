"""`--runtime auto`: real sessions, and a clock of the test that says how long they took."""

import json
import shutil
import sys
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from bundles import BATCH, EPOCHS, SAMPLE_SHAPE, BundleOf, write_data
from commands import Agent
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.manifest import Record
from device_agent.formats.update import TENSORS, read_update
from device_agent.runtime import openvino_runtime
from device_agent.runtime.runtime_choice import alternatives
from device_agent.training.fastest_runtime import (
    LEAST_GAIN,
    Measure,
    Work,
    beside,
    check_agrees,
    with_fastest_runtime,
    work_of,
)
from device_agent.training.memory_fit import needed_bytes
from device_agent.training.memory_limits import DATA, OPTION, SPACE, Ceiling, Usage
from device_agent.training.runtime_option import with_runtime
from device_agent.training.runtime_trial import Request, Trial, try_runtime
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from parameters import some_long
from profiles.errors import BundleError
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

pytest.importorskip("openvino", reason="needs the extra [openvino]")

OWN, OTHER = "onnx", "openvino"
IDLE = Usage(resident=60_000_000, space=0, data=0)
LONG = Work(starts=1, recorded=100, trained=10_000)


@dataclass
class Clocked:
    """Makes trials in this process. Its clocks tick `tick_s[runtime]` whenever they are read."""

    tick_s: dict[str, float]
    tried: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> Trial:
        self.tried.append(request)
        ticks = count()
        return try_runtime(request, lambda: next(ticks) * self.tick_s[request.runtime])


@dataclass
class Made:
    """Makes up trials in which a batch takes `batch_s[runtime]`."""

    batch_s: dict[str, float]
    tried: list[Request] = field(default_factory=list)

    def __call__(self, request: Request) -> Trial:
        self.tried.append(request)
        return Trial(train_s=self.batch_s[request.runtime], losses=(1.0,))


def never(request: Request) -> Trial:
    raise AssertionError(f"{request.runtime} is tried")


def choose(
    bundle: Bundle,
    file: Path,
    measure: Measure,
    work: Work = LONG,
    limits: list[Ceiling] | None = None,
    options: TrainingOptions | None = None,
) -> str:
    """The runtime that is chosen; without `limits`, memory is no obstacle."""
    no_limit = [Ceiling(OPTION, 10**12, IDLE.resident)]
    chosen = with_fastest_runtime(
        *(bundle, work, options or TrainingOptions(threads=1), limits or no_limit, IDLE, file),
        measure=measure,
    )
    assert (chosen.folder, chosen.sha256) == (bundle.folder, bundle.sha256)
    return chosen.manifest.runtime


@pytest.fixture
def full(bundle_of: BundleOf) -> Bundle:
    return open_bundle(bundle_of("full"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "runtimes.json"


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


def test_a_runtime_given_by_name_has_to_agree(full: Bundle, tmp_path: Path) -> None:
    options = TrainingOptions(threads=1)

    def check(name: str, theirs: Trial) -> None:
        ours = Trial(losses=(1.0, 0.8))
        check_agrees(
            *(full, OTHER, options, IDLE, tmp_path / name),
            measure=lambda request: ours if request.runtime == OWN else theirs,
        )

    check("equal", Trial(losses=(1.0, 0.801)))
    check("without memory", Trial(refused="memory ran out"))
    with refused("bundle.other-results", runtime=OTHER):
        check("other", Trial(losses=(1.0, 0.9)))


class Residual(nn.Module):
    """A residual block with layer norm before its layers, as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


def test_no_wrong_gradients_of_layer_norm(seed: int, tmp_path: Path) -> None:
    """OpenVINO 2026.4 computes them from the second residual block on."""
    torch.manual_seed(seed)
    blocks = (Residual(128) for _ in range(3))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.Linear(128, 4))
    training = TrainingConfig(batch_size=BATCH, epochs=EPOCHS, learning_rate=0.2)
    submodel, source = split(model, "full", (64, 128), training), from_model(model)
    bundle = tmp_path / "bundle"
    export(submodel.program, submodel.cut(source), bundle, base=source.fingerprint(), check=False)
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((3 * BATCH, 64, 128), dtype=np.float32)
    y = draw.integers(4, size=3 * BATCH)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    updates = []
    for runtime in ("onnxruntime", "openvino"):
        out = tmp_path / runtime
        options = {"runtime": runtime, "threads": 1, "trials": tmp_path / "trials.json"}
        try:
            train_bundle(bundle, str(tmp_path / "data.npz"), out, **options)
        except BundleError as error:
            found = (runtime, error.code)
        else:
            found = None
        if found is not None:
            assert found == ("openvino", "bundle.other-results")
            return
        updates.append(load_file(out / TENSORS))
    ours, theirs = updates
    for name, value in ours.items():
        assert np.abs(theirs[name] - value).max() <= 1e-3 * np.abs(value).max(), name


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
                "device_agent.training.remembered_trials.describe", lambda name: f"{name} 99"
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


def export_model(model: nn.Module, out: Path) -> Bundle:
    config = TrainingConfig(batch_size=BATCH)
    submodel, source = split(model, "full", SAMPLE_SHAPE, config), from_model(model)
    export(submodel.program, submodel.cut(source), out, base=source.fingerprint(), check=False)
    return open_bundle(out)


class Reader(nn.Module):
    """An LSTM, which OpenVINO cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x[:, 0])[0][:, -1])


def test_a_runtime_that_refuses_the_graph_is_passed_over(
    tmp_path: Path, file: Path, said: list[str]
) -> None:
    bundle = export_model(Reader(), tmp_path / "bundle")
    clocked = Clocked({OTHER: 1.0})
    assert choose(bundle, file, clocked) == OWN
    assert [request.runtime for request in clocked.tried] == [OTHER], "there is nothing to compare"
    assert any("passed over" in line and "Scan" in line for line in said)
    assert choose(bundle, file, never) == OWN


def test_dropout_is_passed_over_without_a_trial(
    tmp_path: Path, file: Path, said: list[str]
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    bundle = export_model(model, tmp_path / "bundle")
    assert choose(bundle, file, never) == OWN
    assert any("passed over" in line and "dropout" in line for line in said)
    assert not file.exists()


def test_kept_kernels_are_passed_over(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_runtime, "keeps_kernels", lambda: True)
    assert choose(full, file, Clocked({OTHER: 1.0})) == OWN
    assert any("passed over" in line and "weights of the first step" in line for line in said)


def test_memory_limits_hold_for_trials_and_for_trainings(
    full: Bundle, file: Path, said: list[str]
) -> None:
    need = needed_bytes(with_runtime(full, "openvino").manifest, False)
    assert need is not None

    def limit(more: int) -> list[Ceiling]:
        return [Ceiling(OPTION, IDLE.resident + need[0] + more, IDLE.resident)]

    options = TrainingOptions(threads=1, max_memory=10**9)
    assert choose(full, file, never, limits=limit(-1), options=options) == OWN
    assert OPTION in said[0]
    # It would fit alone, but a trial is beside the agent.
    assert choose(full, file, never, limits=limit(IDLE.resident - 1), options=options) == OWN
    assert not file.exists()
    tries = Made({OWN: 2.0, OTHER: 1.0})
    assert choose(full, file, tries, limits=limit(IDLE.resident), options=options) == OTHER
    assert {request.max_memory for request in tries.tried} == {10**9 - IDLE.resident}
    assert choose(full, file, never, limits=limit(0), options=options) == OTHER
    assert choose(full, file, never, limits=limit(-1), options=options) == OWN


def test_without_a_trial_of_its_own_runtime_a_bundle_keeps_it(
    full: Bundle, file: Path, said: list[str]
) -> None:
    def measure(request: Request) -> Trial:
        return Trial(refused="it crashed" if request.runtime == OWN else None, train_s=1.0)

    assert choose(full, file, measure) == OWN
    assert "openvino" in said[-2]
    assert "it crashed" in said[-2]


def test_limits_of_each_process_are_not_shared() -> None:
    limits = [Ceiling(name, 100, 7) for name in (OPTION, SPACE, DATA)]
    idle = Usage(resident=20, space=500, data=300)
    assert [limit.left for limit in beside(limits, idle)] == [73, 93, 93]


def test_without_limits_half_of_the_memory_is_left(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "device_agent.training.fastest_runtime.available_bytes", lambda: 200_000_000
    )
    options = TrainingOptions(threads=1)
    chosen = with_fastest_runtime(full, LONG, options, [], Usage.now(), file, measure=never)
    assert chosen.manifest.runtime == OWN
    assert "half of the available memory" in said[0]


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [
        ((2.301, 1.901, 1.501), True),
        ((2.31, 1.9, 1.5), False),
        ((2.3, 1.93, 1.5), False),
        ((2.3, 1.92, 1.51), True),
        ((2.3, float("nan"), 1.5), False),
    ],
    ids=["rounding", "forward", "gradient", "kink", "not-a-number"],
)
def test_losses_have_to_agree(
    theirs: tuple[float, ...], agree: bool, full: Bundle, file: Path, said: list[str]
) -> None:
    ours = (2.3, 1.9, 1.5)

    def measure(request: Request) -> Trial:
        own = request.runtime == OWN
        return Trial(train_s=2.0 if own else 1.0, losses=ours if own else theirs)

    assert choose(full, file, measure) == (OTHER if agree else OWN)
    assert any("the loss is" in line for line in said) != agree


@pytest.mark.parametrize(
    "theirs",
    [
        Trial(train_s=1.0, losses=(2.3,), changes={"w": [1.0] * 4}),
        Trial(train_s=1.0, losses=(2.3, 1.9)),
        Trial(train_s=1.0, losses=(2.3, 1.9), changes={"v": [1.0] * 4}),
        Trial(train_s=1.0, losses=(2.3, 1.9), changes={"w": [1.0] * 3}),
    ],
    ids=["losses", "no-changes", "other-tensor", "length"],
)
def test_a_damaged_trial_is_passed_over(
    theirs: Trial, full: Bundle, file: Path, said: list[str]
) -> None:
    ours = Trial(train_s=2.0, losses=(2.3, 1.9), changes={"w": [1.0] * 4})
    assert choose(full, file, lambda request: ours if request.runtime == OWN else theirs) == OWN
    assert any("its first steps are not those of" in line for line in said)


def test_only_onnx_bundles_have_a_choice(
    full: Bundle, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alternatives("litert") == ()
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert choose(full, file, never) == OWN
    assert [line.split()[:2] for line in said] == [["Runtime:", "onnxruntime"]]


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
