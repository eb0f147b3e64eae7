"""A device judges the received model and its own, on samples on which it never trains."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from bundles import CLASSES, BundleOf, read_data, tiny_model, write_data
from device_agent.data.data_checks import MIN_SAMPLES
from device_agent.formats.bundle import manifest_bytes, read_manifest
from device_agent.formats.evaluation_counts import (
    LARGEST_LOSS,
    MOST_EVALUATED,
    EvaluationCounts,
    EvaluationRequest,
    Judgement,
    LocalEvaluation,
    check_counts,
)
from device_agent.formats.manifest import WEIGHTS, encode, uploaded
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.signed_work import work_text
from device_agent.formats.update import RECORD, TENSORS
from device_agent.training.batching import held_out, held_out_for
from device_agent.training.bundle_training import judge_bundle
from device_agent.training.training_options import TrainingOptions
from edgetailor import split
from exporters.export import export
from log_messages import logged
from refusals import refused
from toolkit.families import recovering_family
from toolkit.submodels.global_model import from_model
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.tensor_slices import slice_shapes
from trainings import train_bundle

COUNT = 60
ASKED = EvaluationRequest(share=0.2)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("judged") / "local.npz", count=COUNT)


def torch_counts(model: torch.nn.Module, source: Path, rows: np.ndarray) -> dict[str, Any]:
    """What plain PyTorch counts on the samples `rows`."""
    x, y = (torch.from_numpy(array[rows]) for array in read_data(source))
    with torch.no_grad():
        output = model.eval()(x).double()
    right = output.argmax(dim=1) == y
    classes = tuple(
        (int((y == label).sum()), int(right[y == label].sum())) for label in range(CLASSES)
    )
    loss = float(functional.cross_entropy(output, y, reduction="sum"))
    return {"counted": len(rows), "correct": int(right.sum()), "loss": loss, "classes": classes}


def assert_counts(came: EvaluationCounts, expected: dict[str, Any]) -> None:
    counted = (came.samples, came.counted, came.correct)
    assert counted == (expected["counted"], expected["counted"], expected["correct"])
    # The device sums float32 means of batches.
    assert came.loss_sum == pytest.approx(expected["loss"], rel=1e-5)
    if came.classes is not None:
        assert came.classes == expected["classes"]


def judged(bundle: Path, data: Path, out: Path, **options: Any) -> LocalEvaluation:
    record = train_bundle(bundle, str(data), out, threads=1, **{"evaluation": ASKED, **options})
    evaluation = record.record.evaluation
    assert isinstance(evaluation, LocalEvaluation)
    return evaluation


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("family", ["full", "slice"])
def test_counts_are_those_of_pytorch(
    bundle_of: BundleOf, samples: Path, tmp_path: Path, family: str, by_class: bool
) -> None:
    """A slice judges the whole model: its stages run over the samples first."""
    asked = EvaluationRequest(share=0.2, by_class=by_class)
    came = judged(bundle_of(family), samples, tmp_path / "update", evaluation=asked)
    rows = held_out(COUNT, 0.2)
    model, _ = tiny_model()
    assert_counts(came.before, torch_counts(model, samples, rows))
    trained = load_file(tmp_path / "update" / TENSORS)
    model.load_state_dict({**model.state_dict(), **trained})
    assert_counts(came.after, torch_counts(model, samples, rows))
    assert (came.before.classes is not None) == by_class
    assert came.before.correct != came.after.correct


def test_a_model_that_has_diverged_is_judged_as_the_worst(tmp_path: Path, seed: int) -> None:
    """Without an answer, the device would have no vote against it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    submodel = split(model, "full", (4,))
    for parameter in model.parameters():
        parameter.data *= 1e30
    export(submodel.program, submodel.cut(from_model(model)), tmp_path / "b", base="", check=False)
    draw = np.random.default_rng(seed)
    data = draw.normal(size=(COUNT, 4)).astype(np.float32), draw.integers(3, size=COUNT)
    options = TrainingOptions(evaluation=ASKED)
    came = judge_bundle(tmp_path / "b", data, tmp_path / "update", options)
    assert came is not None
    assert came.counts.loss_sum == LARGEST_LOSS * came.counts.counted > 0
    assert msgspec.json.decode(msgspec.json.encode(came), type=Judgement) == came
    check_counts(came.counts, "This device")


def test_a_reduced_kind_judges_the_reduced_model(
    bundle_of: BundleOf, samples: Path, tmp_path: Path
) -> None:
    bundle = bundle_of("low-rank")
    came = judged(bundle, samples, tmp_path / "update").before
    manifest = read_manifest(manifest_bytes(bundle), bundle)
    received = load_file(bundle / WEIGHTS)
    model, _ = tiny_model()
    whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    table = [entry for entry in uploaded(manifest.tensors) if entry.name in received]
    family = recovering_family(parse_spec(manifest.submodel))
    reduced = family.recover(
        {entry.name: received[entry.name] for entry in table}, table, slice_shapes(table, whole)
    )
    dense = {
        n: value.dense() if isinstance(value, Product) else value for n, value in reduced.items()
    }
    global_counts = torch_counts(model, samples, held_out(COUNT, 0.2))
    model.load_state_dict({**model.state_dict(), **dense})
    assert_counts(came, torch_counts(model, samples, held_out(COUNT, 0.2)))
    assert came.loss_sum != pytest.approx(global_counts["loss"], rel=1e-4)


def test_a_personal_model_is_not_the_received_one(
    bundle_of: BundleOf, samples: Path, tmp_path: Path
) -> None:
    """A device with a personal model judges the received model as a device without one does."""
    kept: dict[str, np.ndarray] = {}
    first = judged(bundle_of("cp"), samples, tmp_path / "first", keep=kept.update)
    again = judged(bundle_of("cp"), samples, tmp_path / "again", personal=kept)
    assert again.before == first.before
    assert again.after != first.after  # it has trained on


def test_training_is_the_same_with_and_without_the_evaluation(
    bundle_of: BundleOf, samples: Path, tmp_path: Path
) -> None:
    """`--validation` holds out the same samples, and only the record differs."""
    evaluated = judged(bundle_of("slice"), samples, tmp_path / "evaluated")
    train_bundle(
        bundle_of("slice"), str(samples), tmp_path / "validated", threads=1, validation=0.2
    )
    tensors = [(tmp_path / name / TENSORS).read_bytes() for name in ("evaluated", "validated")]
    assert tensors[0] == tensors[1]
    record = json.loads((tmp_path / "validated" / RECORD).read_bytes())
    assert "evaluation" not in record
    assert record["samples"] == COUNT - len(held_out(COUNT, 0.2))
    assert record["validation"][-1]["correct"] == evaluated.after.correct
    with_both = judged(bundle_of("slice"), samples, tmp_path / "both", validation=0.1)
    assert with_both == evaluated  # the larger share wins


def test_the_larger_share_includes_the_smaller(tmp_path: Path) -> None:
    rows = [held_out_for(100, TrainingOptions(validation=v, evaluation=ASKED)) for v in (0.0, 0.5)]
    assert set(rows[0]) < set(rows[1])
    assert (len(rows[0]), len(rows[1])) == (20, 50)


def test_a_device_with_too_few_samples_trains_on_all(bundle_of: BundleOf, tmp_path: Path) -> None:
    few = write_data(tmp_path / "few.npz", count=MIN_SAMPLES)
    with logged() as messages:
        done = train_bundle(bundle_of("full"), str(few), tmp_path / "update", evaluation=ASKED)
    assert (done.record.samples, done.record.evaluation) == (MIN_SAMPLES, msgspec.UNSET)
    assert any("does not evaluate models for the federation" in line for line in messages)
    with refused("data.too-few-to-validate"):
        held_out_for(MIN_SAMPLES, TrainingOptions(validation=0.1, evaluation=ASKED))


SOUND = EvaluationCounts(
    samples=10, counted=10, correct=6, loss_sum=4.0, classes=((4, 4), (6, 2), (0, 0))
)


@pytest.mark.parametrize(
    "change",
    [
        {"correct": 11},
        {"samples": 0},
        {"samples": 10**12},
        {"samples": MOST_EVALUATED + 1},
        {"loss_sum": -1e-9},
        {"classes": ((4, 4), (5, 2))},
        {"classes": ((4, 3), (6, 2))},
        {"classes": ((4, 5), (6, 1))},
        {"classes": ()},
        {"correct": None},
    ],
)
def test_impossible_counts_are_refused(change: dict[str, Any]) -> None:
    check_counts(SOUND, "board-1")
    with refused("update.unusable-evaluation"):
        check_counts(msgspec.structs.replace(SOUND, **change), "board-1")


@pytest.mark.parametrize("absolute", [-1e-9, 6.4, float("nan"), float("inf")])
def test_impossible_absolute_errors_are_refused(absolute: float) -> None:
    regression = EvaluationCounts(samples=10, counted=10, loss_sum=4.0, absolute_sum=40**0.5)
    check_counts(regression, "board-1")  # all errors are equal
    with refused("update.unusable-evaluation"):
        check_counts(msgspec.structs.replace(regression, absolute_sum=absolute), "board-1")


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused(loss: float) -> None:
    with refused("update.diverged"):
        check_counts(msgspec.structs.replace(SOUND, loss_sum=loss), "board-1")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9))
def test_counts_of_classes_add_up_to_those_of_all(labels: list[tuple[int, int]]) -> None:
    classes = tuple((right + wrong, right) for right, wrong in labels)
    counts = EvaluationCounts(
        samples=1,
        counted=sum(r + w for r, w in labels),
        correct=sum(r for r, _ in labels),
        loss_sum=0.0,
        classes=classes,
    )
    check_counts(counts, "board-1")
    assert msgspec.json.decode(encode(counts), type=EvaluationCounts) == counts


def test_the_signature_covers_the_request_only_if_there_is_one() -> None:
    work = Work(state="train", round=3, submodel="full", issued=1800000000)
    plain = work_text(work)
    texts = {
        work_text(replace(work, evaluation=asked))
        for asked in (
            ASKED,
            EvaluationRequest(share=0.1),
            EvaluationRequest(share=0.2, by_class=True),
        )
    }
    assert plain.count(b"\n") == 4
    assert len(texts | {plain}) == 4
    assert plain + b"evaluation 200000 by class\n" in texts
