"""Simulated clients accept or reject the new model of a round, as the devices of `serve` do."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from bundles import tiny_cnn
from device_agent.training.batching import held_out
from simulated_runs import TINY_FLEET, Models, run_tiny_fleet
from toolkit.aggregation.committee import DISAGREES, REJECTED, Committee
from toolkit.simulation.judging.client_committee import ClientCommittee
from toolkit.simulation.results import RoundResult
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulate import in_process, simulate

CLIENTS, SHARE = 6, 0.25
HOSTILE = 'hostile = {attack = "scale", count = 2, strength = 50}'
FILE = f"""{TINY_FLEET}
[aggregation]
bounds = false
judge = false

[evaluation]
share = {SHARE}
committee = {{members}}

[simulation]
data = "local.npz"
{{hostile}}
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Committee, frozenset[int]]]:
    """Every committee from now on, and the hostile clients."""
    asked: list[tuple[Committee, frozenset[int]]] = []
    judge = ClientCommittee.judge

    def judging(self: ClientCommittee, *given: object) -> Committee:
        votes = judge(self, *given)  # type: ignore[arg-type]
        asked.append((votes, self.hostile))
        return votes

    monkeypatch.setattr(ClientCommittee, "judge", judging)
    return asked


def run(
    folder: Path, members: int | None = CLIENTS, hostile: str = ""
) -> tuple[list[RoundResult], Models, Simulation]:
    folder.mkdir()
    text = FILE.format(members=members, hostile=hostile)
    return run_tiny_fleet(folder, text.replace("committee = None\n", ""))


def loss(state: Mapping[str, torch.Tensor], data: tuple[np.ndarray, np.ndarray]) -> float:
    """The loss of plain PyTorch on the samples that a client keeps apart."""
    model = tiny_cnn()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    rows = held_out(len(data[1]), SHARE)
    with torch.no_grad():
        output = model.eval()(torch.from_numpy(data[0][rows]))
    return float(functional.cross_entropy(output.double(), torch.from_numpy(data[1][rows])))


def test_an_accepted_model_is_that_of_a_round_without_a_committee(
    tmp_path: Path, asked: list[tuple[Committee, frozenset[int]]]
) -> None:
    results, models, simulation = run(tmp_path / "with")
    _, others, _ = run(tmp_path / "without", None)
    for own, other in zip(models, others, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in other)
    assert [result.left_out for result in results] == [{}, {}]
    for (votes, _), before, after in zip(asked, models[:-1], models[1:], strict=True):
        assert votes.asked == len(votes.rises) == CLIENTS
        for client, found in dict(votes.rises).items():
            local = simulation.client_data(int(client))
            data = np.asarray(local.x), np.asarray(local.y)
            expected = loss(after, data) / loss(before, data) - 1
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_rejected_model_is_dropped(
    tmp_path: Path, asked: list[tuple[Committee, frozenset[int]]]
) -> None:
    """Although the two hostile clients of the committee vote for it."""
    results, models, simulation = run(tmp_path / "hostile", hostile=HOSTILE)
    _, spoilt, _ = run(tmp_path / "alone", None, HOSTILE)
    assert not all(torch.equal(spoilt[1][name], models[0][name]) for name in models[0])
    for result, model in zip(results, models[1:], strict=True):
        assert all(torch.equal(model[name], models[0][name]) for name in models[0])
        assert result.left_out is not None
        assert set(result.left_out) == set(map(str, range(CLIENTS)))
        assert all(reason.startswith(REJECTED) for reason in result.left_out.values())
        assert (result.clients, result.hostile) == (0, sorted(simulation.hostile))
    for votes, hostile in asked:
        honest = [rise for client, rise in dict(votes.rises).items() if client not in hostile]
        assert (len(hostile), votes.worse) == (2, len(honest))
    # A finished simulation reads the same results.
    again = simulate(tmp_path / "hostile" / "fleet.toml", tmp_path / "hostile" / "out")
    assert again == results


def test_a_rejected_model_is_made_again_without_what_disagrees(tmp_path: Path) -> None:
    """Two clients reverse their change: the model is that of the honest clients alone."""
    hostile = HOSTILE.replace('"scale"', '"sign-flip"')
    results, models, simulation = run(tmp_path / "hostile", hostile=hostile)
    (result, *_) = results
    assert {int(client) for client in result.left_out or {}} == simulation.hostile
    assert all(text.startswith(DISAGREES) for text in (result.left_out or {}).values())
    assert (result.clients, result.hostile) == (CLIENTS - 2, sorted(simulation.hostile))
    honest = set(range(CLIENTS)) - simulation.hostile
    simulation.selection.candidates = lambda _: sorted(honest)
    simulation.committee = None
    simulation.folder.begin({}, force=False)
    simulation.run_round(1, in_process(simulation))
    for name, value in simulation.federation.model.tensors.items():
        torch.testing.assert_close(models[1][name], value)


def test_the_committee_has_random_members_of_each_round(
    tmp_path: Path, asked: list[tuple[Committee, frozenset[int]]]
) -> None:
    run(tmp_path / "few", 3)
    first, second = (set(votes.rises) for votes, _ in asked)
    assert len(first) == len(second) == 3
