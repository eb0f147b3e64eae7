"""A running federation gets another model, with the weights that fit: agents train it on."""

import json
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load, load_file

from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.formats.manifest import WEIGHTS
from device_agent.training.bundle_training import train_bundle
from growing_models import SHAPE
from killed_actions import audit, kill_at_every_write
from operators import operator
from parameters import some_long
from refusals import refused
from toolkit.cli.operator.settings_commands import apply
from toolkit.cli.rounds_commands import rounds
from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.settings_log import Change
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.saved_rounds import model_file
from toolkit.submodels.model_loading import load_model
from vector_fleet import assert_soon, running, token

FLEET = """
model = "growing_models:{model}"
input_shape = [3]
rounds = 3
held_out = "held_out.npz"
port = 0
{more}
[[devices]]
name = "board"
submodel = "full"
count = {count}
"""
CHANGE = 'model: "growing_models:two_classes" -> "growing_models:three_classes"'
TENSORS = "model.tensors: 7 kept; 2 kept in part: head.weight (2 x 5 of 3 x 5), head.bias (2 of 3)"
INITIAL = {
    name: load_model(f"growing_models:{name}").state_dict() for name in ("three_classes", "wider")
}
"""Made before a coordinator runs, whose threads draw from the same generator of torch."""
Weights = dict[str, np.ndarray]


def configured(
    folder: Path, model: str = "two_classes", more: str = "", count: int = 1
) -> CoordinatorConfig:
    draw = np.random.default_rng(7)
    x = draw.normal(size=(12, *SHAPE)).astype(np.float32)
    np.savez(folder / "held_out.npz", x=x, y=np.arange(12) % 2)
    (folder / "fleet.toml").write_text(FLEET.format(model=model, more=more, count=count))
    return load_config(folder / "fleet.toml")


def carried(old: Weights, reference: str) -> Weights:
    """Numpy's own: the initial weights, with the old ones in the first rows and columns."""
    new = {name: tensor.numpy().copy() for name, tensor in INITIAL[reference].items()}
    for name in new.keys() & old.keys():
        new[name][np.ix_(*map(range, old[name].shape))] = old[name]
    return new


def trained_weights(state: Path, data: Path, rounds: int) -> list[Weights]:
    """Let the device take part in so many rounds; the weights that it got in each."""
    got: list[Weights] = []

    def train(folder: Path, *args: object, **options: object) -> object:
        if len(got) == rounds:
            raise EnoughError
        got.append(load_file(folder / WEIGHTS))
        return train_bundle(folder, *args, **options)

    class EnoughError(BaseException):
        pass

    def sleep(seconds: float) -> None:
        if len(got) == rounds:
            raise EnoughError

    options = RunOptions(data=str(data), state=state)
    with suppress(EnoughError):
        round_loop.run(options, train=train, patience_s=20, sleep=sleep)
    return got


def model_of(config: CoordinatorConfig, round_: int) -> Weights:
    return load(model_file(config.state, round_).read_bytes())


def assert_same(came: Weights, expected: Weights) -> None:
    for name in came:  # bundles hold no counters
        np.testing.assert_array_equal(came[name], expected[name], name)


def test_the_next_round_trains_the_new_model_with_the_weights_that_fit(tmp_path: Path) -> None:
    config = configured(tmp_path)
    data, state = tmp_path / "held_out.npz", tmp_path / "device"
    with running(config, federation(config)) as server:
        server.coordinator.make_model = federation
        actor = operator(server)
        join(server.url, token(config, "board"), "shed", state)
        assert_soon(lambda: server.coordinator.rounds.phase == "training", 60)
        configured(tmp_path, "three_classes")
        with refused("settings.needs-carry"):
            actor.apply_settings("a third animal")
        shown = CliRunner().invoke(apply, [str(config.state), "--carry", "--dry-run"])
        assert shown.stdout.splitlines() == [CHANGE, TENSORS], shown.output
        applied = actor.apply_settings("a third animal", carry=True)
        assert applied == actor.apply_settings("again", carry=True)
        assert ([change.text() for change in applied.changes], applied.round) == (
            [CHANGE, TENSORS], 2,
        )  # fmt: skip
        first, second = trained_weights(state, data, 2)
        assert_same(first, model_of(config, 0))
        assert_same(second, carried(model_of(config, 1), "three_classes"))
        assert_soon(lambda: server.coordinator.rounds.done == 2, 60)
        changes = {result.round: result.changes for result in actor.status().history}
        assert changes == {0: [], 1: [], 2: [CHANGE, TENSORS]}
        audit = [(entry.action, entry.reason) for entry in actor.audit().entries]
        assert audit == [(f"set {text}", "a third animal") for text in (CHANGE, TENSORS)]
        assert model_of(config, 2)["head.weight"].shape == (3, 5)
        # The model of round 1 has two classes. It is carried over once more, into the same bundle
        # as in round 2, so the device sends the same update.
        actor.go_back(1, "try again")
        assert trained_weights(state, data, 1) == []
        assert_soon(lambda: server.coordinator.rounds.done == 3, 60)
        assert_same(model_of(config, 3), model_of(config, 2))
    printed = " ".join(CliRunner().invoke(rounds, [str(config.state)]).output.split())
    assert f"Round 2 began with {CHANGE}" in printed
    history = json.loads((config.state / "history.json").read_bytes())["history"]
    assert history[2]["changes"] == [CHANGE, TENSORS]


def test_a_restart_before_and_in_the_first_round_of_the_new_model(tmp_path: Path) -> None:
    """An update of the earlier model that came for the open round does not count any more."""
    two = {"more": "min_updates = 2", "count": 2}
    config = configured(tmp_path, **two)
    with running(config, federation(config)) as server:
        server.coordinator.make_model = federation
        for name in ("shed", "barn"):
            join(server.url, token(config, "board"), name, tmp_path / name)
        trained_weights(tmp_path / "shed", tmp_path / "held_out.npz", 1)
        assert len(server.coordinator.rounds.updates) == 1
        configured(tmp_path, "wider", **two)
        operator(server).apply_settings("x", carry=True)
    wide = configured(tmp_path, "wider", **two)
    expected = carried(model_of(config, 0), "wider")
    saved = []
    for _ in range(2):  # the round that was open begins again with the new model, also twice
        with running(wide, federation(wide)) as server:
            assert_soon(lambda: server.coordinator.rounds.phase == "training", 60)
            model = server.round_worker._model
            saved.append(model.save())
            assert (server.coordinator.rounds.round, server.coordinator.rounds.updates) == (1, {})
            assert server.coordinator.store.settings.scheduled() == []
    assert_same(load(saved[0]), expected)
    assert saved[0] == saved[1]
    with refused("state.other-federation"):
        Server(config, federation(config), tmp_path / "fleet.toml")


def test_without_the_operator_no_start_changes_the_model(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config, federation(config)):
        pass
    other = configured(tmp_path, "three_classes")
    with refused("state.other-federation"):
        Server(other, federation(other), tmp_path / "fleet.toml")


@pytest.mark.parametrize(
    ("model", "more", "code"),
    [
        ("unlike", "", "settings.nothing-carried"),
        ("three_classes", 'mode = "async"\nbuffer_size = 1', "state.other-federation"),
        ("no_such_model", "", "model.unknown-callable"),
    ],
)
def test_a_model_that_cannot_be_carried_over_changes_nothing(
    tmp_path: Path, model: str, more: str, code: str
) -> None:
    config = configured(tmp_path, more=more)
    with running(config, federation(config)) as server:
        server.coordinator.make_model = federation
        assert_soon(lambda: server.coordinator.store.model() is not None, 60)
        configured(tmp_path, model, more)
        for act in (
            lambda: operator(server).apply_settings("x", carry=True),
            lambda: operator(server).settings_changes(carry=True),
        ):
            with refused(code):
                act()
        assert (server.coordinator.new_settings, operator(server).audit().entries) == (None, [])


def test_before_the_first_model_nothing_can_be_carried_over(tmp_path: Path) -> None:
    config = configured(tmp_path)
    server = Server(config, federation(config), tmp_path / "fleet.toml")
    server.coordinator.make_model = federation
    configured(tmp_path, "three_classes")
    with refused("settings.no-model"):
        server.coordinator.apply_settings("x", "me", carry=True)
    server.close()


def started(folder: Path) -> tuple[Coordinator, Store]:
    """The coordinator after a start with the file of the folder.

    If nobody has applied the file, it names the earlier model again.
    """
    config = configured(folder, "three_classes" if audit(folder) else "two_classes")
    server = Server(config, federation(config), folder / "fleet.toml")
    server.coordinator.make_model = federation
    return server.coordinator, server.coordinator.store


def apply_three_classes(coordinator: Coordinator) -> None:
    configured(coordinator.config.state.parent, "three_classes")
    coordinator.apply_settings("a third animal", "operator", carry=True)


def kept(folder: Path) -> tuple[list[str], list[str], str]:
    """The audit log, the changes that wait, and the model of the settings in effect."""
    connection = sqlite3.connect(folder / "state" / "state.sqlite3")
    rows = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    connection.close()
    waiting = [Change(**change) for change in json.loads(rows.get("scheduled settings", "[]"))]
    actions = [action for action, _ in audit(folder)]
    model = json.loads(rows["federation"])["model"].removeprefix("growing_models:")
    return actions, [f"set {change.text()}" for change in waiting], model


@pytest.mark.parametrize("before", some_long([True, False], False))
@pytest.mark.parametrize("killed", ["apply", "start"])
def test_killed_at_every_write_a_carried_model_agrees_with_the_log(
    tmp_path: Path, before: bool, killed: str
) -> None:
    old, actions = tmp_path / "old", [f"set {CHANGE}", f"set {TENSORS}"]
    old.mkdir()
    config = configured(old)
    with running(config, federation(config)) as server:
        assert_soon(lambda: server.coordinator.store.model() is not None, 60)
        server.coordinator.make_model = federation
        if killed == "start":
            apply_three_classes(server.coordinator)
    steps = [apply_three_classes] if killed == "apply" else [lambda coordinator: None]
    waits, holds = (actions, actions, "two_classes"), (actions, [], "three_classes")
    states = [([], [], "two_classes"), waits, holds]

    def check(folder: Path, done: int) -> None:
        now = states.index(kept(folder))
        assert now >= (done if killed == "apply" else 1 + done)

    def prepare(folder: Path) -> None:
        shutil.copytree(old, folder)

    kill_at_every_write(tmp_path / "new", steps, prepare, check, before, opened=started)
