"""Updates of finite numbers with which no device could train on are left out, and named."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from device_agent.formats.update import MOST_SAMPLES
from hostile_fleet import SPECS, HostileFleet, with_tensor
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.closing.round_aggregation import RoundAggregation

HUGE = (1e6, -1e6, 1e12, -1e12, 1e20, -1e20, 1e38, -1e38)
TINY = (0.0, 1e-42, -1e-42, 1e-30)
OTHERS = ("full", "width:0.5", "low-rank:0.5,keep=1", "cp:2.0", "full", "pfedme", "full")
"""The other devices; the first two and a half of them hold every tensor of any device."""


@pytest.fixture(scope="module")
def fleet() -> HostileFleet:
    return HostileFleet()


attacks = given(
    kind=st.sampled_from(SPECS),
    others=st.sampled_from([1, 2, 9]),
    tensor=st.integers(0, 99),
    value=st.sampled_from(HUGE + TINY),
    whole=st.booleans(),
)


@settings(max_examples=5)
@attacks
def test_one_device_cannot_end_the_training_of_the_others(
    fleet: HostileFleet, kind: str, others: int, tensor: int, value: float, whole: bool
) -> None:
    check_attack(fleet, kind, others, tensor, value, whole)


@pytest.mark.long
@settings(max_examples=100)
@attacks
def test_no_device_of_many_can_end_the_training_of_the_others(
    fleet: HostileFleet, kind: str, others: int, tensor: int, value: float, whole: bool
) -> None:
    check_attack(fleet, kind, others, tensor, value, whole)


def check_attack(
    fleet: HostileFleet, kind: str, others: int, tensor: int, value: float, whole: bool
) -> None:
    updates = fleet.first_round([kind, *(OTHERS * 2)[:others]])
    arrays = dict(updates[0][1])
    name = sorted(arrays)[tensor % len(arrays)]
    spoilt = np.full_like(arrays[name], value) if whole else arrays[name].copy()
    spoilt.flat[0] = value
    with tempfile.TemporaryDirectory() as folder:
        done = fleet.fold(Path(folder), [with_tensor(updates[0], name, spoilt), *updates[1:]])
    about = {e.name: e.stands_for for e in updates[0][0].tensors}[name]
    # A variance of 1e6 is a deviation of 1,000. In honest rounds a device whose inputs are a
    # thousand times too large had up to 2,400 times the deviation of the others. The coordinator's
    # samples are like the others' and tell no more. What a device says of its inputs would, but
    # whoever makes numbers up says what fits. So it need not be named; the others train on.
    possible = value == 1e6 and str(about).endswith("running_var")
    if value in HUGE and not possible:
        assert list(done.left_out) == ["device-0"]
        assert name in done.left_out["device-0"] or str(about) in done.left_out["device-0"]
    else:
        assert set(done.left_out) <= {"device-0"}
    fleet.train("full", 1)  # an honest device does not diverge
    kept = fleet.federation.model.kept.values()
    assert all(bool((factor.abs() < 1e3).all()) for own in kept for factor in own.values())


@pytest.mark.parametrize("value", [1e6, 1e20, 1e38])
def test_a_tensor_that_only_the_hostile_device_holds(
    fleet: HostileFleet, tmp_path: Path, value: float
) -> None:
    updates = fleet.first_round(["full", "slice:residual", "slice:residual"])
    for number, name in enumerate(("conv.weight", "bn.weight", "bn.running_var", "strided.bias")):
        spoilt = with_tensor(updates[0], name, np.full_like(updates[0][1][name], value))
        done = fleet.fold(tmp_path / str(number), [spoilt, *updates[1:]])
        # The scale of lone statistics is the data's: only absurd ones are left out.
        bounded = name != "bn.running_var" or value > 1e6
        assert list(done.left_out) == (["device-0"] if bounded else [])
        limit = "3e+08" if name == "bn.running_var" else "300"
        told = done.left_out.values()
        assert all(reason.endswith(f"The limit is {limit} times that number.") for reason in told)
        fleet.train("full", 1)
        fleet.train("slice:residual", 2)


def test_the_only_device_may_not_make_a_model_that_does_not_train(
    fleet: HostileFleet, tmp_path: Path
) -> None:
    update = fleet.first_round(["full"])[0]
    assert not fleet.fold(tmp_path / "honest", [update]).left_out
    # Predictions use running statistics: only a training step sees that activations overflow.
    spoilt = with_tensor(update, "conv.weight", np.full_like(update[1]["conv.weight"], 1e20))
    done = fleet.fold(tmp_path / "hostile", [spoilt])
    assert list(done.left_out) == ["device-0"]
    assert fleet.federation.save() == fleet.first


def test_a_coordinator_aggregates_by_the_rule_of_its_federation(
    fleet: HostileFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of ordinary size is not left out, but does not move the median."""
    updates = fleet.first_round(["full"] * 3)
    name = "classifier.bias"
    hostile = with_tensor(updates[0], name, updates[0][1][name] + 50)
    policy = AggregationPolicy(rule="median")
    monkeypatch.setattr(fleet.federation, "policy", policy)
    done = fleet.fold(tmp_path / "state", [hostile, *updates[1:]])
    came = fleet.federation.model.tensors
    assert not done.left_out
    middle = np.median([arrays[name] for _, arrays in (hostile, *updates[1:])], axis=0)
    np.testing.assert_allclose(came[name].numpy(), middle, atol=1e-6)
    expected = aggregate(fleet.federation.saved(fleet.first), [hostile, *updates[1:]], policy)
    assert all(bool((came[n] == value).all()) for n, value in expected.tensors.items())


def test_a_coordinator_trains_on_its_samples_for_fltrust(
    fleet: HostileFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reverse of its own change moves nothing, and twice this change counts once."""
    fleet.federation.load(fleet.first)
    own = fleet.federation.trusted_change(*fleet.held_out)
    update = fleet.first_round(["full"])[0]
    old = fleet.federation.saved(fleet.first).tensors

    def moved(factor: float) -> Received:
        arrays = {n: (old[n] + factor * c).numpy() for n, c in own.items()}
        return update[0], {**update[1], **arrays}

    monkeypatch.setattr(fleet.federation, "policy", AggregationPolicy(rule="fltrust"))
    fleet.fold(tmp_path / "state", [moved(-3), moved(1), moved(1), moved(2)])
    for name, change in own.items():
        came = fleet.federation.model.tensors[name]
        np.testing.assert_allclose(came, old[name] + change, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_round_is_aggregated_again_without_what_disagrees(
    fleet: HostileFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """As a committee wants that has rejected the model."""
    updates = fleet.first_round(["full", SPECS[1], SPECS[2], "full", "full"])
    received = fleet.received("full")
    record, arrays = updates[-1]
    updates[-1] = record, {n: np.asarray(2 * received[n] - a) for n, a in arrays.items()}

    def again(self: RoundAggregation) -> int:
        run(self)
        assert self.without_disagreeing("the votes")
        assert self.inside == 4
        return 4

    run = RoundAggregation.run
    fleet.fold(tmp_path / "honest", updates[:-1])
    honest = fleet.federation.save()
    monkeypatch.setattr(RoundAggregation, "run", again)
    done = fleet.fold(tmp_path / "state", updates, bounded)
    assert done.left_out == {"device-4": "it points against the other updates, and the votes"}
    if not bounded:
        assert fleet.federation.save() == honest
    else:  # the reference of the next round follows from the updates that count
        assert done._limits is not None
        assert len(done._limits.figures) == 4
        assert done.reference == done._limits.reference.after(done._limits.figures)
        assert set(done._limits.reference.kinds) == {own[0].submodel for own in updates}


def test_an_update_weighs_no_more_than_its_share_of_claimed_samples(
    fleet: HostileFleet, tmp_path: Path
) -> None:
    """numpy.average is the oracle of the weights."""
    updates = fleet.first_round(["full", "full", "full"])
    claims = [MOST_SAMPLES, 40, 60]
    claimed = [(replace(u[0], samples=n), u[1]) for u, n in zip(updates, claims, strict=True)]
    assert not fleet.fold(tmp_path, claimed).left_out
    name = "classifier.weight"
    expected = np.average([u[1][name] for u in updates], axis=0, weights=[18000, 40, 60])
    new = fleet.federation.model.tensors[name].numpy()
    np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)
