"""Equal weights give equal bits, whatever the weights of updates; counters of batches advance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from toolkit.aggregation.aggregate import Aggregation, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.partial_aggregates.partial import decode_partial, encode_partial
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.tensor_slices import TensorSlice
from updates import KINDS, OLD, entry, full_update, record_of

values = st.lists(st.floats(-(2.0**66), 2.0**66, width=32), min_size=6, max_size=6)
samples = st.lists(st.integers(1, 10**12), min_size=1, max_size=70)


@given(values, samples, st.sampled_from(["samples", "uniform", "softmax"]))
def test_the_mean_of_equal_updates_is_that_update(
    numbers: list[float], claims: list[int], weights: str
) -> None:
    table, array = (entry("w", (2, 3), "w"),), np.array(numbers, np.float32).reshape(2, 3)
    policy = AggregationPolicy(weights=weights)  # type: ignore[arg-type]
    updates = [(record_of("full", n, table), {"w": array}) for n in claims]
    new = aggregate(OLD, updates, policy)
    assert new.tensors["w"].numpy().tobytes() == (array + 0.0).tobytes()  # -0 becomes 0
    assert torch.equal(new.tensors["c"], OLD.tensors["c"])


@given(claims=samples, cut=st.integers(0, 70), kind=st.sampled_from(sorted(KINDS)))
@settings(max_examples=30, deadline=None)
def test_n_equal_updates_give_what_one_gives_also_in_parts(
    claims: list[int], cut: int, kind: str
) -> None:
    record, arrays = KINDS[kind](3)
    single = aggregate(OLD, [(record, arrays)])
    whole = Aggregation(OLD, AggregationPolicy())
    for group in (claims[:cut], claims[cut:]):
        if group:
            part = Aggregation(OLD, AggregationPolicy())
            for n in group:
                part.add(replace(record, samples=n), arrays)
            whole.merge(decode_partial(encode_partial(part), OLD, AggregationPolicy()))
    assert whole.result().save() == single.save()


@given(values, values, samples, st.data())
def test_elements_that_all_holders_have_alike(
    common: list[float], other: list[float], weights: list[int], data: st.DataObject
) -> None:
    """A part that some updates hold does not change what equal whole tensors give beside it."""
    whole = torch.tensor(common).reshape(2, 3)
    mean, part = Mean(), TensorSlice((2, 3), (((0, 1),), ((0, 3),)))
    for weight in weights:
        mean.add({"w": whole}, float(weight))
        if data.draw(st.booleans()):
            mean.add({"w": torch.tensor(other[:3]).reshape(1, 3)}, 3.0, {"w": part})
    assert mean.result()["w"][1].tolist() == whole[1].tolist()


@pytest.mark.parametrize("beta", [1.0, 0.3, 1.8])
def test_an_untrained_parameter_keeps_its_bits(beta: float) -> None:
    record, arrays = full_update(1, samples=7)
    arrays["c"] = OLD.tensors["c"].numpy()
    new = aggregate(
        OLD, [(record, arrays), (replace(record, samples=11), arrays)], AggregationPolicy(beta=beta)
    )
    assert new.tensors["c"].numpy().tobytes() == OLD.tensors["c"].numpy().tobytes()


def test_counters_advance_by_the_most_steps_of_an_update() -> None:
    norm = torch.nn.BatchNorm1d(2)
    norm(torch.ones(4, 2))
    model = GlobalModel(
        {**{f"bn.{n}": v for n, v in norm.state_dict().items()}, "w": torch.ones(2)}
    )
    statistics = tuple(entry(f"bn.{n}", (2,), f"bn.{n}") for n in ("running_mean", "running_var"))
    arrays = {statistic.name: np.ones(2, np.float32) for statistic in statistics}
    trained = [
        (replace(record_of("full", 4, statistics), steps=steps), arrays)
        for steps in (3, 70, 10**18)
    ]
    assert aggregate(model, trained[:2]).tensors["bn.num_batches_tracked"] == 71
    assert aggregate(model, trained).tensors["bn.num_batches_tracked"] == 10**9 + 1
    part = Aggregation(model, AggregationPolicy())
    part.add(*trained[1])
    sent = decode_partial(encode_partial(part), model, AggregationPolicy())
    assert sent.result().tensors["bn.num_batches_tracked"] == 71
    other = (entry("w", (2,), "w"),)
    untouched = aggregate(model, [(record_of("full", 4, other), {"w": np.ones(2, np.float32)})])
    assert untouched.tensors["bn.num_batches_tracked"] == 1
    by_strategy = aggregate(
        model, trained[:1], strategy=lambda m, us: {n: t for u in us for n, t in u.tensors.items()}
    )
    assert by_strategy.tensors["bn.num_batches_tracked"] == 4
