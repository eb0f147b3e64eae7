"""Simulated updates are limited as in `serve`: by the first round's own figures, then by earlier
rounds, in every engine and after a restart."""

from pathlib import Path

import pytest
import torch

from simulated_runs import Elsewhere, Sent, fleet_file, outcome
from toolkit.aggregation.aggregate import aggregate
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import figures
from toolkit.simulation import simulate
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulation_config import load_simulation

KINDS = ("full", "low-rank:0.25,keep=1", "cp:2.0", "width:0.5")
CLIENTS = 8


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Path:
    # Without the judge, which may leave out other updates for some seeds.
    top = "rounds = 3\n[aggregation]\njudge = false\n[training]\nbatch_size = 8"
    hostile = 'hostile = {attack = "scale", count = 2, strength = 20}'
    return fleet_file(tmp_path, seed, KINDS, CLIENTS // len(KINDS), top, hostile)


def test_the_limits_are_those_of_aggregate_round_after_round(
    file: Path, tmp_path: Path, sent: Sent
) -> None:
    first = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new"))
    history = simulate.simulate(file, tmp_path / "out")
    model, policy, reference = first.federation.model, first.federation.policy, Reference()
    for result in history:
        updates = [update for (round_, _), update in sent.items() if round_ == result.round]
        if result.round == 1:
            reference = reference.completed([figures(u, model, policy) for u in updates])
        limits = RoundLimits(reference)
        model = aggregate(model, updates, policy, limits=limits)
        reference = reference.after(limits.figures)
        # Clients train in the order of their numbers: the kinds are in the order of the clients.
        limited = {str(n): own for n, own in enumerate(limits.limited) if own is not None}
        assert result.limited == pytest.approx(limited)
        assert {str(client) for client in result.hostile or ()} <= limited.keys()
    first.federation.load((tmp_path / "out" / "global.safetensors").read_bytes())
    for name, value in first.federation.model.tensors.items():
        torch.testing.assert_close(value, model.tensors[name], rtol=1e-5, atol=1e-6)


def test_limits_are_the_same_in_every_engine_and_after_a_restart(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = simulate.simulate(file, tmp_path / "here")
    assert all(result.limited for result in expected)
    monkeypatch.setattr(simulate, "Processes", lambda setup, workers: Elsewhere(setup))
    for rounds in (1, 3):
        came = simulate.simulate(file, tmp_path / "elsewhere", rounds=rounds, workers=2)
    assert outcome(came, tmp_path / "elsewhere") == outcome(expected, tmp_path / "here")


def test_limits_can_be_turned_off(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("judge = false", "judge = false\nbounds = false"))
    (result,) = simulate.simulate(file, tmp_path / "out", rounds=1)
    assert result.limited is None


def test_a_baseline_has_no_limits(file: Path, tmp_path: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if "hostile" not in line]
    file.write_text("\n".join(lines).replace("[simulation]", '[simulation]\nbaseline = "local"'))
    (result,) = simulate.simulate(file, tmp_path / "out", rounds=1)
    assert result.limited is None


def test_an_update_that_is_not_finite_is_left_out(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("strength = 20", "strength = 1e300"))
    results = simulate.simulate(file, tmp_path / "out")
    assert [result.diverged for result in results] == [2] * 3
    assert [result.clients for result in results] == [CLIENTS - 2] * 3
