"""FLTrust against numpy in float64: rounds of mixed families, and what a hostile device can do."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from hostile_fleet import samples
from models_for_tests import INPUT_SHAPE
from refusals import refused
from rule_rounds import FACTORS, MODEL, drawn_fleet, masked, received
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.rules import spooled_changes
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import (
    OLD,
    PARAMETERS,
    Array,
    composed,
    cp_update,
    entry,
    record_of,
)

FLTRUST = AggregationPolicy(rule="fltrust")


def drawn_change(draw: np.random.Generator) -> dict[str, torch.Tensor]:
    """A change of `c`. Updates that hold only `w` cannot be compared with it."""
    return {"c": torch.from_numpy(draw.normal(size=PARAMETERS["c"]).astype(np.float32))}


def trusted(
    updates: Sequence[Received], trained: Mapping[str, torch.Tensor]
) -> list[tuple[float, float]]:
    """The trust of each update, and by how much its change is multiplied (Cao et al. 2021)."""
    cosines, sizes = [], []
    for update in updates:
        holds, own = masked(update), received(update)
        steps = [(holds[n] - own[n], trained[n].double().numpy()) for n in holds if n in trained]
        change = np.concatenate([[], *(step[~np.isnan(step)] for step, _ in steps)])
        right = np.concatenate([[], *(own[~np.isnan(step)] for step, own in steps)])
        norms = np.linalg.norm(change), np.linalg.norm(right)
        cosines.append(float(change @ right) / float(norms[0] * norms[1]) if steps else 0.0)
        sizes.append(float(norms[0] / norms[1]) if steps else np.inf)
    known = [size for size in sizes if np.isfinite(size)]
    middle = sorted(known)[(len(known) - 1) // 2] if known else 1.0
    return [(max(c, 0.0), middle / size) for c, size in zip(cosines, sizes, strict=True)]


def oracle(updates: Sequence[Received], trust: Sequence[tuple[float, float]]) -> dict[str, Array]:
    """The weighted means of what was received and of the scaled changes, by elements.

    If only `cp` holds a tensor, its factors move, and compose the tensor.
    """
    counted = [(u, t, s) for u, (t, s) in zip(updates, trust, strict=True) if t > 0]
    new = {}
    for name, old in OLD.tensors.items():
        result = old.double().numpy().copy()
        known = [(u, t, s) for u, t, s in counted if name in masked(u)]
        if known and all(u[0].submodel.startswith("cp") for u, _, _ in known):
            new[name] = composed(moved_factors(known))[name]
            continue
        values = [(received(u)[name], masked(u)[name], t, s) for u, t, s in known]
        for place in np.ndindex(*result.shape):
            held = [(r[place] + s * (v[place] - r[place]), t)
                    for r, v, t, s in values if not np.isnan(v[place])]  # fmt: skip
            if held:
                moved, weights = zip(*held, strict=True)
                result[place] = np.average(moved, weights=weights)
        new[name] = result
    return new


def moved_factors(known: Sequence[tuple[Received, float, float]]) -> dict[str, Array]:
    """The factors after the weighted mean of their scaled changes."""
    moved = {}
    for name, old in FACTORS.items():
        steps = [scale * (update[1][name].astype(np.float64) - old) for update, _, scale in known]
        moved[name] = old + np.average(steps, axis=0, weights=[trust for _, trust, _ in known])
    return moved


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_mixed_round_is_the_oracles(
    seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spooled_changes, "NUMBERS", 60)  # several pieces of one tensor
    draw = np.random.default_rng([seed, count])
    updates, trained = drawn_fleet(draw, count), drawn_change(draw)
    new = aggregate(MODEL, updates, FLTRUST, trusted=trained)
    for name, value in oracle(updates, trusted(updates, trained)).items():
        np.testing.assert_allclose(new.tensors[name].numpy(), value, rtol=2e-5, atol=2e-5)


def test_factors_alone_move_by_their_trust(seed: int) -> None:
    draw = np.random.default_rng(seed)
    updates = []
    for _ in range(4):
        record, _ = cp_update(0)
        moved = {n: v + 0.01 * draw.normal(size=v.shape) for n, v in FACTORS.items()}
        updates.append((record, {n: v.astype(np.float32) for n, v in moved.items()}))
    trained = drawn_change(draw)
    trust = trusted(updates, trained)
    known = [(u, t, s) for u, (t, s) in zip(updates, trust, strict=True) if t > 0]
    new = aggregate(MODEL, updates, FLTRUST, trusted=trained)
    for name, value in (moved_factors(known) if known else FACTORS).items():
        np.testing.assert_allclose(new.kept["cp:2.0"][name], value, rtol=1e-5, atol=1e-5)


def changed(change: Mapping[str, Array], samples: int = 5) -> Received:
    """A full update with this change of the model."""
    table = tuple(entry(name, shape, name) for name, shape in PARAMETERS.items())
    values = {n: (OLD.tensors[n].numpy() + c).astype(np.float32) for n, c in change.items()}
    return record_of("full", samples, table), values


def test_reversed_changes_do_not_count_and_large_ones_count_once(seed: int) -> None:
    """Whatever their size and their samples."""
    draw = np.random.default_rng(seed)
    trained = {n: torch.from_numpy(draw.normal(size=s)) for n, s in PARAMETERS.items()}
    honest = {n: 0.01 * g.numpy() for n, g in trained.items()}
    reverse = {n: -30.0 * c for n, c in honest.items()}
    large = {n: 30.0 * c for n, c in honest.items()}
    fleet = [changed(honest), changed(reverse, 10**12), changed(honest), changed(large, 10**12)]
    new = aggregate(OLD, [*fleet, changed(honest)], FLTRUST, trusted=trained)
    for name, change in honest.items():
        expected = OLD.tensors[name].numpy() + change
        np.testing.assert_allclose(new.tensors[name].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_model_stays_if_no_update_is_trusted(seed: int) -> None:
    trained = {n: torch.ones(s) for n, s in PARAMETERS.items()}
    wrong = changed({n: np.full(s, -0.1) for n, s in PARAMETERS.items()})
    new = aggregate(OLD, [wrong] * 3, FLTRUST, trusted=trained)
    for name, value in OLD.tensors.items():
        assert torch.equal(new.tensors[name], value)


def test_statistics_are_the_median_of_the_trusted_updates() -> None:
    table = (
        entry("w", (2,), "w"),
        entry("bn.running_var", (2,), "bn.running_var", role="buffer"),
    )
    model = GlobalModel({name: torch.ones(2) for name in ("w", "bn.running_var")})
    fleet = [
        (record_of("full", 5, table), {"w": np.full(2, w, np.float32),
                                       "bn.running_var": np.full(2, v, np.float32)})
        for w, v in ((1.5, 2.0), (1.5, 1e6), (0.5, 50.0), (1.5, 4.0))
    ]  # fmt: skip
    trained = {"w": torch.ones(2)}
    new = aggregate(model, fleet, FLTRUST, trusted=trained).tensors
    assert new["bn.running_var"].tolist() == [4.0, 4.0]
    assert new["w"].tolist() == [1.5, 1.5]


def test_a_change_to_compare_with_is_needed() -> None:
    update = changed({n: np.zeros(s) for n, s in PARAMETERS.items()})
    for trained in (None, {}):
        with refused("aggregate.no-trusted-change"):
            aggregate(OLD, [update], FLTRUST, trusted=trained)


def test_the_change_of_a_federation_is_an_epoch_of_torch(seed: int) -> None:
    """In training mode, with the momentum and the learning rate of the devices."""
    training = TrainingConfig(batch_size=16, learning_rate=0.02, momentum=0.5)
    federation = Federation("models_for_tests:smooth_cnn", INPUT_SHAPE, training, seed=seed % 1000)
    x, y = samples(40, seed % 1000)
    first = federation.save()
    came = federation.trusted_change(x, y)
    module = copy.deepcopy(federation.module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.5)
    order = np.random.default_rng(0).permutation(40)
    for rows in (order[:20], order[20:]):
        optimizer.zero_grad()
        output = module(torch.from_numpy(x[rows]))
        torch.nn.functional.cross_entropy(output, torch.from_numpy(y[rows])).backward()
        optimizer.step()
    assert federation.save() == first
    assert not federation.module.training
    for name, value in module.named_parameters():
        change = value - federation.model.tensors[name]
        torch.testing.assert_close(came[name], change.detach(), rtol=1e-5, atol=1e-7)
    assert federation.trusted_change(x * np.float32(np.nan), y) == {}
