"""Asynchronous rounds over HTTP: devices go on after their round, also through a restart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load, save

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import uploaded
from device_agent.formats.protocol.fleet import RoundResult
from operators import operator
from refusals import refused
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.closing.round_aggregation import LOST_VERSION, RoundAggregation
from toolkit.coordinator.leave_one_out import leave_one_out
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.retention import KEEP_UPDATES
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from toolkit.submodels.hyperparameters import TrainingConfig
from updates import record_of
from vector_fleet import (
    CONFIG,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    send_trained,
    task,
    trained,
)

ASYNC = CONFIG.replace(
    "rounds = 3", 'rounds = 5\nmode = "async"\nbuffer_size = 2\nmax_staleness = 1\nkeep = 1'
)


def round_of(server: Server) -> tuple[str, int]:
    rounds = server.coordinator.rounds
    return rounds.phase, rounds.round


def note(server: Server, link: CoordinatorClient) -> str | None:
    """What the operator is told about the device of `link`."""
    secret = str(link._pool.headers["Authorization"]).removeprefix("Bearer ")
    device = server.coordinator.store.registry.device_with(secret)
    assert device is not None
    return server.coordinator.device_statuses([device])[0].note


def test_devices_go_on_after_their_round(tmp_path: Path) -> None:
    """Each training adds 1. The models are those of FedBuff, written out."""
    config, said = configured(tmp_path / "c", ASYNC), list[str]()
    with running(config, say=said.append) as server:
        links = enrol(server, tmp_path)
        first, second, slow = links.values()
        send_trained(first, 1, tmp_path / "one-first")
        work, _, late = trained(slow, tmp_path / "one-slow")
        send_trained(second, 1, tmp_path / "one-second")
        assert_soon(lambda: round_of(server) == ("training", 2))
        # It still gets the work of round 1, and may fetch its files again.
        again = task(slow)
        assert (again.round, again.files) == (1, work.files)
        slow.download(again.files[0], tmp_path / "again" / again.files[0].name)
        second_work, _, second_update = trained(second, tmp_path / "two-second")
    store = Store(config.state)
    names = {link: name for name, link in links.items()}
    assert store.flights() == {names[slow]: 1, names[second]: 2}
    store.close()
    with running(config, VectorModel(), say=said.append) as server:
        states = [tmp_path / str(number) for number in range(3)]
        first, second, slow = (joined(server, state) for state in states)
        assert_soon(lambda: round_of(server) == ("training", 2))
        assert task(slow).round == 1
        with refused("round.closed"):
            send(slow, 2, late)
        send(slow, 1, late)
        assert slow.work().state == "wait"
        second.peek()
        assert task(second).round == 2
        send_trained(first, 2, tmp_path / "two-first")
        assert_soon(lambda: round_of(server) == ("training", 3))
        # (1 + 1 / sqrt(2)) / 2 beyond the first model.
        expected = 1 + (1 + 1 / np.sqrt(2)) / 2
        np.testing.assert_allclose(_weights(server), expected, rtol=1e-6)
        send(second, second_work.round, second_update)
        work, _, update = trained(slow, tmp_path / "three-slow")
        assert work.round == 3
        held = trained(first, tmp_path / "three-first")
        send(slow, 3, update)
        assert_soon(lambda: round_of(server) == ("training", 4))
        expected += (1 + 1 / np.sqrt(2)) / 2
        np.testing.assert_allclose(_weights(server), expected, rtol=1e-6)
        send_trained(slow, 4, tmp_path / "four-slow")
        send_trained(second, 4, tmp_path / "four-second")
        assert_soon(lambda: round_of(server) == ("training", 5))
        # `first` trains round 3, two rounds old: it is refused, and gets the newest model.
        assert note(server, first) == "its training of round 3 was dropped: the model is too old"
        with refused("round.closed") as error:
            send(first, held[0].round, held[2])
        reason = "the update is too old, because round 5 of 5 takes updates of models that are at "
        assert f"Round 3 takes no updates now: {reason}most 1 round old." in str(error.value)
        refusal = f"its update of round 3 was not taken: {reason}most 1 round old"
        assert note(server, first) == refusal
        assert task(first).round == 5
        send_trained(first, 5, tmp_path / "five-first")
        assert note(server, first) is None
    refusals = [line for line in said if "was not taken" in line]
    assert [line.split(": ")[1] for line in refusals] == [
        "its update of round 2 was not taken",
        "its update of round 3 was not taken",
    ]
    history = json.loads((config.state / "history.json").read_bytes())["history"]
    assert [one.get("staleness") for one in history] == [None, [2], [1, 1], [1, 1], [2]]
    assert [saved.staleness for saved in saved_rounds(config.state)][1:3] == [[2], [1, 1]]
    assert any(line.endswith("from 2 updates of staleness 0.5 (at most 1)") for line in said)


def test_a_device_that_is_too_old_waits_for_the_newest_model(tmp_path: Path) -> None:
    """Its files are gone, and its update could not count in the next round."""
    with running(configured(tmp_path / "c", ASYNC)) as server:
        first, second, slow = enrol(server, tmp_path).values()
        _, _, late = trained(slow, tmp_path / "slow")
        send_trained(first, 1, tmp_path / "one-first")
        send_trained(second, 1, tmp_path / "one-second")
        assert_soon(lambda: round_of(server) == ("training", 2))
        assert task(slow).round == 1
        server.coordinator.pause_rounds("no round opens", "me")
        send_trained(first, 2, tmp_path / "two-first")
        send_trained(second, 2, tmp_path / "two-second")
        assert_soon(lambda: server.coordinator.rounds.done == 2)
        work = slow.work()
        assert (work.state, work.files) == ("wait", [])
        with refused("round.closed"):
            send(slow, 1, late)
        server.coordinator.resume_rounds("go on", "me")
        assert_soon(lambda: round_of(server) == ("training", 3))
        assert task(slow).round == 3


@pytest.mark.parametrize(("keep", "kept"), [("1", 3), ("5", 5), ('"all"', "all"), ('"best"', 3)])
def test_the_models_that_updates_need_are_kept(tmp_path: Path, keep: str, kept: object) -> None:
    config = configured(tmp_path, ASYNC.replace("keep = 1", f"keep = {keep}"))
    assert config.kept_models == kept


def test_a_site_has_no_asynchronous_rounds(tmp_path: Path) -> None:
    with refused("config.bad-value", 'a site needs mode = "sync"'):
        configured(tmp_path, ASYNC.replace("keep = 1", "site = true"))


def test_with_new_settings_all_begin_with_the_newest_model(tmp_path: Path) -> None:
    with running(configured(tmp_path / "c", ASYNC)) as server:
        server.coordinator.make_model = lambda config: VectorModel()
        first, second, slow = enrol(server, tmp_path).values()
        assert task(slow).round == 1
        configured(tmp_path / "c", ASYNC.replace("buffer_size = 2", "buffer_size = 3"))
        changes = operator(server).apply_settings("steadier").changes
        assert [change.text() for change in changes] == ["buffer_size: 2 -> 3"]
        send_trained(first, 1, tmp_path / "first")
        send_trained(second, 1, tmp_path / "second")
        assert_soon(lambda: round_of(server) == ("training", 2))
        assert task(slow).round == 2
        assert server.coordinator.rounds.quorum == 3
        assert server.coordinator.store.flights() == {}


def _weights(server: Server) -> np.ndarray:
    data = server.coordinator.store.model()
    assert data is not None
    return load(data)["w"]


def test_updates_are_folded_by_their_versions(tmp_path: Path, seed: int) -> None:
    """Also by `leave_one_out`. An update whose model is not kept is left out."""
    draw = np.random.default_rng(seed)
    federation = Federation("toolkit.models:mnist_dnn", (784,), TrainingConfig())
    samples = draw.normal(size=(8, 784)).astype(np.float32), draw.integers(10, size=8)
    store = Store(tmp_path / "state", keep=2)
    store.set_value(KEEP_UPDATES, "1")
    store.registry.set_token("board", "token", 3, 1)
    table = uploaded(federation.submodel("full").program.tensors)

    def moved() -> dict[str, np.ndarray]:
        tensors = federation.model.tensors.items()
        return {
            n: (v.numpy() + 0.1 * draw.normal(size=v.shape)).astype(np.float32) for n, v in tensors
        }

    versions, bases = [], []
    for round_ in range(3):
        versions.append(moved())
        federation.adopt({name: torch.from_numpy(value) for name, value in versions[-1].items()})
        bases.append(federation.model.fingerprint())
        result = RoundResult(round=round_, accuracy=(1 + round_) / 4, loss=1.0, updates=0)
        store.add_result(result, federation.save())
    store.remove_unnamed()
    updates = {}
    for number, version in enumerate([2, 1, 0]):
        device, _ = store.registry.enrol("token", f"pi {number}", str(number), "{}", lambda _: None)
        arrays = moved()
        data = save({e.name: arrays[e.stands_for or ""] for e in table})
        store.blobs.put(data)
        record = record_of("full", 10 * (number + 1), table)
        record = replace(record, base=bases[version], file=fingerprint(data))
        store.add_update(3, device.id, record)
        updates[device.id] = record.samples, version, arrays

    def expected(*devices: str) -> dict[str, torch.Tensor]:
        total = sum(updates[device][0] for device in devices)
        new = {name: value.astype(np.float64) for name, value in versions[2].items()}
        for samples_, version, arrays in (updates[device] for device in devices):
            factor = samples_ / total / np.sqrt(3 - version)
            new = {n: v + factor * (arrays[n] - versions[version][n]) for n, v in new.items()}
        return {name: torch.from_numpy(value).float() for name, value in new.items()}

    new, old, lost = updates
    folding = RoundAggregation(federation, store, samples, 3, asynchronous=True)
    assert (folding.run(), folding.left_out) == (2, {lost: LOST_VERSION})
    assert folding.staleness == {new: 0, old: 1}
    for name, value in expected(new, old).items():
        torch.testing.assert_close(federation.model.tensors[name], value, rtol=1e-6, atol=1e-6)
    result = RoundResult(round=3, accuracy=0.5, loss=1.0, updates=2, left_out=folding.left_out)
    store.keep = 3
    store.add_result(result, federation.save())
    store.close()
    every, without = leave_one_out(federation, tmp_path / "state", 3, samples)
    found = {one.left_out.device: one.evaluation.loss for one in without}
    for loss, used in ((every.loss, (new, old)), (found[new], (old,)), (found[old], (new,))):
        federation.adopt(expected(*used))
        assert loss == pytest.approx(federation.evaluation(*samples).loss, rel=1e-5)
