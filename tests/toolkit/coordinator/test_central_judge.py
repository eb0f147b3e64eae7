"""Held-out samples decide which updates spoil a model: they are left out, and told."""

import json
import shutil
from collections.abc import Container, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from commands import edgetailor
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.formats.protocol.fleet import Limited, RoundResult
from device_agent.formats.update import write_update
from hostile_fleet import HostileFleet, with_tensor
from models_for_tests import CLASSES
from operators import coordinator_of, enrolled
from toolkit.aggregation.aggregate import aggregate
from toolkit.aggregation.influence import TensorInfluences
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.model_judge import JUDGED, Verdict
from toolkit.aggregation.pause_rule import LAST, Harm
from toolkit.coordinator.closing import round_aggregation
from toolkit.coordinator.closing.central_judge import JUDGE, harm_of_devices, pause_judged
from toolkit.coordinator.coordinator import Coordinator, restore
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.evaluation_sums import Evaluation
from updates import record_of
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

REASON = f"{JUDGED}: accuracy 0.9000, loss 1 in place of accuracy 0.1000, loss 5"


class Spoilable(VectorModel):
    """A model whose predictions are wrong once its numbers are large."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        accuracy, loss = (0.9, 1.0) if abs(float(self.weights.mean())) < 50 else (0.1, 5.0)
        groups = np.array([[loss, 1.0]] * len(x))
        return Evaluation(len(x), len(x), accuracy, loss, groups=groups)

    def gradient(self, x: np.ndarray, y: np.ndarray) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(SIZE)}

    def influence(
        self, update: Update, gradient: Mapping[str, torch.Tensor], reference: Reference | None
    ) -> TensorInfluences:
        change = update[1]["w"] - self.weights
        return TensorInfluences(1.0, {"w": float(change @ gradient["w"].numpy())})


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
            "paused by the judge: of its last 3 updates, it left out 3, in the rounds 1, 2, 3",
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


def with_a_device(folder: Path) -> tuple[Coordinator, Store, str]:
    """A coordinator before its first round, and the id of its device."""
    coordinator, store = coordinator_of(folder)
    device = enrolled(coordinator, store, "desktop", "key").id
    store.add_result(RoundResult(round=0, accuracy=0.5, loss=1.0, updates=0), b"model")
    return coordinator, store, device


def left_out_in(
    store: Store, device: str, rounds: Container[int], last: int, far: Container[int] = ()
) -> None:
    """The rounds after the last one until `last`: `device` took part in all of them."""
    entry = store.blobs.put(b"update")
    for round_ in range((store.history.current_round() or 0) + 1, last + 1):
        store.add_update(round_, device, replace(record_of("full", 1, ()), file=entry))
        out = {device: REASON} if round_ in rounds else {}
        limited = {device: Limited(samples=8, counted=2, too_far=True)} if round_ in far else {}
        result = RoundResult(
            round=round_, accuracy=0.5, loss=1.0, updates=2, left_out=out, limited=limited
        )
        store.add_result(result, b"model")


def test_a_coordinator_that_was_killed_before_the_pause_pauses_at_its_start(tmp_path: Path) -> None:
    coordinator, store, device = with_a_device(tmp_path)
    left_out_in(store, device, {1, 2, 3}, 3)
    store.close()
    store = Store(coordinator.config.state, needs_model=False)
    again = restore(coordinator.config, store, lambda: 1.0)
    assert harm_of_devices(store.history.results()) == {device: Harm([1, 2, 3])}
    for _ in range(2):  # repeating it changes nothing
        pause_judged(again)
        assert again.rounds.paused == {device}
        assert len(store.operator_log.entries(0, 9)) == 1
    again.act("resume", device, "checked", "ann")
    pause_judged(again)
    assert not again.rounds.paused
    left_out_in(store, device, {4, 6}, 6)
    pause_judged(again)
    assert not again.rounds.paused  # only rounds after the pause count
    left_out_in(store, device, {7}, 7)
    pause_judged(again)
    assert again.rounds.paused == {device}
    assert store.operator_log.entries(0, 9)[-1].reason.endswith(
        "of its last 4 updates, it left out 3, in the rounds 4, 6, 7"
    )
    store.close()


def test_only_more_than_half_of_the_last_updates_pause_a_device(tmp_path: Path) -> None:
    """An honest device whose updates are left out now and then is not paused."""
    coordinator, store, device = with_a_device(tmp_path)
    left_out_in(store, device, {1, *range(LAST + 1, LAST + 11)}, LAST + 10)
    pause_judged(coordinator)
    assert not coordinator.rounds.paused  # ten of the last 20
    left_out_in(store, device, {LAST + 11}, LAST + 11)
    pause_judged(coordinator)
    assert coordinator.rounds.paused == {device}
    named = ", ".join(map(str, range(LAST + 1, LAST + 12)))
    reason = store.operator_log.decisions[device].reason
    assert reason.endswith(f"of its last {LAST} updates, it left out 11, in the rounds {named}")
    store.close()


def test_updates_that_go_too_far_count_beside_three_that_are_left_out(tmp_path: Path) -> None:
    coordinator, store, device = with_a_device(tmp_path)
    left_out_in(store, device, {3, 5}, 6, far={1, 2, 4, 6})
    pause_judged(coordinator)
    assert not coordinator.rounds.paused  # two were left out
    left_out_in(store, device, {7}, 7)
    pause_judged(coordinator)
    assert store.operator_log.decisions[device].reason.endswith(
        "of its last 7 updates, it left out 3, and counted 4 in part, in the rounds 1, 2, 3, "
        "4, 5, 6, 7"
    )
    store.close()


def test_two_updates_do_not_pause_a_device(tmp_path: Path) -> None:
    coordinator, store, device = with_a_device(tmp_path)
    left_out_in(store, device, {1, 2}, 2)
    pause_judged(coordinator)
    assert not coordinator.rounds.paused
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
    done = fleet.fold(tmp_path / "judged", updates, judged=True)
    assert set(done.left_out) == {"device-0"}
    assert done.left_out["device-0"].startswith(JUDGED)
    new = fleet.federation.model
    expected = aggregate(fleet.federation.saved(fleet.first), updates[1:])
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(new.tensors[name].numpy(), value.numpy())
    assert done.quality is not None
    assert done.quality.loss < 1.5 * honest_loss


def test_a_device_that_cancels_the_progress_is_left_out(
    fleet: HostileFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of five raise the bias of the only class; the fifth reverses their sum."""
    (update,), first = fleet.first_round(["full"]), fleet.federation.model
    x, y = fleet.held_out
    monkeypatch.setattr(fleet, "held_out", (x, np.zeros_like(y)))
    bias = next(e for e in update[0].tensors if e.shape == (CLASSES,))
    received = {e.name: first.tensors[e.stands_for or ""].numpy() for e in update[0].tensors}
    raised = np.eye(CLASSES, dtype=np.float32)[0]
    same = update[0], received
    honest = with_tensor(same, bias.name, received[bias.name] + raised)
    hostile = with_tensor(same, bias.name, received[bias.name] - 4 * raised)
    for updates, found in (
        ([honest] * 2 + [hostile] + [honest] * 2, {"device-2"}),
        ([same] * 5, set()),
    ):
        done = fleet.fold(tmp_path / f"{len(found)}", updates, judged=True)
        assert done.left_out.keys() == found
        new = fleet.federation.model.tensors[bias.stands_for or ""].numpy()
        expected = received[bias.name] + (raised if found else 0)
        np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bounded", [False, True])
def test_an_update_that_goes_too_far_counts_with_a_quarter_of_its_samples(
    fleet: HostileFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    updates = fleet.first_round(["full"] * 4)
    samples = [16, 16, 16, 10**9]
    updates = [(replace(r, samples=n), a) for (r, a), n in zip(updates, samples, strict=True)]
    monkeypatch.setattr(round_aggregation, "suspects", sorted)
    monkeypatch.setattr(
        round_aggregation,
        "judge_updates",
        lambda *args: args[3]({"device-1"}, {"device-2"}) and Verdict(["device-0"], ["device-3"]),
    )
    done = fleet.fold(tmp_path, updates, judged=True, bounded=bounded)
    assert done.left_out.keys() == {"device-0"}
    most = 2 * 16 if bounded else 300 * 16
    told = {device: (own.samples, own.counted) for device, own in done.limited.items()}
    assert told == {"device-3": (10**9, most // 4)}
    counted = [*updates[1:3], (replace(updates[3][0], samples=most // 4), updates[3][1])]
    new = fleet.federation.model
    fleet.federation.load(fleet.first)
    known = Reference().completed([*map(fleet.federation.figures, updates)])
    fleet.federation.fold_checked(counted, RoundLimits(known) if bounded else None)
    for name, value in fleet.federation.model.tensors.items():
        np.testing.assert_allclose(new.tensors[name], value, rtol=1e-5, atol=1e-6)


def test_an_honest_round_is_not_aggregated_again(fleet: HostileFleet, tmp_path: Path) -> None:
    updates = fleet.first_round(["full"] * 4)
    plain = fleet.fold(tmp_path / "plain", updates)
    assert plain.quality is not None
    expected = fleet.federation.save()
    done = fleet.fold(tmp_path / "judged", updates, judged=True)
    assert not done.left_out
    assert fleet.federation.save() == expected
