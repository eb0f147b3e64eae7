"""Simulated clients whose updates spoil the model are left out, as in `serve`, in every engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from device_agent.formats.protocol.fleet import Limited
from models_for_tests import CLASSES, INPUT_SHAPE
from simulated_runs import Elsewhere, Sent, outcome
from toolkit.aggregation.aggregate import aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import limited_update
from toolkit.aggregation.model_judge import JUDGED, Verdict
from toolkit.simulation import simulate
from toolkit.simulation.judging import client_judge
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulation_config import load_simulation

CLIENTS = 6


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    y = draw.integers(CLASSES, size=150)
    patterns = draw.normal(size=(CLASSES, *INPUT_SHAPE))  # easily told apart: quality never falls
    x = draw.normal(size=(150, *INPUT_SHAPE)) + 2 * patterns[y]
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32), y=y)
    (tmp_path / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:linear"
        input_shape = {list(INPUT_SHAPE)}
        rounds = 2
        [training]
        batch_size = 8
        learning_rate = 0.003
        [aggregation]
        bounds = false
        [simulation]
        data = "data.npz"
        seed = {seed % 1000}
        hostile = {{attack = "sign-flip", count = 2, strength = 200}}
        [[devices]]
        name = "one"
        submodel = "full"
        count = {CLIENTS}"""
    )
    return tmp_path / "fleet.toml"


def test_the_model_is_that_of_the_honest_clients(file: Path, tmp_path: Path, sent: Sent) -> None:
    first = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new"))
    history = simulate.simulate(file, tmp_path / "out")
    liars = {str(client) for client in first.hostile}
    model = first.federation.model
    for result in history:
        assert result.left_out is not None
        assert result.left_out.keys() == liars
        assert all(reason.startswith(JUDGED) for reason in result.left_out.values())
        assert (result.clients, result.hostile) == (CLIENTS - 2, sorted(first.hostile))
        honest = [u for (r, n), u in sent.items() if r == result.round and str(n) not in liars]
        model = aggregate(model, honest, AggregationPolicy())
    first.federation.load((tmp_path / "out" / "global.safetensors").read_bytes())
    for name, value in first.federation.model.tensors.items():
        torch.testing.assert_close(value, model.tensors[name], rtol=1e-5, atol=1e-6)


def test_updates_that_are_left_out_set_no_limits(file: Path, tmp_path: Path, sent: Sent) -> None:
    file.write_text(file.read_text().replace("bounds = false", "bounds = true"))
    first = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new"))
    (result,) = simulate.simulate(file, tmp_path / "out", rounds=1)
    assert result.left_out is not None
    assert result.left_out.keys() == {str(client) for client in first.hostile}
    model, policy = first.federation.model, first.federation.policy
    limits = RoundLimits(Reference().completed([*map(first.federation.figures, sent.values())]))
    for (_, client), update in sorted(sent.items()):
        if client not in first.hostile:
            limited_update(update, limits, model, policy)
    folder = RunFolder(tmp_path / "out")
    folder.read(folder.settings(), force=False)
    folder.begin(folder.settings(), force=False)
    assert folder.reference() == limits.reference.after(limits.figures)


def test_a_client_that_goes_too_far_counts_with_a_quarter_of_its_samples(
    file: Path, tmp_path: Path, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = simulate.prepare(load_simulation(file), RunFolder(tmp_path / "new"))
    monkeypatch.setattr(client_judge, "suspects", sorted)
    monkeypatch.setattr(client_judge, "judge_updates", lambda *args: Verdict(["0"], ["1"]))
    (result,) = simulate.simulate(file, tmp_path / "out", rounds=1)
    updates = {client: update for (_, client), update in sent.items()}
    record, arrays = updates[1]
    quarter = record.samples // 4
    assert (result.left_out or {}).keys() == {"0"}
    assert (result.clients, result.took_part) == (CLIENTS - 1, CLIENTS)
    assert result.limited == {"1": Limited(samples=record.samples, counted=quarter, too_far=True)}
    updates[1] = replace(record, samples=quarter), arrays
    honest = [updates[client] for client in range(1, CLIENTS)]
    model = aggregate(first.federation.model, honest, AggregationPolicy())
    first.federation.load((tmp_path / "out" / "global.safetensors").read_bytes())
    for name, value in first.federation.model.tensors.items():
        torch.testing.assert_close(value, model.tensors[name], rtol=1e-5, atol=1e-6)


def test_the_judge_is_the_same_in_every_engine_and_after_a_restart(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that are left out three times are paused, and take part in no later round."""
    expected = simulate.simulate(file, tmp_path / "here", rounds=5)
    liars = sorted(map(int, expected[0].left_out or ()))
    assert [result.paused for result in expected] == [[], [], liars, [], []]
    assert [result.took_part for result in expected] == [*[CLIENTS] * 3, *[CLIENTS - 2] * 2]
    assert [len(result.left_out or ()) for result in expected] == [2, 2, 2, 0, 0]
    monkeypatch.setattr(simulate, "Processes", lambda setup, workers: Elsewhere(setup))
    for rounds in (1, 2, 4, 5):
        came = simulate.simulate(file, tmp_path / "elsewhere", rounds=rounds, workers=2)
    assert outcome(came, tmp_path / "elsewhere") == outcome(expected, tmp_path / "here")


def test_a_model_stays_if_every_candidate_is_equally_bad(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with the limits of all updates."""
    file.write_text(file.read_text().replace("bounds = false", "bounds = true"))
    expected = simulate.simulate(
        file, tmp_path / "plain", rounds=1, values={"aggregation.judge": False}
    )
    monkeypatch.setattr(client_judge, "suspects", sorted)
    none = frozenset[str]()
    monkeypatch.setattr(
        client_judge, "judge_updates", lambda *args: args[3](frozenset("0"), none) and Verdict()
    )
    came = simulate.simulate(file, tmp_path / "judged", rounds=1)
    assert came[0].left_out == {}
    assert came[0].limited == expected[0].limited != {}
    plain, judged = (tmp_path / name / "global.safetensors" for name in ("plain", "judged"))
    assert judged.read_bytes() == plain.read_bytes()


def test_without_the_judge_hostile_updates_count(file: Path, tmp_path: Path) -> None:
    file.write_text(file.read_text().replace("bounds = false", "bounds = false\njudge = false"))
    (result,) = simulate.simulate(file, tmp_path / "out", rounds=1)
    assert (result.left_out, result.clients) == (None, CLIENTS)
