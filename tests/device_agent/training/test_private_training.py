"""A device trains with differential privacy for its samples: bundle, memory and budget."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from torch import nn

from bundles import once, rewrite
from device_agent.cli.train_command import train
from device_agent.federation.device_state import DeviceState
from device_agent.federation.fleet_status import own_lines
from device_agent.federation.spent_privacy import (
    add_spent,
    check_still_private,
    read_spent,
    spent_text,
)
from device_agent.formats.bundle import open_bundle, training_of
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.privacy.sample_accountant import SampleSteps, epsilon_of
from device_agent.training.bundle_training import judge_bundle, local_data
from device_agent.training.memory_estimate import concurrent_peak_bytes, memory_together
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import export
from profiles.cost_model.memory_rule import ONNX
from refusals import refused
from toolkit.planning.submodel_workloads import Known, Workloads
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

CONFIG = TrainingConfig(batch_size=4, epochs=2, sample_clip=1.0, sample_noise=2.0)
SAMPLES = 20
Change = Callable[[dict[str, Any]], object]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(path: Path) -> None:
        submodel = split(model(), "full", (6,), CONFIG)
        values = submodel.cut(from_model(model()))
        export(submodel.program, values, path, base="", check=False)

    return once(tmp_path_factory, "private-bundle", make)


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(SAMPLES, 6)).astype(np.float32), draw.integers(3, size=SAMPLES)


def test_noise_and_batches_are_new_in_each_training(
    bundle: Path, tmp_path: Path, seed: int
) -> None:
    """Who knew the noise could subtract it; so it does not follow from the seed."""
    spent: list[tuple[SampleSteps, float]] = []
    records = [
        train_bundle(
            bundle, data(seed), tmp_path / name, threads=1, summarized=True, validation=0.2,
            spend=lambda steps, delta: spent.append((steps, delta)),
        ).record
        for name in ("one", "two")
    ]  # fmt: skip
    assert records[0].file != records[1].file
    # A summary of the samples and losses would get no noise.
    assert records[0].inputs is msgspec.UNSET
    assert (records[0].loss_first, records[0].loss_last, records[0].validation) == (0, 0, ())
    assert spent == 2 * [(SampleSteps(4 / 16, 2.0, 8), 1e-5)]


def test_a_killed_training_continues_and_counts_all_steps(
    bundle: Path, tmp_path: Path, seed: int
) -> None:
    class Killed(Exception):  # noqa: N818
        pass

    batches = iter(range(7))

    def until_killed() -> None:
        if next(batches, None) is None:  # in the second epoch
            raise Killed

    spent: list[int] = []
    out = tmp_path / "update"
    with pytest.raises(Killed):
        train_bundle(bundle, data(seed), out, on_batch=until_killed)
    record = train_bundle(
        bundle, data(seed), out, spend=lambda steps, _: spent.append(steps.steps)
    ).record
    assert spent == [record.steps] == [10]


def test_a_device_reports_no_counts(bundle: Path, tmp_path: Path, seed: int) -> None:
    """A coordinator may ask for them; they have no noise."""
    asked = EvaluationRequest(share=0.5)
    trained = train_bundle(bundle, data(seed), tmp_path / "update", evaluation=asked)
    assert trained.record.evaluation is msgspec.UNSET
    options = TrainingOptions(evaluation=asked)
    assert judge_bundle(bundle, data(seed), tmp_path / "judged", options) is None


def test_the_memory_has_one_sample_and_the_sums(bundle: Path) -> None:
    """One sample, the parameters, velocities, sums and new gradients, and both sessions."""
    manifest = open_bundle(bundle).manifest
    numbers = 5 * 6 + 5 + 3 * 5 + 3
    memories = memory_together(manifest, ["gradient", "apply"])
    assert memories is not None
    gradient, apply = memories
    assert gradient.inputs - gradient.state == 4 * 6 + 8
    assert gradient.outputs == 4 * numbers + 4
    kept = gradient.kept + apply.kept
    batch = max(4 * 6 + 8 + 4 * numbers + 4, apply.inputs - apply.state + apply.outputs)
    expected = ONNX.session_bytes + 4 * 3 * numbers + batch + kept
    assert concurrent_peak_bytes(manifest, ["gradient", "apply"]) == expected


def test_a_plan_predicts_the_same_memory(bundle: Path) -> None:
    known = Workloads(model(), (6,), CONFIG, cache=None).of("full")
    assert isinstance(known, Known)
    manifest = open_bundle(bundle).manifest
    gradient, apply = known.work.training
    assert (gradient.times, apply.times) == (4, 1)
    numbers = 5 * 6 + 5 + 3 * 5 + 3
    assert known.work.state == 4 * 3 * numbers
    memories = memory_together(manifest, ["gradient", "apply"])
    assert memories is not None
    for planned, own in zip((gradient, apply), memories, strict=True):
        assert (planned.inputs, planned.state) == (own.inputs, own.state)


def step(manifest: dict[str, Any], number: int) -> dict[str, Any]:
    return manifest["schedule"][0]["steps"][number]  # type: ignore[no-any-return]


CHANGES: dict[str, Change] = {
    "no privacy": lambda m: m["schedule"][0].pop("privacy"),
    "a batch for the sample": lambda m: step(m, 0).pop("each_sample"),
    "several times": lambda m: step(m, 0).update(times=2),
    "samples in the second step": lambda m: m["signatures"]["apply"]["inputs"].append(
        m["signatures"]["gradient"]["inputs"][0]
    ),
    "another output": lambda m: m["signatures"]["gradient"]["outputs"].append(
        {**m["signatures"]["apply"]["outputs"][0]}
    ),
    "another metric": lambda m: m["signatures"]["gradient"]["outputs"].append(
        {"name": "x0", "kind": "metric", "dtype": "float32", "shape": []}
    ),
    "a gradient of nothing": lambda m: m["signatures"]["apply"]["inputs"].append(
        {"name": "g", "kind": "gradient", "dtype": "float32", "shape": [1]}
    ),
    "rows by class": lambda m: m["tensors"][0].update(by_class=True),
    "classes of all samples": lambda m: m["signatures"]["gradient"]["inputs"].append(
        {"name": "classes", "kind": "classes", "dtype": "float32", "shape": [3]}
    ),
    "a recording": lambda m: m["schedule"].insert(
        0, {"do": "record", "signature": "predict", "source": "x", "target": "a"}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_bundles_that_could_leak_samples_are_refused(
    change: str, bundle: Path, tmp_path: Path
) -> None:
    for name in bundle.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    rewrite(tmp_path, CHANGES[change])
    with refused("bundle.not-private"):
        open_bundle(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("noise_multiplier", 1e-200), ("clip", 1e300)])
def test_numbers_with_which_noise_means_nothing_are_refused(
    key: str, value: float, bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "bundle")
    rewrite(tmp_path / "bundle", lambda m: m["schedule"][0]["privacy"].update({key: value}))
    with refused("bundle.malformed-manifest") as caught:
        open_bundle(tmp_path / "bundle")
    assert f"privacy.{key}" in str(caught.value)


def test_a_graph_learns_nothing_from_seeds_and_stops_no_training(
    bundle: Path, tmp_path: Path, seed: int
) -> None:
    """Known seeds would tell how many samples came before; a loss could tell what a sample is."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    port = {"name": "seed", "kind": "seed", "dtype": "int64", "shape": []}
    rewrite(folder, lambda m: m["signatures"]["gradient"]["inputs"].append(port))

    def seeds_of(stream: int) -> list[int]:
        opened, seen = open_bundle(folder), []
        instruction, local = training_of(opened), local_data(opened, data(seed))
        gradients = opened.manifest.signatures["gradient"].outputs

        def run(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            seen.append(int(feeds["seed"]))
            return {p.name: np.full(p.shape, math.nan, np.float32) for p in gradients}  # type: ignore[arg-type]

        made = ScheduleRun(
            opened, local, tmp_path, TrainingOptions(seed=seed), {},
            random_bytes=np.random.default_rng(stream).bytes,
        )  # fmt: skip
        made.state = {e.name: np.zeros(e.shape, np.float32) for e in opened.manifest.tensors}
        sessions: Any = {"gradient": SimpleNamespace(run=run)}
        assert (
            made.private_gradients(instruction, instruction.steps[0], sessions, local.y[:5]) == []
        )
        assert all(np.isfinite(total).all() for total in made.gradients.values())
        return seen

    assert len(set(seeds_of(1))) == 5
    assert seeds_of(1) == seeds_of(1)
    assert not set(seeds_of(1)) & set(seeds_of(2))


def test_training_without_a_coordinator_tells_what_it_spends(
    bundle: Path, tmp_path: Path, seed: int, said: list[str]
) -> None:
    x, y = data(seed)
    np.savez(tmp_path / "local.npz", x=x, y=y)
    arguments = [str(bundle), "--data", str(tmp_path / "local.npz"), "--out", str(tmp_path / "u")]
    result = CliRunner().invoke(train, arguments, catch_exceptions=False)
    assert result.output == f"full: 10 steps on 20 samples; update: {tmp_path / 'u'}\n"
    epsilon = epsilon_of([SampleSteps(4 / SAMPLES, 2.0, 10)], 1e-5)
    spends = f"This training spends epsilon {epsilon:.3g} at delta 1e-05 "
    assert any(line.startswith(spends) for line in said)


def test_other_bundles_have_no_new_fields() -> None:
    """Older agents refuse fields that they do not know, so other bundles leave them out."""
    usual = split(model(), "full", (6,), TrainingConfig()).program
    written = msgspec.json.encode(usual.schedule)
    assert b"privacy" not in written
    assert b"each_sample" not in written


@pytest.mark.parametrize(("key", "value"), [("noise_multiplier", 1.9), ("delta", 2e-5)])
def test_a_device_refuses_bundles_with_less_noise_than_before(
    key: str, value: float, bundle: Path, tmp_path: Path
) -> None:
    """Or with a larger delta, which makes the epsilon that its owner reads smaller."""
    state = DeviceState(tmp_path)
    shutil.copytree(bundle, state.bundle)
    check_still_private(state.privacy, state.sample_privacy())
    for noise in (3.0, 2.0):
        add_spent(state.privacy, SampleSteps(0.2, noise, 1), 1e-5)
    check_still_private(state.privacy, state.sample_privacy())
    rewrite(state.bundle, lambda m: m["schedule"][0]["privacy"].update({key: value}))
    with refused("trust.less-sample-privacy", noise=2.0, delta=1e-5):
        check_still_private(state.privacy, state.sample_privacy())
    state.privacy.write_text('{"delta": 1e-5, "steps": []}')
    with refused("state.unreadable-privacy", path=str(state.privacy)):
        check_still_private(state.privacy, state.sample_privacy())


def test_what_is_spent_adds_up(tmp_path: Path) -> None:
    file = tmp_path / "privacy.json"
    assert spent_text(file) is None
    for steps in (SampleSteps(0.01, 4.0, 4000), SampleSteps(0.01, 4.0, 6000)):
        add_spent(file, steps, 1e-5)
    assert spent_text(file) == "epsilon 1.04 at delta 1e-05 after 10,000 steps"
    add_spent(file, SampleSteps(1.0, 5.0, 1), 1e-6)
    spent = read_spent(file)
    assert spent is not None
    assert (spent.delta, spent.steps) == (1e-6, ((0.01, 4.0, 10_000), (1.0, 5.0, 1)))
    file.write_text("{")
    with refused("state.unreadable-privacy", path=str(file)):
        add_spent(file, SampleSteps(1.0, 5.0, 1), 1e-6)
    assert file.read_text() == "{"
    (told,) = own_lines(tmp_path)  # `status` tells it, and all else
    assert told.startswith(f"{file} cannot be read: ")
