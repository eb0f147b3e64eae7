"""Simulated rounds with differential privacy against numpy in float64, for a mixed fleet."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profiles.errors import InputError
from refusals import refused
from simulated_runs import Elsewhere, Sent, fleet_file, outcome
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.privacy.clipped_changes import add_clipped
from toolkit.aggregation.recover import recover
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.simulation import chunks, simulate
from toolkit.simulation.client_selection import ClientSelection
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulation_config import load_simulation

KINDS = ("full", "low-rank:0.25,keep=1", "cp:2.0", "width:0.5", "pfedme")
EACH = 4
CLIP, NOISE = 0.03, 0.7
Array = np.ndarray


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Path:
    top = f"""
        rounds = 2
        clients_per_round = {EACH * len(KINDS) // 2}
        [training]
        batch_size = 8
        batch_norm = "static"
        [privacy]
        clip = {CLIP}
        noise_multiplier = {NOISE}
        delta = 0.01"""
    return fleet_file(tmp_path, seed, KINDS, EACH, top, "")


def held(update: Received, federation: Federation) -> dict[str, tuple[Array, Array]]:
    """The dense tensors of an update in full shape, and where it has elements."""
    found = recover(update, federation.model)
    return {
        name: (value.double().numpy(), (found.weights[name] > 0).double().numpy())
        for name, value in found.tensors.items()
    }


def received(update: Received, federation: Federation) -> Received:
    """The update of a device that sends what it received."""
    record = update[0]
    cut = federation.submodel(record.submodel).cut(federation.model)
    return record, {entry.name: cut[entry.name].detach().numpy() for entry in record.tensors}


def noise(shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Box and Muller's formula, for fewer than 65,536 pairs."""
    count = math.prod(shape)
    bits = np.frombuffer(draw.bytes(16 * -(-count // 2)), "u8").reshape(2, -1) // 2048
    turned = np.sqrt(-2 * np.log((bits[0] + 1.0) / 2**53)) * np.exp(2j * np.pi * bits[1] / 2**53)
    return np.concatenate([turned.real, turned.imag])[:count].reshape(shape)


def oracle(
    updates: list[Received], federation: Federation, seed: int, round_: int
) -> dict[str, Array]:
    """The next model. `updates` has one of each kind at least, and some are above the clip."""
    norms: list[float] = []
    old = {name: value.double().numpy() for name, value in federation.model.tensors.items()}
    total = {name: np.zeros_like(value) for name, value in old.items()}
    for update in updates:
        before = held(received(update, federation), federation)
        change = {n: (v - before[n][0]) * w for n, (v, w) in held(update, federation).items()}
        norm = np.sqrt(sum((part**2).sum() for part in change.values()))
        norms.append(norm)
        for name, part in change.items():
            total[name] += part * min(1.0, CLIP / norm)
    assert max(norms) > 1.05 * CLIP
    expected, base = ({n: np.zeros_like(v) for n, v in old.items()} for _ in range(2))
    kinds = {update[0].submodel: update for update in updates}
    assert len(kinds) == len(KINDS)
    for update in kinds.values():
        for name, (value, here) in held(received(update, federation), federation).items():
            expected[name] += EACH / 2 * here
            base[name] += EACH / 2 * here * value
    draw = np.random.default_rng([seed % 1000, round_, 4])
    new = dict(old)
    for name in sorted(old):
        if expected[name].any():
            count = np.where(expected[name] > 0, expected[name], 1)
            step = (total[name] + CLIP * NOISE * noise(old[name].shape, draw)) / np.maximum(
                count, 1
            )
            new[name] = np.where(expected[name] > 0, base[name] / count + step, old[name])
    return new


def test_a_round_is_that_of_numpy(
    file: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, sent: Sent
) -> None:
    simulation = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new"))
    before = simulation.federation.save()
    # Twice as many clients as expected come, which must not change the denominators.
    monkeypatch.setattr(
        ClientSelection, "clients", lambda self, round_: list(enumerate(self.specs))
    )
    history = simulate.simulate(file, tmp_path / "out", rounds=1)
    assert [result.clients for result in history] == [EACH * len(KINDS)]
    simulation.federation.load(before)
    wanted = oracle([*sent.values()], simulation.federation, seed, 1)
    simulation.federation.load((tmp_path / "out" / "global.safetensors").read_bytes())
    for name, value in simulation.federation.model.tensors.items():
        if "running" not in name and "num_batches" not in name:
            np.testing.assert_allclose(value.numpy(), wanted[name], rtol=1e-5, atol=3e-6)


def test_the_result_is_the_same_in_every_engine_and_after_a_restart(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = simulate.simulate(file, tmp_path / "once")
    simulate.simulate(file, tmp_path / "twice", rounds=1)
    again = simulate.simulate(file, tmp_path / "twice")
    monkeypatch.setattr(
        simulate,
        "in_process",
        lambda simulation, device: Elsewhere(
            simulate.WorkerSetup(simulation.config, simulation.held_out, 1, device)
        ),
    )
    elsewhere = simulate.simulate(file, tmp_path / "elsewhere")
    # Rounds = 1 is in the settings of the second run until it continues.
    assert outcome(once, tmp_path / "once") == outcome(again, tmp_path / "twice")
    assert outcome(once, tmp_path / "once") == outcome(elsewhere, tmp_path / "elsewhere")


def test_the_clip_follows_the_noised_share(
    file: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    monkeypatch.setattr(chunks, "add_clipped", spied(seen))
    first, second = simulate.simulate(file, tmp_path / "out", values={"privacy.clip_quantile": 0.8})
    assert first.privacy is not None
    assert second.privacy is not None
    # The sum has 6.1% more noise: 1 / NOISE^2 = 1 / sum^2 + 1 / (2 count)^2.
    count = 1.5 * NOISE
    draw = np.random.default_rng([seed % 1000, 1, 4])
    federation = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new")).federation
    for name, value in sorted(federation.model.tensors.items()):
        if "running" not in name and "num_batches" not in name:
            noise(tuple(value.shape), draw)
    votes = sum(0.5 if norm <= CLIP else -0.5 for clip, norm in seen if clip == CLIP)
    share = 0.5 + (votes + count * noise((), draw)) / (EACH * len(KINDS) / 2)
    assert first.privacy.within == pytest.approx(float(np.clip(share, 0, 1)))
    clip = CLIP * math.exp(-0.2 * (first.privacy.within - 0.8))
    assert second.privacy.clip == pytest.approx(clip)
    assert {clip for clip, _ in seen} == {first.privacy.clip, second.privacy.clip}


def spied(seen: list[tuple[float, float]]) -> Callable[[Aggregation, Received, float], float]:
    """`add_clipped`, which also adds each clip and norm to `seen`."""

    def add(aggregation: Aggregation, update: Received, clip: float) -> float:
        norm = add_clipped(aggregation, update, clip)
        seen.append((clip, norm))
        return norm

    return add


def test_running_statistics_are_refused(file: Path, tmp_path: Path) -> None:
    with refused("privacy.statistics", submodel="full", tensor="bn.running_mean"):
        simulate.simulate(file, tmp_path / "out", values={"training.batch_norm": "global"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("aggregation.weights", "samples"),
        ("aggregation.bounds", True),
        ("aggregation.judge", True),
        ("aggregation.factors", "afm"),
        ("aggregation.rule", "median"),
        ("selection", "oldest"),
        ("over_selection", 1.5),
        ("evaluation.share", 0.2),
        ("simulation.baseline", "local"),
        ("quorum", 3),
        ("min_updates", 2),
        ("mode", "async"),
        ("privacy.delta", 0.06),
        ("privacy.clip", 0.0),
        ("privacy.noise_multiplier", -1.0),
    ],
)
def test_what_would_break_the_guarantee_is_refused(file: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key.rpartition(".")[2]):
        load_simulation(file, values={key: value})
