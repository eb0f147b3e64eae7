"""A changed file of the federation: applied while it runs, and found at a restart."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from device_agent.federation import membership
from killed_actions import Step, audit, kill_at_every_write
from operators import coordinator_of, operator
from parameters import some_long
from refusals import refused
from toolkit.aggregation.federation import Federation
from toolkit.cli.rounds_commands import rounds
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.settings_log import Change
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_source import FILE
from toolkit.coordinator.server import Server
from toolkit.coordinator.settings_check import changes_while_running
from toolkit.coordinator.startup import serve
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from vector_fleet import (
    CONFIG,
    VectorModel,
    configured,
    enrol,
    joined,
    running,
    send_all,
    send_trained,
    task,
    token,
)

OTHER = CONFIG.replace("epochs = 1", "learning_rate = 0.01").replace("count = 2", "count = 3")
OTHER = f'deadline_s = 60.0\n{OTHER}\n[[devices]]\nname = "phone"\nsubmodel = "width:0.5"\n'
CHANGES = [
    "deadline_s: 600.0 -> 60.0",
    "training.learning_rate: 0.05 -> 0.01",
    "devices.desktop.count: 2 -> 3",
    'devices.phone.submodel: null -> "width:0.5"',
    "devices.phone.count: null -> 1",
]


class Made:
    """Makes models for changed settings, and keeps the settings for which it did."""

    def __init__(self, server: Server) -> None:
        self.configs: list[CoordinatorConfig] = []
        server.coordinator.make_model = self

    def __call__(self, config: CoordinatorConfig) -> VectorModel:
        self.configs.append(config)
        return VectorModel()


def test_changes_hold_from_the_next_round_on(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    config = configured(folder)
    with running(config) as server:
        made, actor, links = Made(server), operator(server), enrol(server, tmp_path)
        assert task(links["board-1"]).round == 1
        assert actor.settings_changes().changes == []
        configured(folder, OTHER)
        shown = actor.settings_changes()
        assert ([change.text() for change in shown.changes], shown.round) == (CHANGES, 2)
        assert (made.configs, actor.audit().entries) == ([], [])
        assert actor.apply_settings("it overfits") == shown
        assert actor.apply_settings("again") == shown
        assert [config.training.learning_rate for config in made.configs] == [0.01]
        before = links["board-1"].work().files
        assert server.coordinator.config.deadline_s == 600
        send_all(links, 1, tmp_path)
        assert before
        assert task(links["board-1"]).round == 2
        coordinator = server.coordinator
        assert coordinator.config.training.learning_rate == 0.01
        assert 0 < coordinator.rounds.remaining_s(coordinator.clock()) <= 60
        # The new model goes on with the weights of the first round, and new devices may join.
        assert coordinator.status().history[-1].loss == 1.0
        phone = membership.join(server.url, token(config, "phone"), "p", tmp_path / "p")
        third = membership.join(server.url, token(config, "desktop"), "d", tmp_path / "d")
        assert (phone.device, third.device) == ("phone-1", "desktop-3")
        for name, link in links.items():
            send_trained(link, 2, tmp_path / f"{name}2")
        assert task(links["board-1"]).round == 3
        changed = {result.round: result.changes for result in actor.status().history}
        assert changed == {0: [], 1: [], 2: CHANGES}
        assert [(e.action, e.target, e.reason) for e in actor.audit().entries] == [
            (f"set {change}", "round 2", "it overfits") for change in CHANGES
        ]
        weights = server.round_worker._model.weights  # type: ignore[attr-defined]
        np.testing.assert_array_equal(weights, np.full(len(weights), 2, np.float32))
    history = json.loads((config.state / "history.json").read_bytes())["history"]
    assert [entry.get("changes") for entry in history] == [None, None, CHANGES]
    assert [saved.changes for saved in saved_rounds(config.state)] == [[], [], CHANGES]
    printed = CliRunner().invoke(rounds, [str(config.state)]).output
    assert "Round 2 began with deadline_s: 600.0 -> 60.0\n" in printed
    with running(configured(folder, OTHER)) as server:  # these are its settings from now on
        assert len(operator(server).audit().entries) == len(CHANGES)


def test_changes_are_checked_again_when_the_model_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        actor, links = operator(server), enrol(server, tmp_path)

        def slow(config: CoordinatorConfig) -> VectorModel:
            for round_ in (1, 2):
                send_all(links, round_, tmp_path / str(round_))
            assert task(links["board-1"]).round == 3
            return VectorModel()

        server.coordinator.make_model = slow
        configured(folder, CONFIG.replace("rounds = 3", "rounds = 2"))
        with refused("settings.too-few-rounds"):
            actor.apply_settings("it is good enough")
        assert actor.audit().entries == []
        assert server.coordinator.config.rounds == 3


IMPOSSIBLE = [
    (CONFIG.replace("epochs = 1", 'loss = "mae"'), "state.other-federation"),
    (CONFIG.replace("input_shape = [2]", "input_shape = [3]"), "state.other-federation"),
    (CONFIG.replace('"board"', '"other"'), "state.other-federation"),
    (CONFIG.replace("port = 0", "port = 8124"), "settings.needs-restart"),
    (f'notify = {{command = ["touch", "x"]}}\n{CONFIG}', "settings.needs-restart"),
    (CONFIG.replace("rounds = 3", "rounds = 1"), "settings.too-few-rounds"),
    (CONFIG.replace("epochs = 1", "epochs = 0"), "option.invalid-value"),
    (CONFIG.replace("epochs = 1", "epochs ="), "config.not-toml"),
]


def test_what_cannot_change_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        made, actor, links = Made(server), operator(server), enrol(server, tmp_path)
        assert task(links["board-1"]).round == 1
        for text, code in IMPOSSIBLE:
            (folder / "fleet.toml").write_text(text)
            for ask in (actor.settings_changes, lambda: actor.apply_settings("x")):
                with refused(code):
                    ask()
        assert (made.configs, actor.audit().entries) == ([], [])
        configured(folder, OTHER)
        server.coordinator.make_model = None  # a site
        with refused("settings.needs-restart"):
            actor.apply_settings("x")


def test_submodels_and_the_mode_stay_in_asynchronous_rounds(tmp_path: Path) -> None:
    text = f'mode = "async"\nbuffer_size = 2\n{CONFIG}'
    now = configured(tmp_path, text)
    for changed, key in (
        (text.replace('"full"', '"width:0.5"'), "devices.desktop.submodel"),
        (CONFIG, "mode"),
    ):
        with refused("state.other-federation", key=key):
            changes_while_running(now, configured(tmp_path, changed))
    more = configured(tmp_path, text.replace("epochs = 1", "epochs = 2"))
    assert [change.key for change in changes_while_running(now, more)] == ["training.epochs"]


def test_a_file_that_is_changed_back_keeps_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        Made(server)
        actor = operator(server)
        assert task(enrol(server, tmp_path)["board-1"]).round == 1
        configured(folder, OTHER)
        actor.apply_settings("try it")
        configured(folder)
        assert actor.apply_settings("no").changes == []
        assert server.coordinator.new_settings is None
        assert actor.audit().entries[-1].action == "keep the settings"


def test_a_round_that_opens_again_keeps_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        Made(server)
        actor, links = operator(server), enrol(server, tmp_path)
        assert task(links["board-1"]).round == 1
        configured(folder, OTHER)
        assert actor.apply_settings("x").round == 2
        actor.abort_round(1, "x")
        assert task(links["board-1"]).round == 1
        assert server.coordinator.config.deadline_s == 600
        send_all(links, 1, tmp_path)
        assert task(links["board-1"]).round == 2
        assert server.coordinator.config.deadline_s == 60


def test_fewer_places_end_the_enrolment(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    config = configured(folder)
    with running(config) as server:
        Made(server)
        for kind in ("desktop", "board"):
            link = membership.join(server.url, token(config, kind), "m", tmp_path / kind)
        configured(folder, CONFIG.replace("count = 2", "count = 1"))
        assert operator(server).apply_settings("one is broken").round == 1
        board = joined(server, tmp_path / "board")
        assert (link.device, task(board).round) == ("board-1", 1)


def test_a_restart_takes_the_changes_into_the_open_round(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        links = enrol(server, tmp_path)
        send_trained(links["desktop-1"], 1, tmp_path / "d")
        before = task(links["board-1"])
    text = CONFIG.replace("epochs = 1", "epochs = 2").replace("low-rank:0.5", "width:0.5")
    with running(configured(folder, text)) as server:
        board, second = joined(server, tmp_path / "2"), joined(server, tmp_path / "1")
        now = task(board)
        assert (before.submodel, now.submodel, now.round) == ("low-rank:0.5", "width:0.5", 1)
        for name, link in (("b", board), ("e", second)):
            send_trained(link, 1, tmp_path / name)
        assert task(board).round == 2
        actor = operator(server)
        [_, first] = actor.status().history
        assert first.updates == 3  # that of before the restart counts
        changes = [
            "training.epochs: 1 -> 2",
            'devices.board.submodel: "low-rank:0.5" -> "width:0.5"',
        ]
        assert first.changes == changes
        assert [(e.who, e.action, e.target) for e in actor.audit().entries] == [
            ("operator", f"set {change}", "round 1") for change in changes
        ]


def test_applied_changes_are_logged_once_over_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with running(configured(folder)) as server:
        Made(server)
        assert task(enrol(server, tmp_path)["board-1"]).round == 1
        configured(folder, OTHER)
        operator(server).apply_settings("x")
    other = OTHER.replace("count = 3", "count = 2")
    with running(configured(folder, other)) as server:
        log = operator(server).audit().entries
        assert [entry.action for entry in log[: len(CHANGES)]] == [f"set {c}" for c in CHANGES]
        [kept] = log[len(CHANGES) :]
        assert kept.action == "set devices.desktop.count: 2, as before"
        assert server.coordinator.store.settings.scheduled() == []


def settings(text: str) -> Step:
    def act(coordinator: Coordinator) -> None:
        file = coordinator.config.state.parent / "fleet.toml"
        file.write_text(text)
        coordinator.store.set_value(FILE, str(file))
        coordinator.make_model = lambda config: VectorModel()
        coordinator.apply_settings("x", "operator")

    return act


RATES = ("0.1", "0.2", "0.3")
STEPS = [settings(CONFIG.replace("epochs = 1", f"learning_rate = {rate}")) for rate in RATES]


def prepare(folder: Path) -> None:
    coordinator_of(folder)[1].close()


def check(folder: Path, done: int) -> None:
    log = audit(folder)
    assert (
        log == [(f"set training.learning_rate: 0.05 -> {r}", "round 1") for r in RATES][: len(log)]
    )
    assert len(log) >= done
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    row = connection.execute("SELECT value FROM meta WHERE key = 'scheduled settings'").fetchone()
    connection.close()
    kept = [Change(**change) for change in json.loads(row[0])] if row else []
    assert [f"set {change.text()}" for change in kept] == [action for action, _ in log[-1:]]


@pytest.mark.parametrize("before", some_long([True, False], False))
def test_killed_at_every_write_scheduled_settings_agree_with_the_log(
    tmp_path: Path, before: bool
) -> None:
    assert kill_at_every_write(tmp_path, STEPS, prepare, check, before) > 2 * len(STEPS)


DIGITS = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 3
held_out = "held_out.npz"
port = 0

[training]
learning_rate = 0.05

[[devices]]
name = "desktop"
submodel = "full"
"""


def test_serve_makes_the_model_for_new_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(DIGITS)
    samples = np.zeros((4, 1, 8, 8), np.float32), np.array([0, 1, 2, 3])
    np.savez(tmp_path / "held_out.npz", x=samples[0], y=samples[1])

    def run(server: Server) -> None:
        coordinator = server.coordinator
        server.round_worker.resume()
        weights = coordinator.store.model()
        file.write_text(DIGITS.replace('"full"', '"slice:no_such_part"'))
        with refused("spec.unknown-cut-point"):
            coordinator.apply_settings("x", "operator")
        assert coordinator.store.operator_log.last() == 0
        file.write_text(DIGITS.replace("0.05", "0.01").replace('"full"', '"width:0.5"'))
        assert len(coordinator.apply_settings("x", "operator").changes) == 2
        server.round_worker._take_new_settings()
        model = server.round_worker._model
        assert isinstance(model, Federation)
        assert model.training.learning_rate == 0.01
        assert model.save() == weights
        assert coordinator.submodels() == {"width:0.5"}
        server.close()

    monkeypatch.setattr(Server, "run", run)
    serve(file)
