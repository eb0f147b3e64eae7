"""How devices judge the models, from sums only, against the figures of single devices."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from device_agent.formats.evaluation_counts import EvaluationCounts, LocalEvaluation
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.fleet import FederatedEvaluation
from device_agent.formats.protocol.secure_sums import SecureTerms
from device_agent.formats.update import UpdateRecord
from device_agent.privacy.summed_updates import GroupMean, group_mean, update_vector
from toolkit.coordinator.closing.secure_closing import GroupUpdate, summed_evaluation
from toolkit.coordinator.rounds.device_evaluation import DeviceCounts, federated_evaluation
from updates import record_of

TERMS = SecureTerms(fewest=3, most_change=1.0, most_samples=100)
TABLE = (TensorEntry(name="w", role="parameter", dtype="float32", shape=(2,)),)
KINDS = {"full": 4, "width:0.5": 3}


def drawn(draw: np.random.Generator, regression: bool) -> EvaluationCounts:
    counted = int(draw.integers(1, 50))
    loss = float(draw.uniform(0, 3)) * counted
    if regression:
        absolute = 0.5 * np.sqrt(loss * counted)
        return EvaluationCounts(
            samples=counted, counted=counted, loss_sum=loss, absolute_sum=float(absolute)
        )
    correct = int(draw.integers(0, counted + 1))
    return EvaluationCounts(samples=counted, counted=counted, correct=correct, loss_sum=loss)


def summed(records: list[UpdateRecord]) -> GroupMean:
    zeros, total = {"w": np.zeros(2, np.float32)}, np.uint32(0)
    for record in records:
        total = total + update_vector(record, zeros, zeros, TERMS, len(records), seed=1)
    return group_mean(np.asarray(total), TABLE, TERMS, len(records), len(records))


@pytest.mark.parametrize("regression", [False, True])
def test_pooled_figures_are_those_of_single_devices(regression: bool, seed: int) -> None:
    draw, single, groups = np.random.default_rng(seed), [], {}
    for kind, devices in KINDS.items():
        records = [record_of(kind, 10, TABLE)]  # it has too few samples to evaluate
        for _ in range(devices):
            before, after = drawn(draw, regression), drawn(draw, regression)
            single.append(DeviceCounts(kind, before, after))
            own = LocalEvaluation(before=before, after=after)
            records.append(msgspec.structs.replace(records[0], evaluation=own))
        groups[kind] = GroupUpdate([], (records[0], {}), summed(records))
    found, expected = summed_evaluation(5, groups), federated_evaluation(5, single)
    assert found is not None
    assert expected is not None
    assert (found.mean_loss, found.worst_loss, found.worst_accuracy) == (None, None, None)
    assert found.devices == sum(KINDS.values())
    assert found.kinds.keys() == KINDS.keys()
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-3)


def numbers(figure: FederatedEvaluation) -> dict[str, float]:
    """All pooled numbers, also of the kinds."""
    known = msgspec.to_builtins(replace(figure, mean_accuracy=None, mean_loss=None,
                                        worst_accuracy=None, worst_loss=None))  # fmt: skip
    kinds = {f"{k} {n}": v for k, own in known.pop("kinds").items() for n, v in own.items()}
    return {name: value for name, value in (known | kinds).items() if value is not None}


def test_a_group_without_evaluations_has_no_figure() -> None:
    mean = summed([record_of("full", 10, TABLE) for _ in range(3)])
    assert (mean.evaluating, mean.before, mean.after) == (0, None, None)
    assert (
        summed_evaluation(1, {"full": GroupUpdate([], (record_of("full", 10, TABLE), {}), mean)})
        is None
    )
