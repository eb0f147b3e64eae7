"""Federations without a last round, releases that the coordinator makes, and early stopping."""

import math
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_agent.federation.fleet_status import lines
from device_agent.formats.protocol.fleet import FederatedEvaluation, RoundResult
from refusals import refused
from toolkit.coordinator.coordinator import MOST_HISTORY, newest_rounds
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.small_tables import ReleaseTable
from toolkit.coordinator.releases.release_changes import add_release
from toolkit.coordinator.releases.release_schedule import round_to_release
from toolkit.coordinator.releases.release_status import release_status
from toolkit.coordinator.rounds.compared_rounds import best_of, compared, stops_early
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.release_folder import MOST_RELEASES, Release, ReleaseFolder
from toolkit.coordinator.storage.retention import BEST
from toolkit.evaluation_sums import Evaluation
from vector_fleet import CONFIG, VectorModel, assert_soon, configured, running
from vector_releases import fleet, held, writing

DESKTOPS = CONFIG[: CONFIG.rindex("[[devices]]")]
ENDLESS = DESKTOPS.replace("rounds = 3", 'rounds = "endless"\nkeep = 2')
RELEASING = ENDLESS.replace("[training]", "[release]\nevery = 2\n\n[training]")
EARLY = DESKTOPS.replace("rounds = 3", 'rounds = "endless"\nearly_stopping = 3')


class ScriptedModel(VectorModel):
    """A model whose accuracy after each round is given; the last one stays."""

    def __init__(self, accuracies: list[float]) -> None:
        super().__init__()
        self.accuracies = accuracies

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        round_ = int(self.weights[0])  # training adds one in each round
        accuracy = self.accuracies[min(round_, len(self.accuracies) - 1)]
        return Evaluation(len(x), len(x), accuracy, 1.0)


def made(config: CoordinatorConfig, round_: int) -> Release:
    """Stands in for `make_release`: a bundle that names its round."""
    return add_release(config.state, round_, ["desktop"], writing(f"release {round_}"))


def serving(config: CoordinatorConfig, server: Server) -> None:
    server.round_worker.make_release = partial(made, config)


def rounds_done(server: Server) -> int:
    return server.coordinator.rounds.done


def test_endless_rounds_release_as_they_go_on(tmp_path: Path) -> None:
    config = configured(tmp_path, RELEASING)
    with running(config) as server:
        serving(config, server)
        with fleet(server, tmp_path, 2) as states:
            assert_soon(lambda: rounds_done(server) >= 9, 60)
            status = server.coordinator.status()
            assert status.rounds == 0
            assert lines(status)[0].startswith(f"round {status.round}, ")
            assert_soon(lambda: all(held(state) is not None for state in states))
    releases, devices = release_status(config.state)
    assert [release.round for release in releases[:4]] == [2, 4, 6, 8]
    assert {device.runs for device in devices} <= {release.number for release in releases}
    bundles = list((config.state / "releases").glob("*/desktop"))
    assert sorted(int(path.parent.name) for path in bundles) == [r.number for r in releases[-2:]]
    # Two kept models, the best one, and the files of one round's bundles and updates.
    assert len(list((config.state / "files").rglob("*.*"))) <= 12
    before = rounds_done(server)
    messages: list[str] = []
    with running(config, say=messages.append) as server:
        assert_soon(lambda: any("Continuing" in message for message in messages))
        assert f"Continuing with round {before + 1}." in messages


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no room"), "no room"),
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
    ],
)
def test_a_release_that_cannot_be_made_does_not_stop_the_rounds(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    config = configured(tmp_path, RELEASING)
    messages: list[str] = []

    def fails(round_: int) -> Release:
        raise error

    with running(config, say=messages.append) as server:
        server.round_worker.make_release = fails
        with fleet(server, tmp_path, 2):
            assert_soon(lambda: rounds_done(server) >= 3, 60)
    told = [line for line in messages if line.startswith("No release was made after round 2: ")]
    assert [line.endswith(reason) for line in told] == [True]


def result(round_: int, accuracy: float | None, loss: float | None = 1.0) -> RoundResult:
    return RoundResult(round=round_, accuracy=accuracy, loss=loss, updates=2)


def made_from(round_: int, **options: bool) -> Release:
    return Release(number=1, round=round_, created=0, changed=0, kinds={}, **options)


HISTORY = [result(0, 0.9), result(1, 0.2), result(2, 0.5), result(3, 0.5), result(4, 0.4)]


@pytest.mark.parametrize(
    ("table", "done", "released", "expected"),
    [
        (ReleaseTable(), 4, [], None),
        (ReleaseTable(every=3), 4, [], None),
        (ReleaseTable(every=2), 4, [], 4),
        (ReleaseTable(every=2), 4, [made_from(4)], None),
        (ReleaseTable(every=2), 0, [], None),
        (ReleaseTable(when="improved"), 4, [], 3),  # the initial model is never released
        (ReleaseTable(when="improved"), 4, [made_from(1)], 3),
        (ReleaseTable(when="improved"), 4, [made_from(2)], None),  # 3 is only equal to it
        (ReleaseTable(when="improved"), 4, [made_from(3, withdrawn=True)], None),
        (ReleaseTable(when="improved", every=3), 4, [], None),
    ],
)
def test_which_model_is_released(
    table: ReleaseTable, done: int, released: list[Release], expected: int | None
) -> None:
    assert round_to_release(table, done, 4, HISTORY, released, range(5)) == expected


def test_the_best_model_that_is_kept_is_released() -> None:
    """`keep` keeps the best of all rounds, which may be the initial model."""
    table = ReleaseTable(when="improved", every=4)
    assert round_to_release(table, 4, 4, HISTORY, [], {0, 3, 4}) == 3
    assert round_to_release(table, 4, 4, HISTORY, [], {0, 1, 4}) == 4
    assert round_to_release(table, 4, 4, HISTORY, [made_from(3)], {0, 1, 4}) is None


def test_only_the_last_releases_are_listed(tmp_path: Path) -> None:
    folder = ReleaseFolder(tmp_path)
    with folder.locked():
        folder.write([replace_number(number) for number in range(1, MOST_RELEASES + 6)])
    assert [release.number for release in folder.read()] == list(range(6, MOST_RELEASES + 6))


def replace_number(number: int) -> Release:
    return Release(number=number, round=number, created=0, changed=0, kinds={})


def test_rounds_end_when_the_models_do_not_improve(tmp_path: Path) -> None:
    config = configured(tmp_path, EARLY)
    accuracies = [0.1, 0.5, 0.4, 0.6, 0.6, 0.5, 0.6]
    messages: list[str] = []
    with running(config, ScriptedModel(accuracies), messages.append) as server:
        with fleet(server, tmp_path, 2):
            assert_soon(lambda: server.coordinator.rounds.phase == "finished", 60)
        assert rounds_done(server) == 6  # three rounds after the third
    text = "The rounds end after round 6: no model was better than that of round 3"
    assert any(message.startswith(text) and "0.6000" in message for message in messages)
    with running(config, ScriptedModel(accuracies)) as server:
        assert server.coordinator.rounds.phase == "finished"
    patient = config.model_copy(update={"early_stopping": 4})
    with running(patient, ScriptedModel([*accuracies, 0.7])) as server:
        assert server.coordinator.rounds.phase != "finished"


def test_the_status_has_the_last_rounds_and_the_current_one() -> None:
    history = [result(round_, 0.5) for round_ in range(MOST_HISTORY + 51)]
    assert newest_rounds(history, 3) == [history[3], *history[51:]]
    assert newest_rounds(history, MOST_HISTORY) == history[51:]
    assert newest_rounds(history[:9], 3) == history[:9]


def judged(round_: int, accuracy: float, loss: float) -> FederatedEvaluation:
    return FederatedEvaluation(
        round=round_, devices=2, samples=9, counted=9, correct=1, accuracy=accuracy, loss=loss,
        trained_accuracy=None, trained_loss=None, mean_accuracy=None, mean_loss=None,
        worst_accuracy=None, worst_loss=None, kinds={},
    )  # fmt: skip


def best_in_sql(history: list[RoundResult]) -> int | None:
    """The best round as the state folder finds it."""
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE history (round, accuracy, loss, devices)")
    db.execute("CREATE TABLE settings_changes (round, key, before, after)")
    for r in history:
        devices = None if r.devices is None else msgspec.json.encode(r.devices).decode()
        db.execute(
            "INSERT INTO history VALUES (?, ?, ?, ?)", (r.round, r.accuracy, r.loss, devices)
        )
    best = db.execute(BEST).fetchone()
    return None if best is None else int(best[0])


def test_the_best_round_is_that_of_the_figure_of_early_stopping() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        history = []
        for round_ in range(int(draw.integers(1, 8))):
            accuracy, loss, other, more = (float(n) / 4 for n in draw.integers(0, 4, 4))
            one = (
                result(round_, accuracy, loss)
                if draw.random() < 0.6
                else result(round_, None, None)
            )
            if draw.random() < 0.6:
                one = replace(one, devices=judged(round_ + 1, other, more))
            history.append(one)
        # Plain: the newest judged round decides which figure counts.
        newest = next((r for r in reversed(history) if r.loss is not None or r.devices), None)
        if newest is None:
            assert (best_in_sql(history), compared(history)) == (None, [])
            continue
        plain = (
            {r.round: (r.accuracy, -r.loss) for r in history if r.loss is not None}
            if newest.loss is not None
            else {r.round: (r.devices.accuracy, -r.devices.loss) for r in history if r.devices}
        )
        best = max(plain, key=lambda r: (*plain[r], r))
        figures = [(r.round, figure) for r, figure in compared(history)]
        assert best_in_sql(history) == best == best_of(figures)
        first = min(r for r in plain if plain[r] == plain[best])
        for patience in (1, 2, 3):
            assert stops_early(figures, patience) == (max(plain) - first >= patience)


@pytest.mark.parametrize("wrong", ['"forever"', "0", "true"])
def test_other_numbers_of_rounds_are_refused(tmp_path: Path, wrong: str) -> None:
    with refused("config.bad-value"):
        configured(tmp_path, CONFIG.replace("rounds = 3", f"rounds = {wrong}"))


@pytest.mark.parametrize("accuracy", [0.9, None])
def test_a_diverged_model_is_no_improvement(accuracy: float | None) -> None:
    """A simulation may go on with one; its accuracy is that of a single class."""
    sound = None if accuracy is None else 0.5
    diverged, figures = (accuracy, math.nan), [(1, (sound, 1.0)), (2, (sound, 0.9))]
    assert stops_early([*figures, (3, diverged), (4, diverged)], 2)
    assert best_of([*figures, (3, diverged)]) == 2
    assert not stops_early([(1, diverged), *((n + 1, figure) for n, figure in figures)], 2)
