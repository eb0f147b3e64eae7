"""Clients that are away for a part of each day, second by second."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bundles import write_noise
from made_calibration import DEVICE
from models_for_tests import CLASSES, INPUT_SHAPE
from parameters import half_quick
from refusals import refused
from simulated_runs import without_times
from toolkit.simulation.attendance import Attendance, Chosen, Turnout
from toolkit.simulation.daily_absence import Absence
from toolkit.simulation.results import read_run
from toolkit.simulation.simulate import simulate
from toolkit.simulation.timetable import Timetable


def is_away(absence: Absence, client: int, second: int) -> bool:
    """Whether `client` is away in the second that begins then: all times are whole seconds."""
    day, away = round(absence.day_s), round(absence.share * absence.day_s)
    return second in {
        one % day + day * (second // day)
        for one in range(round(absence.begins[client]), round(absence.begins[client]) + away)
    }


def followed(absence: Absence, client: int, start: int, work: int) -> int:
    """When `client` has worked for `work` seconds, counted second by second."""
    second = start
    while work or is_away(absence, client, second):
        if not work:
            break
        work -= not is_away(absence, client, second)
        second += 1
    return second


def drawn_absence(draw: np.random.Generator, clients: int) -> Absence:
    day = int(draw.integers(2, 30))
    begins = draw.integers(-day, 2 * day, size=clients).tolist()
    return Absence(int(draw.integers(0, day)) / day, float(day), begins)


def test_work_takes_longer_by_the_absences(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(150):
        absence = drawn_absence(draw, clients=1)
        start, work = int(draw.integers(0, 100)), int(draw.integers(1, 60))
        back = next(s for s in range(start, start + 100) if not is_away(absence, 0, s))
        assert absence.returns(0, start) == pytest.approx(back, abs=1e-6)
        expected = followed(absence, 0, start, work)
        assert absence.ready(0, start, work) == pytest.approx(expected, abs=1e-6)


def test_the_share_is_away_at_any_time(seed: int) -> None:
    """Six standard deviations of a binomial distribution are allowed."""
    absence = Absence.drawn(0.3, 86400.0, 4000, seed)
    for now in np.random.default_rng(seed).uniform(0, 10 * 86400, size=5):
        away = sum(absence.returns(client, now) > now for client in range(4000))
        assert abs(away - 1200) < 6 * (4000 * 0.3 * 0.7) ** 0.5
    assert Absence.drawn(0.3, 86400.0, 4000, seed) == absence
    assert Absence.drawn(0.3, 86400.0, 4000, seed + 1) != absence


@pytest.mark.parametrize("has_goal", [True, False])
def test_rounds_of_clients_that_come_and_go(seed: int, has_goal: bool) -> None:
    """Rounds one after another, against a count of each second."""
    draw = np.random.default_rng(seed)
    for _ in range(30):
        clients, deadline = int(draw.integers(2, 9)), int(draw.integers(5, 60))
        absence = drawn_absence(draw, clients)
        times = draw.integers(1, 12, size=clients).tolist()
        goal = int(draw.integers(1, clients + 1))
        attendance = Attendance(
            clients=clients, seed=seed, failure_rate=0.2, deadline_s=deadline, min_updates=1,
            quorum=goal, seconds=lambda client, spec, times=times: times[client],
            has_goal=has_goal, absence=absence,
        )  # fmt: skip
        now = 0
        for round_ in range(1, 6):
            here: Sequence[int] = range(clients)
            opened = now
            if has_goal:
                while not (here := [c for c in here if not is_away(absence, c, opened)]):
                    opened, here = opened + 1, range(clients)
            assert attendance.candidates(now) == list(here)
            turnout = attendance.turnout(round_, [(client, "full") for client in here], now)
            lucky = [c for c in here if attendance.luck(round_)[c] >= 0.2]
            came = {c: followed(absence, c, opened, times[c]) for c in lucky}
            closed = opened + deadline
            while lucky and not any(one <= closed for one in came.values()):
                closed += deadline
            counted = sorted(came.values())[: min(goal, len(here))]
            if len(counted) == min(goal, len(here)):
                closed = min(closed, counted[-1])
            assert turnout.simulated_s == pytest.approx(closed - now, abs=1e-6)
            present = {client for client, _ in turnout.present}
            in_time = sum(one <= closed for one in counted)
            assert sorted(came[c] for c in present) == counted[:in_time]
            gone = {
                c for c in here if all(is_away(absence, c, s) for s in range(opened, closed))
            } - present
            assert {client for client, _ in turnout.away} == gone
            lost = (*turnout.failed, *turnout.late, *turnout.not_needed)
            assert {client for client, _ in lost} == set(here) - present - gone
            now = closed


def test_an_asynchronous_timetable_by_hand() -> None:
    """Client 0 takes 2 s and is away from 6 to 10; client 1 takes 1.4 s, away from 1.4 to 5.4."""
    absence = Absence(0.4, 10.0, [6.0, 1.4])
    attendance = Attendance(
        clients=2, seed=0, failure_rate=0.0, deadline_s=1e9, quorum=1, absence=absence,
        seconds=lambda client, spec: [2.0, 1.4][client],
    )  # fmt: skip
    timetable = Timetable(attendance, ["full"] * 2, concurrency=2, buffer_size=1)
    came = [timetable.turnout(round_) for round_ in range(1, 10)]
    # Client 1 trains version 3 when it is back, not version 1. So does client 0 with version 7.
    assert [(one.present[0][0], *one.versions.values()) for one in came] == [
        (1, 0), (0, 0), (0, 2), (0, 3), (1, 3), (1, 5), (1, 6), (1, 7), (0, 7),
    ]  # fmt: skip
    closed = np.cumsum([one.simulated_s for one in came])
    np.testing.assert_allclose(closed, [1.4, 2.0, 4.0, 6.0, 6.8, 8.2, 9.6, 11.0, 12.0])


def test_an_update_waits_for_its_client() -> None:
    """The only client takes 3 s and is away from 2 to 6."""
    attendance = Attendance(
        clients=1, seed=0, failure_rate=0.0, deadline_s=1e9, quorum=1,
        absence=Absence(0.4, 10.0, [2.0]), seconds=lambda client, spec: 3.0,
    )  # fmt: skip
    timetable = Timetable(attendance, ["full"], concurrency=1, buffer_size=1)
    assert [timetable.turnout(round_).simulated_s for round_ in (1, 2, 3)] == [7.0, 3.0, 7.0]


def test_nobody_starts_or_sends_while_away(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(30):
        clients = int(draw.integers(2, 9))
        absence = Absence.drawn(float(draw.uniform(0, 0.8)), 5.0, clients, seed)
        times = draw.exponential(1, size=clients).tolist()
        attendance = Attendance(
            clients=clients, seed=seed, failure_rate=float(draw.choice([0.0, 0.3])), quorum=None,
            deadline_s=float(draw.choice([0.7, 1e9])), absence=absence,
            seconds=lambda client, spec, times=times: times[client],
        )  # fmt: skip
        places, buffer = int(draw.integers(1, clients + 1)), int(draw.integers(1, clients + 1))
        timetable = Timetable(attendance, ["full"] * clients, places, buffer)
        opened, spans = [0.0], []
        for round_ in range(1, 20):
            one = timetable.turnout(round_)
            assert one.simulated_s is not None
            opened.append(opened[-1] + one.simulated_s)
            for client, version in one.versions.items():
                spans.append((client, version))
                first = absence.ready(client, opened[version], times[client])
                last = absence.ready(client, opened[version + 1], times[client])
                assert first <= opened[round_] + 1e-6
                assert last >= opened[round_ - 1] - 1e-6
        assert spans
        assert len(set(spans)) == len(spans)


KIND = """
[[devices]]
name = "one"
submodel = "full"
count = 6
profile = "device.json"
download_mbps = 3
upload_mbps = 0.5
slowdown = 20
"""


@pytest.fixture
def file(seed: int, tmp_path: Path, given_times: None) -> Path:
    """A client needs 20 s."""
    write_noise(tmp_path / "data.npz", 90, seed, INPUT_SHAPE, CLASSES)
    (tmp_path / "device.json").write_bytes(msgspec.json.encode(DEVICE))
    return tmp_path / "fleet.toml"


def written(file: Path, top: str, table: str, kind: str = KIND) -> Path:
    file.write_text(
        f"""
        model = "models_for_tests:relu_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = 5
        {top}
        [simulation]
        data = "data.npz"
        {table}
        {kind}
        """
    )
    return file


@pytest.mark.parametrize(
    "top",
    half_quick(['clients_per_round = 2\nselection = "oldest"', 'mode = "async"\nbuffer_size = 2']),
    ids=["goal", "async"],
)
def test_an_interrupted_simulation_has_the_same_absences(
    seed: int, file: Path, tmp_path: Path, top: str
) -> None:
    table = f"away = 0.5\nday_s = 70\nfailure_rate = 0.2\nseed = {seed % 1000}"
    whole = simulate(written(file, top, table), tmp_path / "whole")
    for rounds in (2, 3, 5):
        parts = simulate(file, tmp_path / "parts", rounds=rounds)
    assert without_times(parts) == without_times(whole)
    assert all(one.simulated_s is not None and one.simulated_s >= 0 for one in whole)


def test_rounds_with_a_goal_ask_clients_that_are_there(
    seed: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are those of the results of the rounds before."""
    asked, decide = [], Attendance.turnout

    def deciding(self: Attendance, round_: int, chosen: Chosen, closed: float = 0.0) -> Turnout:
        asked.append([client for client, _ in chosen])
        return decide(self, round_, chosen, closed)

    monkeypatch.setattr(Attendance, "turnout", deciding)
    written(file, "clients_per_round = 6", f"away = 0.8\nday_s = 130\nseed = {seed % 1000}")
    history = simulate(file, tmp_path / "out")
    absence = Absence.drawn(0.8, 130.0, 6, seed % 1000)
    times = np.cumsum([0.0, *(one.simulated_s for one in history)])[:-1]
    for now, clients in zip(times, asked, strict=True):
        returns = [absence.returns(client, now) for client in range(6)]
        assert clients == [
            client for client in range(6) if absence.returns(client, min(returns)) == min(returns)
        ]


def test_rounds_of_all_clients_also_ask_those_that_are_away(file: Path, tmp_path: Path) -> None:
    """Those that come back within the deadline send their updates; the others receive nothing."""
    history = simulate(
        written(file, "deadline_s = 30\nmin_updates = 1", "away = 0.5\nday_s = 1000"),
        tmp_path / "out",
    )
    assert sum(one.away for one in history) > 0
    for one in history:
        sent = one.took_part - one.late
        assert sent + one.late + one.away == 6
        assert one.bytes_down * sent == one.bytes_up * (6 - one.away)
    assert read_run(tmp_path / "out")[1] == history


def test_an_earlier_simulation_continues(file: Path, tmp_path: Path) -> None:
    """Earlier versions wrote neither `away` nor `day_s`."""
    written(file, "", "")
    simulate(file, tmp_path / "out", rounds=1)
    kept = tmp_path / "out" / "config.json"
    settings = msgspec.json.decode(kept.read_bytes())
    del settings["simulation"]["away"], settings["simulation"]["day_s"]
    kept.write_bytes(msgspec.json.encode(settings))
    assert len(simulate(file, tmp_path / "out", rounds=2)) == 2


@pytest.mark.parametrize(
    ("table", "kind", "words"),
    [
        ("away = 1", KIND, "less than or equal to 0.99"),
        ("day_s = 0", KIND, "greater than or equal to 1"),
        ("away = 0.3", KIND.split("profile")[0], "needs simulated time"),
    ],
)
def test_mistakes_in_the_file(file: Path, table: str, kind: str, words: str) -> None:
    with refused("config.bad-value", words):
        simulate(written(file, "", table, kind), file.parent / "out")
