"""The clients of simulated rounds: the policies of `serve`, and goals with over-selection."""

import numpy as np
import pytest

from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.simulation.attendance import Attendance
from toolkit.simulation.client_selection import ClientSelection
from toolkit.simulation.simulation_config import SimulationConfig

CLIENTS = 30


def configured(participation: float | None = None, **keys: object) -> SimulationConfig:
    share = {} if participation is None else {"participation": participation}
    return SimulationConfig(
        model="m:m",
        input_shape=(2,),
        rounds=1,
        simulation=SimulationTable(data="", seed=7, **share),
        devices=(DeviceKind(name="board", submodel="full", count=CLIENTS),),
        **keys,
    )


def selection(config: SimulationConfig) -> ClientSelection:
    return ClientSelection(config, ["full"] * CLIENTS, range(1, CLIENTS + 1))


def numbers(config: SimulationConfig, round_: int) -> list[int]:
    return [client for client, _ in selection(config).clients(round_)]


def test_a_share_draws_the_clients_that_participation_draws() -> None:
    for round_ in range(1, 20):
        drawn = np.random.default_rng([7, round_]).choice(CLIENTS, 9, replace=False)
        assert numbers(configured(participation=0.3), round_) == sorted(drawn)
        share = configured(clients_per_round=0.3, over_selection=1.0)
        assert numbers(share, round_) == sorted(drawn)
        assert numbers(configured(clients_per_round=9, over_selection=1.0), round_) == sorted(drawn)


@pytest.mark.parametrize("policy", ["uniform", "data-size", "oldest"])
def test_a_restarted_simulation_selects_the_same_clients(policy: str) -> None:
    config = configured(clients_per_round=4, selection=policy)
    going = selection(config)
    rounds = [going.clients(round_) for round_ in range(1, 12)]
    assert [len(clients) for clients in rounds] == [6] * 11  # 4 * 1.3 = 5.2
    assert selection(config).clients(11) == rounds[-1]
    assert going.clients(5) == rounds[4]  # also an earlier one


def test_the_oldest_take_turns() -> None:
    config = configured(clients_per_round=10, over_selection=1.0, selection="oldest")
    going = selection(config)
    first = [client for round_ in (1, 2, 3) for client, _ in going.clients(round_)]
    assert sorted(first) == list(range(CLIENTS))


@pytest.mark.parametrize("timed", [True, False])
def test_the_first_updates_close_a_round_and_the_others_are_not_needed(
    seed: int, timed: bool
) -> None:
    """With times, the fastest clients that do not fail; without, a random part of them."""
    draw, counted = np.random.default_rng(seed), np.zeros(13)
    for round_ in range(1, 400):
        times = draw.exponential(1, size=13).tolist()
        attendance = Attendance(
            clients=13,
            seed=seed,
            failure_rate=0.3,
            deadline_s=1e9,
            quorum=8,
            seconds=(lambda client, spec, times=times: times[client]) if timed else None,
            has_goal=True,
        )
        chosen = [(client, "full") for client in range(13)]
        turnout = attendance.turnout(round_, chosen)
        working = [entry for entry in chosen if entry not in turnout.failed]
        assert len(turnout.present) == min(8, len(working))
        if timed:
            fastest = sorted(working, key=lambda entry: times[entry[0]])[:8]
            assert turnout.present == sorted(fastest)
        assert sorted([*turnout.present, *turnout.not_needed, *turnout.late]) == working
        assert not turnout.late
        counted[[client for client, _ in turnout.present]] += 1
    # 399 rounds with a probability near 0.6: a standard deviation of 10, of which six are allowed.
    assert np.ptp(counted) < 120


def test_without_a_goal_nobody_is_not_needed() -> None:
    attendance = Attendance(
        clients=4, seed=1, failure_rate=0.0, deadline_s=2.0, quorum=None,
        seconds=lambda client, spec: float(client),
    )  # fmt: skip
    turnout = attendance.turnout(1, [(client, "full") for client in range(4)])
    assert (turnout.late, turnout.not_needed) == ([(3, "full")], [])
