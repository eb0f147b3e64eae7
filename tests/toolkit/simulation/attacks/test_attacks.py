"""Each attack's tensors and samples against its formula in numpy, float64."""

from typing import get_args

import numpy as np
import pytest

from device_agent.data.local_data import LocalData
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import MOST_SAMPLES
from toolkit.coordinator.federation_file.hostile_table import AttackName, HostileTable
from toolkit.simulation.attacks import hostile_clients as hostile
from toolkit.simulation.attacks.attack import Poison, Trained
from toolkit.simulation.attacks.attack_table import ATTACKS
from toolkit.simulation.attacks.poisoned_samples import (
    TARGET,
    backdoor_samples,
    backdoored,
    flipped_labels,
)
from updates import entry, record_of

Arrays = dict[str, np.ndarray]
SAMPLES = 7
TABLE: tuple[TensorEntry, ...] = (
    entry("w", (4, 3), "w"),
    entry("c.u", (2, 3, 1, 1), "c", "u"),
    entry("c.v", (4, 2, 1, 1), "c", "v"),
    entry("bn.running_mean", (5,), "bn.running_mean", role="buffer"),
    entry("bn.running_var", (5,), "bn.running_var", role="buffer"),
    entry("bias", (3,), "bias"),
)
STATISTICS = ("bn.running_mean", "bn.running_var")


def drawn(draw: np.random.Generator, near: Arrays | None = None) -> Arrays:
    arrays = {}
    for e in TABLE:
        values = draw.normal(size=e.shape) if near is None else near[e.name]
        moved = values + 0.1 * draw.normal(size=e.shape)
        arrays[e.name] = (np.abs(moved) if e.name.endswith("var") else moved).astype(np.float32)
    return arrays


def wide(arrays: Arrays) -> Arrays:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


@pytest.mark.parametrize("name", ATTACKS)
def test_the_tensors_of_an_attack(seed: int, name: AttackName) -> None:
    draw = np.random.default_rng(seed)
    received = drawn(draw)
    honest, known = drawn(draw, received), [drawn(draw, received) for _ in range(3)]
    s = float(draw.uniform(0.5, 20))
    trained = Trained(
        received,
        (record_of("full", SAMPLES, TABLE), honest),
        known,
        s,
        np.random.default_rng([seed, 1]),
        seed,
    )
    w, v = wide(received), wide(honest)
    all_known = {n: np.stack([wide(one)[n] for one in known]) for n in w}
    step = {n: v[n] - w[n] for n in w}
    record, came = ATTACKS[name].forge(trained)
    expected: Arrays | None = None
    match name:
        case "sign-flip":
            expected = {n: w[n] - s * step[n] for n in w}
        case "scale" | "backdoor":
            expected = {n: w[n] + s * step[n] for n in w}
        case "reverse-scale":
            expected = {n: -s * v[n] if n in ("w", "c.u", "bias") else v[n] for n in w}
        case "samples":
            expected = {n: w[n] - step[n] for n in w}
        case "label-flip" | "copies":
            expected = v
        case "little-is-enough":
            expected = {n: all_known[n].mean(0) - s * all_known[n].std(0) for n in w}
        case "inner-product":
            expected = {n: w[n] - s * (all_known[n] - w[n]).mean(0) for n in w}
        case "statistics":
            expected = {n: s * v[n] if n in STATISTICS else v[n] for n in w}
        case "single-tensor":
            expected = {**v, "bias": np.array([s, *v["bias"][1:]])}
        case "zeros":
            expected = {n: 0 * v[n] for n in w}
    if expected is not None:
        expected["bn.running_var"] = np.maximum(expected["bn.running_var"], 0)
        for n, value in expected.items():
            assert came[n].dtype == np.float32
            np.testing.assert_allclose(came[n], value, rtol=1e-6, atol=1e-6)
    if name == "drift":
        for n in set(w) - {"bn.running_var"}:
            np.testing.assert_allclose(
                np.abs(came[n] - v[n]), s * rms(step[n]), rtol=1e-4, atol=1e-5
            )
        again = ATTACKS[name].forge(trained)[1]
        assert all(np.array_equal(came[n], again[n]) for n in w)
    if name == "noise":
        # Divided by what it is drawn for, the noise of all tensors is that of N(0, 1).
        noise = np.concatenate(
            [((came[n] - w[n]) / s / rms(step[n])).ravel() for n in set(w) - {"bn.running_var"}]
        )
        assert abs(noise.mean()) < 4 / len(noise) ** 0.5
        assert 0.5 < noise.std() < 1.6
    claimed = {"samples": int(s), "label-flip": int(s * SAMPLES), "copies": int(s * SAMPLES)}
    assert record.samples == max(1, claimed.get(name, SAMPLES))


def test_no_attack_claims_more_samples_than_pass_the_checks() -> None:
    update = record_of("full", SAMPLES, TABLE), drawn(np.random.default_rng(0))
    trained = Trained(update[1], update, [], 1e30, np.random.default_rng(0), 0)
    for name in ("samples", "label-flip", "copies"):
        assert ATTACKS[name].forge(trained)[0].samples == MOST_SAMPLES
    assert ATTACKS["samples"].strength == MOST_SAMPLES


def test_every_attack_of_the_file_is_in_the_table() -> None:
    assert list(ATTACKS) == list(get_args(AttackName))


def test_poisoned_samples(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(9, 2, 8, 4)).astype(np.float32)
    y = draw.integers(-1, 6, 9)  # -1 is ignored
    first, before = LocalData(x, y), (x.copy(), y.copy())
    flipped = flipped_labels(first, Poison(5, 0.0))
    assert flipped.y.tolist() == [5 - label if label >= 0 else label for label in y]
    marked = backdoored(first, Poison(5, 7.0))
    expected = x.copy()
    expected[::2, :, -2:, -1:] = 7
    np.testing.assert_array_equal(marked.x, expected)
    assert marked.y.tolist() == [TARGET if not row % 2 else y[row] for row in range(9)]
    np.testing.assert_array_equal(first.x, before[0])
    np.testing.assert_array_equal(first.y, before[1])
    found = backdoor_samples(x, y, 7.0)
    assert found is not None
    expected[1::2, :, -2:, -1:] = 7
    np.testing.assert_array_equal(found[0], expected[y != TARGET])
    assert set(found[1].tolist()) <= {TARGET}
    assert backdoor_samples(x, np.full(9, TARGET), 7.0) is None


def test_the_hostile_clients_are_drawn_by_the_seed(seed: int) -> None:
    table = HostileTable(attack="copies", share=0.2)
    drawn = [hostile.hostile_clients(table, 40, number) for number in range(20)]
    assert {len(one) for one in drawn} == {8}
    assert drawn == [hostile.hostile_clients(table, 40, number) for number in range(20)]
    # 160 draws of 40 clients: that one is never drawn has a probability of 40 * 0.8^20 = 0.46,
    # that three are never drawn of less than 0.01.
    assert len(frozenset().union(*drawn)) > 37
    assert len(hostile.hostile_clients(HostileTable(attack="zeros", count=3), 4, seed)) == 3
    assert not hostile.hostile_clients(None, 40, seed)
    few = HostileTable(attack="zeros", share=0.01)
    assert len(hostile.hostile_clients(few, 10, seed)) == 1


def test_what_hostile_clients_know() -> None:
    liars = frozenset({3, 5, 8, 9, 12, 20})
    known = {
        name: hostile.known_to(8, liars, HostileTable(attack=name, count=6))
        for name in ("scale", "copies", "inner-product")
    }
    assert known == {"scale": [], "copies": [3], "inner-product": [8, 3, 5, 9, 12]}


def test_halves_have_every_sample_once(seed: int) -> None:
    for size in (2, 3, 4, 11):
        data = LocalData(np.arange(size).astype(np.float32), np.arange(size))
        parts = hostile.halves(data)
        assert sorted(np.concatenate([part.y for part in parts]).tolist()) == list(range(size))
        assert min(map(len, parts)) >= 2
