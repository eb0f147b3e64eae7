"""Held-out samples decide which updates spoil a model: they are left out, and told."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from commands import edgetailor
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.fleet import RoundResult
from device_agent.formats.update import write_update
from hostile_fleet import HostileFleet, with_tensor
from models_for_tests import CLASSES
from operators import coordinator_of, enrolled
from toolkit.aggregation.aggregate import aggregate
from toolkit.aggregation.model_judge import JUDGED, Bar
from toolkit.coordinator.closing.central_judge import JUDGE, bar_of, pause_judged, rounds_judged
from toolkit.coordinator.coordinator import restore
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.evaluation_sums import Evaluation
from vector_fleet import (
    CONFIG,
    SIZE,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    running,
    send,
    send_trained,
    trained,
)

REASON = f"{JUDGED}: accuracy 0.9000, loss 1 in place of accuracy 0.1000, loss 1"


class Spoilable(VectorModel):
    """A model whose predictions are wrong once its numbers are large."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        accuracy = 0.9 if abs(float(self.weights.mean())) < 50 else 0.1
        return Evaluation(len(x), len(x), accuracy, 1.0)


def send_all_but(links: Mapping[str, CoordinatorClient], bad: str, round_: int, out: Path) -> None:
    for name, link in links.items():
        if name == bad:
            _, record, folder = trained(link, out / f"bad-{round_}")
            shutil.rmtree(folder)
            write_update(folder, record, {"w": np.full(SIZE, 1e4, np.float32)})
            send(link, round_, folder)
        else:
            send_trained(link, round_, out / f"{name}-{round_}")


def rounds_over(server: Server, count: int) -> None:
    assert_soon(lambda: server.coordinator.rounds.done == count)


def test_a_device_that_spoils_three_models_is_paused_until_an_operator_resumes_it(
    tmp_path: Path,
) -> None:
    text, told = CONFIG.replace("rounds = 3", "rounds = 9"), list[str]()
    config = configured(tmp_path / "c", text)
    with running(config, Spoilable(), told.append) as server:
        links, coordinator = enrol(server, tmp_path), server.coordinator
        for round_ in (1, 2, 3):
            send_all_but(links, "desktop-2", round_, tmp_path)
            rounds_over(server, round_)
        results = coordinator.store.history.results()[1:]
        assert [r.left_out for r in results] == [{"desktop-2": REASON}] * 3
        assert [(r.accuracy, r.updates) for r in results] == [(0.9, 2)] * 3
        assert_soon(lambda: coordinator.rounds.paused == {"desktop-2"})
        (status,) = [d for d in coordinator.status().devices if d.device == "desktop-2"]
        assert (status.state, status.note) == (
            "paused",
            "paused by the judge, which left out its updates of the rounds 1, 2, 3",
        )
        (entry,) = coordinator.store.operator_log.entries(0, 9)
        assert (entry.who, entry.action, entry.target) == (JUDGE, "pause", "desktop-2")
        for name in ("desktop-1", "board-1"):  # the rounds do not wait for it
            send_trained(links[name], 4, tmp_path / f"{name}-4")
        rounds_over(server, 4)
        coordinator.act("resume", "desktop-2", "its sensor is repaired", "ann")
        assert_soon(lambda: coordinator.rounds.waits_for("desktop-2"))
        for round_ in (5, 6):
            send_all_but(links, "desktop-2", round_, tmp_path)
            rounds_over(server, round_)
        assert not coordinator.rounds.paused  # it was left out twice since then
    assert sum(f"left out the update of desktop-2: {JUDGED}" in line for line in told) == 5
    history = json.loads((config.state / "history.json").read_text())["history"]
    assert history[1]["left_out"] == {"desktop-2": REASON}
    listed = edgetailor("rounds", str(config.state), cwd=tmp_path).stdout
    assert listed.count("1 left out") == 5


def test_without_the_judge_the_model_is_spoilt(tmp_path: Path) -> None:
    config = configured(tmp_path / "c", f"{CONFIG}\n[aggregation]\njudge = false\n")
    with running(config, Spoilable()) as server:
        links = enrol(server, tmp_path)
        send_all_but(links, "desktop-2", 1, tmp_path)
        rounds_over(server, 1)
        (result,) = server.coordinator.store.history.results()[1:]
    assert (result.accuracy, result.left_out) == (0.1, {})


def test_a_coordinator_that_was_killed_before_the_pause_pauses_at_its_start(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    device = enrolled(coordinator, store, "desktop", "key").id
    for round_ in range(4):
        out = {device: REASON} if round_ else {}
        store.add_result(
            RoundResult(round=round_, accuracy=0.5, loss=1.0, updates=2, left_out=out), b"model"
        )
    store.close()
    store = Store(coordinator.config.state, needs_model=False)
    again = restore(coordinator.config, store, lambda: 1.0)
    assert rounds_judged(store.history.results()) == {device: [1, 2, 3]}
    for _ in range(2):  # repeating it changes nothing
        pause_judged(again)
        assert again.rounds.paused == {device}
        assert len(store.operator_log.entries(0, 9)) == 1
    again.act("resume", device, "checked", "ann")
    pause_judged(again)
    assert not again.rounds.paused
    store.close()


def test_the_bar_is_the_best_of_the_last_three_models(tmp_path: Path) -> None:
    coordinator, store = coordinator_of(tmp_path)
    samples = np.zeros((40, 2)), np.zeros(40)
    assert bar_of(coordinator, samples) is None
    for round_, accuracy in enumerate((0.95, 0.9, 0.7, 0.8)):
        result = RoundResult(round=round_, accuracy=accuracy, loss=2.0 - round_ / 4, updates=2)
        store.add_result(result, b"model")
    assert bar_of(coordinator, samples) == Bar(0.9, 2.0, 40, best=0.95, age=4)
    assert bar_of(coordinator, None) is None
    store.close()


@pytest.fixture(scope="module")
def fleet() -> HostileFleet:
    return HostileFleet()


@pytest.mark.parametrize("kinds", [["full"] * 6, ["full", "cp:2.0", "low-rank:0.5,keep=1"] * 2])
def test_the_model_is_that_of_the_other_updates(
    fleet: HostileFleet, tmp_path: Path, kinds: list[str]
) -> None:
    """Device 0 sends its whole model with the signs flipped, within all bounds of numbers."""
    honest = fleet.first_round(kinds)
    fleet.fold(tmp_path / "honest", honest)
    honest_loss = fleet.federation.evaluation(*fleet.held_out).loss
    updates = [*honest]
    record, arrays = honest[0]
    flipped = {n: a if "running" in n else -20 * a for n, a in arrays.items()}
    updates[0] = (replace(record, samples=10 * record.samples), flipped)
    bar = Bar(None, honest_loss, 24)
    done = fleet.fold(tmp_path / "judged", updates, bar=bar)
    assert set(done.left_out) == {"device-0"}
    assert done.left_out["device-0"].startswith(JUDGED)
    new = fleet.federation.model
    expected = aggregate(fleet.federation.saved(fleet.first), updates[1:])
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(new.tensors[name].numpy(), value.numpy())
    assert done.quality is not None
    assert done.quality.loss < 1.5 * honest_loss


def test_a_device_that_cancels_the_progress_is_left_out(
    fleet: HostileFleet, tmp_path: Path
) -> None:
    """Four of five raise the bias of the most frequent class; the fifth reverses their sum."""
    (update,), first = fleet.first_round(["full"]), fleet.federation.model
    _, y = fleet.held_out
    start = fleet.federation.evaluation(*fleet.held_out).accuracy
    assert start is not None
    bias = next(e for e in update[0].tensors if e.shape == (CLASSES,))
    frequent = int(np.bincount(y).argmax())
    assert (y == frequent).mean() > start + 0.03
    received = {e.name: first.tensors[e.stands_for or ""].numpy() for e in update[0].tensors}
    raised = np.zeros(bias.shape, np.float32)
    raised[frequent] = 100
    same = update[0], received
    honest = with_tensor(same, bias.name, received[bias.name] + raised)
    hostile = with_tensor(same, bias.name, received[bias.name] - 4 * raised)
    for age, updates, found in (
        (1, [honest] * 2 + [hostile] + [honest] * 2, {"device-2"}),
        (3, [honest] * 2 + [hostile] + [honest] * 2, set()),
        (1, [same] * 5, set()),
    ):
        bar = Bar(start, None, 10**6, best=start, age=age)
        done = fleet.fold(tmp_path / f"{age}-{len(found)}", updates, bar=bar)
        assert done.left_out.keys() == found
        reached = (y == frequent).mean() if found else start
        assert fleet.federation.evaluation(*fleet.held_out).accuracy == pytest.approx(reached)


def test_an_honest_round_is_not_aggregated_again(fleet: HostileFleet, tmp_path: Path) -> None:
    updates = fleet.first_round(["full"] * 4)
    plain = fleet.fold(tmp_path / "plain", updates)
    assert plain.quality is not None
    expected = fleet.federation.save()
    done = fleet.fold(tmp_path / "judged", updates, bar=Bar(None, plain.quality.loss, 24))
    assert not done.left_out
    assert fleet.federation.save() == expected
