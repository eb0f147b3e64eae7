"""Each update is limited by what updates are usually like, and is not changed within its limits."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import updates as made
from device_agent.formats.manifest import uploaded
from models_for_tests import INPUT_SHAPE
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import figures, limited_update
from toolkit.families import recovering_family
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import parse_spec
from updates import OLD, Array, entry, record_of

AFM, ACT = AggregationPolicy(), AggregationPolicy(factors="act")
KINDS: dict[str, Callable[[int], Received]] = {
    "full": made.full_update,
    "width": made.narrow_update,
    "slice": made.slice_update,
    "low-rank": made.low_rank_update,
    "cp": made.cp_update,
}


def rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def old(name: str) -> Array:
    return OLD.tensors[name].numpy().astype(np.float64)


def received_factors(update: Received) -> Mapping[str, Array]:
    """The factors that the device received."""
    record, _ = update
    spec = parse_spec(record.submodel)
    table = [e for e in record.tensors if e.factor is not None]
    factors = recovering_family(spec).received(spec.head, table, OLD)
    return {name: value.numpy().astype(np.float64) for name, value in factors.items()}


def product(factors: Mapping[str, Array]) -> Array:
    """U V^T of the factors of `c`, (r, m, kh, 1) and (n, r, 1, kw), by einsum."""
    u, v = (factors[f"c.{side}"].astype(np.float64) for side in "uv")
    return np.einsum("rmh,nrw->nmhw", u[..., 0], v[:, :, 0])


def pairs(kind: str, update: Received, policy: AggregationPolicy) -> dict[str, tuple[Array, Array]]:
    """The value in the update and the received value, by the key of its reference."""
    arrays = {name: array.astype(np.float64) for name, array in update[1].items()}
    if kind == "width":
        return {"c": (arrays["c"], old("c")[made.NARROW])}
    if kind == "cp" and policy is AFM:
        base = received_factors(update)
        return {f"cp:2.0|{name}": (value, base[name]) for name, value in arrays.items()}
    if kind == "cp":
        letters, base = "abcd", received_factors(update)

        def composed(of: Mapping[str, Array], name: str) -> Array:
            modes = letters[: len(made.PARAMETERS[name])]
            factors = (of[f"{name}#{n}"] for n in range(len(modes)))
            return np.einsum(",".join(f"{m}r" for m in modes) + "->" + modes, *factors)

        return {
            f"cp:2.0|{name}": (composed(arrays, name), composed(base, name))
            for name in made.PARAMETERS
        }
    dense = {name: (arrays[name], old(name)) for name in arrays if name in made.PARAMETERS}
    if kind == "low-rank":
        return {**dense, "c": (product(arrays), product(received_factors(update)))}
    return dense


@pytest.mark.parametrize("policy", [AFM, ACT], ids=["afm", "act"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_limited_update_is_that_of_the_formula(
    kind: str, policy: AggregationPolicy, seed: int
) -> None:
    update = KINDS[kind](seed)
    known = pairs(kind, update, policy)
    # Half of the tensors are beyond their limits: 2 m is half of the change.
    share = {key: 0.25 if n % 2 == 0 else 3.0 for n, key in enumerate(sorted(known))}
    usual = {key: share[key] * rms(new - base) for key, (new, base) in known.items()}
    limits = RoundLimits(Reference(steps=1, kinds={update[0].submodel: 4}, changes=usual))
    limited = limited_update(update, limits, OLD, policy)
    own = values_of(kind, limited, update, policy)
    for key, (new, base) in known.items():
        expected = base + min(1.0, 2 * usual[key] / rms(new - base)) * (new - base)
        np.testing.assert_allclose(own[key], expected, rtol=1e-5, atol=1e-6)
        assert limits.figures[0].changes[key] == pytest.approx(
            min(1.0, 2 * share[key]) * rms(new - base), rel=1e-5
        )
    (told,) = limits.limited
    assert told is not None
    assert told.tensors == sum(value < 0.5 for value in share.values())
    assert told.times == pytest.approx(2.0, rel=1e-5)
    aggregate(OLD, [limited], policy)  # it still is an update of its family


def values_of(
    kind: str, limited: Received, update: Received, policy: AggregationPolicy
) -> dict[str, Array]:
    """The values of a limited update. A limited product has become the tensor itself."""
    record, arrays = limited
    whole = pairs(kind, (update[0], {**update[1], **arrays}), policy)
    prefix = "cp:2.0|" if kind == "cp" else ""
    dense = {f"{prefix}{e.stands_for}": arrays[e.name] for e in record.tensors if not e.factor}
    return {**{key: new for key, (new, _) in whole.items()}, **dense}


@given(
    st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=6, max_size=6),
    st.floats(1e-6, 1e6),
    st.integers(0, 1000),
)
def test_no_change_is_larger_than_its_limit(values: list[float], usual: float, steps: int) -> None:
    update = (
        record_of("full", 4, (entry("w", (2, 3), "w"),)),
        {"w": np.array(values, np.float32).reshape(2, 3)},
    )
    update = replace(update[0], steps=steps), update[1]
    limits = RoundLimits(Reference(steps=10, kinds={"full": 4}, changes={"w": usual}))
    _, arrays = limited_update(update, limits, OLD, AFM)
    most = 2 * usual * math.sqrt(min(max(steps / 10, 1), 3))
    most = max(most, 1e-3 * rms(old("w")))
    # The limited value is rounded to float32 once.
    rounding = 2.0**-23 * (np.abs(old("w")).max() + most * 3)
    assert rms(arrays["w"] - old("w")) <= most * (1 + 1e-6) + rounding
    # So no element moves further than the root of their number times the limit.
    assert np.abs(arrays["w"] - old("w")).max() <= most * math.sqrt(6) * (1 + 1e-6) + rounding


@given(seed=st.integers(0, 10**6), kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_a_round_of_equal_updates_is_the_plain_mean_bit_for_bit(
    seed: int, kind: str, count: int
) -> None:
    updates = [KINDS[kind](seed)] * count
    limits = RoundLimits(Reference().completed([figures(u, OLD, AFM) for u in updates]))
    new = aggregate(OLD, updates, AFM, limits=limits)
    assert limits.limited == [None] * count
    assert new.save() == aggregate(OLD, updates, AFM).save()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_update_within_its_limits_is_returned_as_it_came(kind: str, seed: int) -> None:
    update = KINDS[kind](seed)
    limits = RoundLimits(Reference().completed([figures(update, OLD, AFM)]))
    record, arrays = limited_update(update, limits, OLD, AFM)
    assert record is update[0]
    assert arrays is update[1]


def test_the_rows_of_other_classes_do_not_hide_a_change() -> None:
    """A device with one class of two changes one row; the other row is not part of its figure."""
    table = (replace(entry("w", (2, 3), "w"), by_class=True),)
    value = OLD.tensors["w"].numpy().copy()
    value[1] += 2.0
    record = replace(record_of("full", 4, table), classes=(1,))
    assert figures((record, {"w": value}), OLD, AFM).changes["w"] == pytest.approx(2.0, rel=1e-6)


def claim(kind: str, samples: int, steps: int = 10) -> Figures:
    return Figures(kind=kind, samples=samples, steps=steps, changes={})


def test_samples_are_capped_by_kind() -> None:
    """A kind with fewer than three updates is capped by all devices."""
    claims = [*(claim("full", n) for n in (80, 100, 120, 10**12)), claim("board", 10**12)]
    claims += [claim("width", n) for n in (10, 12, 10**12, 10**12)]
    reference = Reference().completed(claims)
    every = 120  # the median of all nine
    assert reference.kinds == {"full": 100, "board": every, "width": 12}
    for kind, most in (("full", 200), ("board", 240), ("width", 24)):
        assert reference.most_samples(kind) == most
    update = made.full_update(1, samples=10**12)
    limits = RoundLimits(reference)
    assert limited_update(update, limits, OLD, AFM)[0].samples == 200
    told = limits.limited[0]
    assert told is not None
    assert told.text() == "of its 1,000,000,000,000 samples 200 count"
    # Samples do not matter for other weights.
    uniform = AggregationPolicy(weights="uniform")
    assert limited_update(update, limits, OLD, uniform)[0].samples == 10**12


def test_a_majority_of_one_kind_cannot_raise_its_cap_without_end() -> None:
    claims = [*(claim("full", 100) for _ in range(9)), *(claim("x", 10**12) for _ in range(3))]
    assert Reference().completed(claims).most_samples("x") == 600


def test_the_reference_moves_half_of_the_way() -> None:
    def one(change: float, steps: int) -> Figures:
        return replace(claim("full", 100, steps), changes={"w": change})

    first = Reference().completed([one(1.0, 10), one(2.0, 10), one(100.0, 10)])
    assert (first.changes, first.steps) == ({"w": 2.0}, 10)
    # 40 steps allow sqrt(3) times more, so these changes count as 8.
    after = first.after([one(8.0 * math.sqrt(3), 40)] * 3)
    assert after.changes["w"] == pytest.approx(4.0)
    assert after.steps == pytest.approx(20)
    assert after.after([]) == after


def test_of_two_updates_both_are_as_usual() -> None:
    ones = [replace(claim("full", 100), changes={"w": change}) for change in (1.0, 9.0)]
    assert Reference().completed(ones).change("w") == pytest.approx(3.0)
    ones.append(replace(claim("full", 100), changes={"w": 8.0}))
    assert Reference().completed(ones).change("w") == 8.0


def test_devices_with_a_personal_model_have_their_own_reference() -> None:
    """They change the shared tensors less, and must not set the limit of the others."""
    update = made.full_update(1)
    for kind, key in (("full", "w"), ("pfedme", "pfedme|w")):
        own = figures((replace(update[0], submodel=kind), update[1]), OLD, AFM)
        assert key in own.changes


def test_a_tensor_without_a_reference_has_that_of_a_middle_tensor() -> None:
    reference = Reference(changes={"a": 1.0, "b": 3.0, "c": 5.0, "d": 0.0})
    assert (reference.change("d"), reference.change("new")) == (3.0, 3.0)
    assert Reference().change("new") is None


def test_what_a_device_received_is_the_truncated_tensor(seed: int) -> None:
    """A low-rank device that trains nothing has changed nothing, although its weights differ."""
    federation = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, TrainingConfig(), seed=seed)
    specs = ("low-rank:0.25,keep=0", "slice:residual+low-rank:0.25", "cp:2.0", "width:0.5", "full")
    for spec in specs:
        submodel = federation.submodel(spec)
        table = uploaded(submodel.program.tensors)
        cut = submodel.cut(federation.model)
        arrays = {e.name: cut[e.name].numpy() for e in table}
        own = figures((record_of(spec, 4, table), arrays), federation.model, AFM)
        assert max(own.changes.values()) < 1e-6, spec
