"""A device trains with differential privacy for its samples: bundle, memory and budget."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import nn

from bundles import once, rewrite
from device_agent.federation.spent_privacy import add_spent, read_spent, spent_text
from device_agent.formats.bundle import open_bundle
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.privacy.sample_accountant import SampleSteps
from device_agent.training.bundle_training import judge_bundle
from device_agent.training.memory_estimate import concurrent_peak_bytes, memory_together
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
            bundle, data(seed), tmp_path / name, threads=1, summarized=True,
            spend=lambda steps, delta: spent.append((steps, delta)),
        ).record
        for name in ("one", "two")
    ]  # fmt: skip
    assert records[0].file != records[1].file
    assert records[0].inputs is msgspec.UNSET  # a summary of the samples would get no noise
    assert spent == 2 * [(SampleSteps(4 / SAMPLES, 2.0, 10), 1e-5)]


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
    "classes": lambda m: m["tensors"][0].update(by_class=True),
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


def test_other_bundles_have_no_new_fields() -> None:
    """Older agents refuse fields that they do not know, so other bundles leave them out."""
    usual = split(model(), "full", (6,), TrainingConfig()).program
    written = msgspec.json.encode(usual.schedule)
    assert b"privacy" not in written
    assert b"each_sample" not in written


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
