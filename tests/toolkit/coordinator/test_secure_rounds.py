"""Rounds whose updates are added up behind masks: real agents, a real coordinator over HTTP."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from commands import free_port, kept_killing, warm_context
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation import membership, round_loop
from device_agent.federation.device_state import DeviceState
from device_agent.federation.run_options import RunOptions
from device_agent.formats.manifest import MANIFEST, WEIGHTS, Manifest
from device_agent.formats.protocol.rounds import Stopped
from device_agent.formats.protocol.secure_sums import (
    SecureInput,
    SecureKeys,
    SecureShares,
    SecureUnmasking,
)
from device_agent.formats.update import write_update
from device_agent.training.batching import ROUND_SEEDS
from device_agent.training.training_options import TrainingOptions
from refusals import refused
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.http import request_limits
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.incoming_files import IncomingFile
from vector_fleet import (
    SIZE,
    VectorModel,
    assert_soon,
    configured,
    full_token,
    record_for,
    running,
    send,
    task,
    token,
    trained,
)

ROUNDS = 2
CHANGE = 4.0
FLEET = f"""
model = "toolkit.models:digits_cnn"
input_shape = [2]
rounds = {ROUNDS}
held_out = "held_out.npz"
port = 0
phones = false
deadline_s = 60

[training]
epochs = 1

[privacy]
secure_aggregation = true
smallest_group = 3
most_change = {CHANGE}
most_samples = 100

[[devices]]
name = "board"
submodel = "full"
count = 5
"""


class WeightedModel(VectorModel):
    """A vector model that also keeps the records of the updates that it was given."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.records: list[Any] = []

    def fold_checked(self, updates: Any, limits: object = None) -> None:
        updates = list(updates)
        self.records += [record for record, _ in updates]
        weights = [record.samples for record, _ in updates]
        self.weights = np.average(
            [tensors["w"] for _, tensors in updates], axis=0, weights=weights
        ).astype(np.float32)


def change_of(name: str, round_: int) -> np.ndarray:
    """What a device's training adds in a round, up to the clip."""
    draw = np.random.default_rng([sum(name.encode()), round_])
    return draw.uniform(-CHANGE, CHANGE, SIZE).astype(np.float32)


def samples_of(name: str) -> int:
    return 10 + 17 * int(name[-1])


def trains(name: str, before: Callable[[int], None] = lambda round_: None) -> Callable[..., object]:
    """Training of the device `name`; `before` is called with the round."""

    def train(
        folder: Path, data: str, out: Path, *, options: TrainingOptions, on_epoch: Any, **more: Any
    ) -> object:
        round_ = options.seed % ROUND_SEEDS
        before(round_)
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        weights = load_file(folder / WEIGHTS)["w"] + change_of(name, round_)
        on_epoch(1, 1, 0.125)
        record = replace(record_for(manifest, folder), samples=samples_of(name))
        return write_update(out, record, {"w": weights})

    return train


def agents(
    server: Server,
    folder: Path,
    names: Sequence[str],
    train: Callable[[str], Any] = trains,
    kinds: Mapping[str, str] | None = None,
    run: Callable[..., object] = round_loop.run,
) -> list[threading.Thread]:
    """Agents that have joined and run, each with its own training."""
    threads = []
    for name in names:
        state = folder / name
        kind = "board" if kinds is None else kinds[name]
        membership.join(server.url, token(server.config, kind), name, state)
        options = RunOptions(data=str(server.config.held_out), state=state)
        more = {"train": train(name), "sleep": lambda seconds: time.sleep(0.02)}
        threads.append(threading.Thread(target=run, args=(options,), kwargs=more))
    for thread in threads:
        thread.start()
    return threads


def plain_rounds(names: Sequence[str]) -> np.ndarray:
    """The oracle: what rounds without masks give, in float64."""
    return sum((mean_change(names, round_) for round_ in range(1, ROUNDS + 1)), np.zeros(SIZE))


def mean_change(names: Sequence[str], round_: int) -> np.ndarray:
    changes = [change_of(name, round_).astype(float) for name in names]
    return np.average(changes, axis=0, weights=[samples_of(name) for name in names])


def global_model(config: CoordinatorConfig) -> np.ndarray:
    return load_file(config.state / "global.safetensors")["w"]


def test_rounds_give_the_mean_and_reveal_no_update(tmp_path: Path) -> None:
    config, names = configured(tmp_path / "c", FLEET), [f"board-{n}" for n in range(5)]
    model, said = WeightedModel(), []
    with running(config, model, said.append) as server:
        for thread in agents(server, tmp_path, names):
            thread.join(60)
        status = server.coordinator.status()
    error = np.abs(global_model(config) - plain_rounds(names)).max()
    # The mean has an error of less than n steps * n / the sum of the weights, in each round.
    step = CHANGE / ((2**31 - 1) // 5 - 1)
    weight = sum(min(samples_of(name), 100) for name in names) / 100
    rounding = 2 * ROUNDS * np.finfo(np.float32).eps * CHANGE
    assert error < ROUNDS * 5 * step / weight + rounding
    assert [r.updates for r in status.history] == [0, 5, 5]
    assert [d.rounds_trained for d in status.devices] == [ROUNDS] * 5
    assert [r.samples for r in model.records] == [sum(map(samples_of, names))] * ROUNDS
    assert [(r.loss_first, r.loss_last) for r in model.records] == [(2.0, 1.0)] * ROUNDS
    assert "Round 1: secure sum of full: 5 devices, mean loss 2.0000 to 1.0000." in said
    assert all(device.loss is None for device in status.devices)


def test_the_coordinator_receives_and_stores_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that it receives in all rounds, and everything that is ever in its files."""
    config, names = configured(tmp_path / "c", FLEET), [f"board-{n}" for n in range(5)]
    received, whole, write = [], request_limits._then, IncomingFile.write

    def keep_body(body: bytes, receive: Any) -> Any:
        received.append(body)
        return whole(body, receive)

    def keep_piece(file: IncomingFile, piece: bytes) -> bool:
        received.append(piece)
        return write(file, piece)

    monkeypatch.setattr(request_limits, "_then", keep_body)
    monkeypatch.setattr(IncomingFile, "write", keep_piece)
    stored = []

    def before(round_: int) -> None:
        for path in config.state.rglob("*"):
            with suppress(OSError):
                stored.append(path.read_bytes() if path.is_file() else b"")

    def train(name: str) -> Callable[..., object]:
        return trains(name, before) if name == names[0] else trains(name)

    with running(config, WeightedModel()) as server:
        for thread in agents(server, tmp_path, names, train):
            thread.join(60)
    before(0)
    seen = [*received, *stored]
    assert sum(map(len, received)) > ROUNDS * 5 * 4 * SIZE  # the masked updates are among them
    starts = [np.zeros(SIZE, np.float32), mean_change(names, 1).astype(np.float32)]
    for name in names:
        for round_, start in enumerate(starts, 1):
            change = change_of(name, round_)
            for numbers in (change, start + change, change.astype(float), -change):
                for begin in (1, SIZE - 4):
                    assert not any(numbers[begin : begin + 4].tobytes() in one for one in seen)
    # Nor samples, steps and losses of a device.
    bodies = [body for body in received if body.startswith(b"{")]
    assert not any(b'"samples"' in body or b'"steps"' in body for body in bodies)
    told = [json.loads(body)["loss"] for body in bodies if b'"loss"' in body]
    assert told
    assert set(told) == {None}


def test_a_small_group_trains_nothing_and_the_operator_is_told(tmp_path: Path) -> None:
    two = '\n[[devices]]\nname = "phone"\nsubmodel = "width:0.5"\ncount = "any"\n'
    text = FLEET.replace("count = 5", "count = 3\n") + two
    config = configured(tmp_path / "c", text.replace("port = 0", "port = 0\nmin_devices = 5"))
    model, said = WeightedModel(), []
    with running(config, model, said.append) as server:
        kinds = {"board-0": "board", "board-1": "board", "board-2": "board"}
        kinds |= {"phone-3": "phone", "phone-4": "phone"}
        for thread in agents(server, tmp_path, list(kinds), kinds=kinds):
            thread.join(60)
        status = server.coordinator.status()
    why = "only 2 devices trained width:0.5, and a secure sum needs 3"
    assert [r.left_out for r in status.history] == [{}, *[{"width:0.5": why}] * ROUNDS]
    assert [r.updates for r in status.history] == [0, 3, 3]
    notes = {device.device: device.note for device in status.devices}
    assert notes["phone-1"] == notes["phone-2"] == f"not in round {ROUNDS}: {why}"
    assert notes["board-1"] is None
    assert f"Round 1: no secure sum of width:0.5: {why}." in said
    assert np.abs(global_model(config) - plain_rounds(list(kinds)[:3])).max() < 1e-6


def killed_at(message: type, round_: int, client: CoordinatorClient) -> None:
    """Let this process end like by kill -9 when it sends `message` in `round_`."""
    send = client.send_to_sum

    def send_or_die(of: int, what: Any) -> None:
        if isinstance(what, message) and of == round_:
            os.kill(os.getpid(), signal.SIGKILL)
        send(of, what)

    client.send_to_sum = send_or_die  # type: ignore[method-assign]


def run_until_killed(folder: Path, name: str, url: str, bearer: str, message: type) -> None:
    """An agent in a process of its own, which joins first and dies in the first round."""
    membership.join(url, bearer, name, folder / name)
    original = round_loop.CoordinatorClient

    def client(*given: Any, **more: Any) -> CoordinatorClient:
        made = original(*given, **more)
        killed_at(message, 1, made)
        return made

    round_loop.CoordinatorClient = client  # type: ignore[assignment, misc]
    options = RunOptions(data=str(folder / "c" / "held_out.npz"), state=folder / name)
    round_loop.run(options, train=trains(name), sleep=lambda seconds: time.sleep(0.02))


@pytest.mark.parametrize(
    "message",
    [
        SecureInput,
        *(
            pytest.param(m, marks=pytest.mark.long)
            for m in (SecureKeys, SecureShares, SecureUnmasking)
        ),
    ],
)
def test_an_agent_is_killed_in_the_middle(tmp_path: Path, message: type) -> None:
    """The sum does without it, unless its masked update has come; then it goes on as before."""
    config, names = configured(tmp_path / "c", FLEET), [f"board-{n}" for n in range(5)]
    model = WeightedModel()
    with running(config, model) as server:
        threads = agents(server, tmp_path, names[1:])
        about = (tmp_path, names[0], server.url, token(config, "board"), message)
        victim = warm_context().Process(target=run_until_killed, args=about)
        victim.start()
        victim.join(60)
        assert victim.exitcode == -signal.SIGKILL
        device = server.coordinator.store.registry.device("board-5")
        server.coordinator.stopped(device, Stopped(code="agent.killed", reason="it was killed"))
        assert_soon(lambda: len(model.records) > 0, 30)
        options = RunOptions(data=str(config.held_out), state=tmp_path / names[0])
        again = trains(names[0])
        round_loop.run(options, train=again, sleep=lambda seconds: time.sleep(0.02))
        for thread in threads:
            thread.join(60)
        history = server.coordinator.store.history.results()[1:]
    inside = 5 if message is SecureUnmasking else 4
    assert [r.updates for r in history] == [inside, 5]
    first = names if message is SecureUnmasking else names[1:]
    expected = mean_change(first, 1) + mean_change(names, 2)
    assert np.abs(global_model(config) - expected).max() < 1e-6


def test_the_coordinator_is_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    """At random moments: a round whose sum was not complete is repeated with new keys."""
    config = configured(tmp_path / "c", FLEET.replace("port = 0", f"port = {free_port()}"))
    names, draw = [f"board-{n}" for n in range(5)], random.Random(seed)
    with running(config, WeightedModel()) as server:
        for name in names:
            membership.join(server.url, token(config, "board"), name, tmp_path / name)
    with kept_killing(serve, tmp_path / "c", draw, 8) as kills:
        threads = []
        for name in names:
            options = RunOptions(data=str(config.held_out), state=tmp_path / name)
            run = {"train": trains(name), "sleep": lambda seconds: time.sleep(0.05)}
            threads.append(threading.Thread(target=round_loop.run, args=(options,), kwargs=run))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert kills() > 0
    with running(config, WeightedModel()) as server:
        status = server.coordinator.status()
    assert [r.updates for r in status.history] == [0, *[5] * ROUNDS]
    assert np.abs(global_model(config) - plain_rounds(names)).max() < 1e-6


def serve(folder: Path) -> None:
    """A coordinator in this process, until it is killed."""
    Server(load_config(folder / "fleet.toml"), WeightedModel(), Path("fleet.toml")).run()


@pytest.mark.parametrize("has_key", [True, False], ids=["key", "no key"])
def test_a_coordinator_cannot_end_the_protection(tmp_path: Path, has_key: bool) -> None:
    """A device that was promised secure sums when it joined never sends its update itself.

    Nor does one that joined when coordinators had no keys, after work with a secure sum.
    """

    def stop(*given: object, **more: object) -> object:
        raise KeyboardInterrupt

    few = FLEET.replace("count = 5", "count = 3\n")
    config = configured(tmp_path / "c", few)
    with running(config, WeightedModel()) as server:
        states = [tmp_path / str(number) for number in range(3)]
        for state in states:
            membership.join(server.url, full_token(config, "board"), state.name, state)
        options = RunOptions(data=str(config.held_out), state=states[0])
        if not has_key:
            (states[0] / "secure-sums").unlink()
            DeviceState(states[0]).remember(replace(DeviceState(states[0]).member(), key=None))
            with pytest.raises(KeyboardInterrupt):
                round_loop.run(options, train=stop)
    plain = configured(tmp_path / "c", few[: few.index("[privacy]")] + few[few.index("[[dev") :])
    with running(plain, WeightedModel()) as server:
        identity = DeviceState(states[0]).member()
        DeviceState(states[0]).remember(replace(identity, url=server.url))
        with refused("trust.no-secure-sum"):
            round_loop.run(options, train=trains("board-0"), patience_s=0)


def test_a_plain_update_is_not_taken(tmp_path: Path) -> None:
    """An agent that is too old for secure sums is told so; nothing of its update is kept."""
    config = configured(tmp_path / "c", FLEET.replace("count = 5", "count = 3\n"))
    with running(config, WeightedModel()) as server:
        links = []
        for number in range(3):
            state = tmp_path / str(number)
            known = membership.join(server.url, full_token(config, "board"), str(number), state)
            links.append(CoordinatorClient(server.url, known.secret, patience_s=0))
        work, _, update = trained(links[0], tmp_path / "device")
        with refused("round.closed"):
            send(links[0], work.round, update)
        assert not list((config.state / "incoming").iterdir())


def test_below_the_threshold_the_round_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three stops before its masked update: the round opens again, with new keys."""
    config = configured(tmp_path / "c", FLEET.replace("count = 5", "count = 3\n"))
    names, said = [f"board-{n}" for n in range(3)], []
    send_to_sum, keys, inputs, ordered = CoordinatorClient.send_to_sum, [], [], threading.Lock()

    def send_once(link: CoordinatorClient, round_: int, message: Any) -> None:
        if isinstance(message, SecureKeys):
            keys.append((round_, message.mask_key))
        if not isinstance(message, SecureInput):
            send_to_sum(link, round_, message)
            return
        with ordered:
            inputs.append(threading.current_thread())
            if len(inputs) == 1:
                raise KeyboardInterrupt
            send_to_sum(link, round_, message)
            if len(inputs) == 3:  # the others have sent theirs: nothing comes until the deadline
                server.coordinator.clock = lambda: time.monotonic() + config.deadline_s

    monkeypatch.setattr(CoordinatorClient, "send_to_sum", send_once)

    def run_twice(options: RunOptions, **more: Any) -> None:
        try:
            round_loop.run(options, **more)
        except KeyboardInterrupt:  # its owner stops it, and starts it again
            round_loop.run(options, **more)

    with running(config, WeightedModel(), said.append) as server:
        for thread in agents(server, tmp_path, names, run=run_twice):
            thread.join(60)
        status = server.coordinator.status()
    assert [r.updates for r in status.history] == [0, *[3] * ROUNDS]
    again = "Round 1 opens again, because it has no secure sum. full: Only 2 of 3 devices"
    assert any(line.startswith(again) for line in said)
    assert len({key for _, key in keys}) == len(keys) >= 3 * ROUNDS + 3
    assert np.abs(global_model(config) - plain_rounds(names)).max() < 1e-6


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("keys", {"bundle": "a" * 64, "mask_key": "?", "share_key": "", "signature": "é"}),
        ("keys", {"bundle": "a" * 64, "mask_key": "A" * 44, "share_key": "", "signature": "x"}),
        ("keys", {"bundle": "b", "mask_key": "", "share_key": "", "signature": ""}),
        ("shares", {"shares": {str(n): "" for n in range(301)}}),
        ("shares", {"shares": {"board-2": "x"}}),
        ("input", {"sha256": "a" * 64}),
        ("confirmation", {"signature": ""}),
        ("unmasking", {"seeds": {"board-1": "?"}, "keys": {}}),
    ],
)
def test_what_no_device_sends_is_refused(
    secure_link: CoordinatorClient, route: str, body: dict[str, object]
) -> None:
    for round_ in (0, 1, 10**30):
        answer = secure_link._pool.request(
            "POST", f"{secure_link.url}/v1/rounds/{round_}/sum/{route}", json=body
        )
        assert answer.status in (409, 422), answer.data


@pytest.fixture(scope="module")
def secure_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorClient]:
    """The link of one of three devices in a round that is open."""
    folder = tmp_path_factory.mktemp("secure")
    config = configured(folder / "c", FLEET.replace("count = 5", "count = 3\n"))
    with running(config, WeightedModel()) as server:
        for number in range(3):
            state = folder / str(number)
            known = membership.join(server.url, full_token(config, "board"), str(number), state)
        link = CoordinatorClient(server.url, known.secret, patience_s=0)
        task(link)
        yield link
