"""Updates that do not fit are refused when they are sent; those that cannot be folded are left out.

Each is named with its reason, and nothing ends.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bundles import flip_a_bit
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.update import TENSORS, write_update
from large_fleet import LargeFleet
from profiles.errors import UpdateError
from refusals import refused
from toolkit.coordinator.closing.round_aggregation import DAMAGED
from toolkit.coordinator.rounds import upload_validation
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.evaluation_sums import Evaluation
from vector_fleet import (
    SIZE,
    VectorModel,
    configured,
    enrol,
    joined,
    running,
    send,
    send_all,
    send_trained,
    task,
    trained,
)

Spoil = Callable[[Path], object]


def flipped(path: Path) -> None:
    flip_a_bit(path, -3)  # another finite number


@pytest.mark.parametrize("spoil", [Path.unlink, flipped, lambda path: path.write_bytes(b"?")])
def test_tensors_that_are_lost_after_they_were_accepted(tmp_path: Path, spoil: Spoil) -> None:
    config, told = configured(tmp_path), list[str]()
    with running(config, VectorModel(), told.append) as server:
        links = enrol(server, tmp_path)
        for number, (name, link) in enumerate(links.items(), 1):
            _, record, update = trained(link, tmp_path / name)
            shutil.rmtree(update)
            write_update(update, record, {"w": np.full(SIZE, number, np.float32)})
            if name == "board-1":  # the round closes with its update
                lost = fingerprint_file(tmp_path / "desktop-2" / "update" / TENSORS).sha256
                spoil(config.state / "files" / lost)
            send(link, 1, update)
        assert task(links["desktop-1"]).round == 2
        status = server.coordinator.status()
    ended = [line for line in told if line.startswith("Round 1") and "preparing" not in line]
    assert ended == [
        f"Round 1: left out the update of desktop-2: {DAMAGED}",
        "Round 1 of 3: accuracy 0.5000, loss 2.0000, from 2 updates",
    ]
    assert (status.history[1].updates, status.history[1].left_out) == (2, {"desktop-2": DAMAGED})
    assert [device.note for device in status.devices] == [
        None, f"its update of round 1 was left out: {DAMAGED}", None,
    ]  # fmt: skip
    # The mean of 1 and 3, from desktop-1 and board-1.
    assert load_file(config.state / "global.safetensors")["w"].tolist() == [2.0] * SIZE
    history = json.loads((config.state / "history.json").read_text())["history"]
    assert history[1]["left_out"] == {"desktop-2": DAMAGED}
    with running(config) as again:
        assert again.coordinator.status().history == status.history


def test_what_does_not_fit_the_model_is_refused_when_it_is_sent(tmp_path: Path) -> None:
    class Strict(VectorModel):
        def check(self, update: Update, origin: str) -> None:
            raise UpdateError("{origin} does not fit.", code="update.wrong-rank", origin=origin)

    with running(configured(tmp_path), Strict()) as server:
        link = enrol(server, tmp_path)["desktop-1"]
        with refused("update.wrong-rank") as caught:
            send_trained(link, 1, tmp_path / "one")
        assert str(caught.value) == "desktop-1 does not fit."
        assert server.coordinator.rounds.updates == {}


@pytest.mark.parametrize("those", [["board-1"], ["desktop-1", "desktop-2", "board-1"]])
def test_updates_by_which_the_model_diverges(tmp_path: Path, those: list[str]) -> None:
    config, told = configured(tmp_path), list[str]()
    with running(config, VectorModel(), told.append) as server:
        links = enrol(server, tmp_path)
        send_all(links, 1, tmp_path)
        for name, link in links.items():
            _, record, update = trained(link, tmp_path / f"{name}-2")
            if name in those:
                shutil.rmtree(update)
                write_update(update, record, {"w": np.full(SIZE, 3e38, np.float32)})
            send(link, 2, update)
        assert task(links["board-1"]).round == 3
        left_out = server.coordinator.status().history[2].left_out
    assert sorted(left_out) == sorted(those)
    assert all("this update is inf" in reason for reason in left_out.values())
    expected = 2.0 if len(those) == 1 else 1.0  # without any update the model stays as it was
    assert load_file(config.state / "global.safetensors")["w"].tolist() == [expected] * SIZE
    assert told[-1] == (
        f"Round 2 of 3: accuracy 0.5000, loss {expected:.4f}, from "
        + ("2 updates" if len(those) == 1 else "0 updates")
    )


def test_updates_that_diverge_only_together(tmp_path: Path) -> None:
    class Touchy(VectorModel):
        """Diverges when it folds more than one update."""

        def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
            loss = np.inf if self.folded[-1:] > [1] else float(self.weights.mean())
            return Evaluation(len(x), len(x), 0.5, loss)

        def load(self, data: bytes) -> None:
            super().load(data)
            self.folded.append(0)

    with running(configured(tmp_path), Touchy()) as server:
        links = enrol(server, tmp_path)
        send_all(links, 1, tmp_path)
        assert task(links["board-1"]).round == 2
        last = server.coordinator.status().history[-1]
    assert (last.updates, last.loss, len(last.left_out)) == (1, 1.0, 2)


@pytest.mark.parametrize("unsound", [[17], [0, 1, 63], list(range(64))])
def test_few_folds_find_the_update_by_which_the_model_diverges(
    tmp_path: Path, unsound: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    fleet = LargeFleet(tmp_path, 65)
    for number in range(64):
        value = 3e38 if number in unsound else float(number)
        fleet.send(number, fleet.update(tmp_path / str(number), number, value))
    fleet.coordinator.leave(fleet.device(64))
    fleet.worker.turn()
    last = fleet.store.history.results()[-1]
    fleet.store.close()
    assert sorted(last.left_out) == sorted(f"desktop-{number + 1}" for number in unsound)
    sound = set(range(64)) - set(unsound)
    assert last.loss == pytest.approx(np.mean(list(sound)) if sound else 0.0)
    # All, then two halves for each of log2 64 times, then the sound ones.
    assert len(fleet.model.folded) <= {1: 14, 3: 34, 64: 127}[len(unsound)]


def test_tensors_sent_during_the_check_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second upload that finishes meanwhile does not remove what the update names."""
    checking, sent = threading.Event(), threading.Event()
    check = upload_validation.check_upload

    def slow(device: str, *arguments: object) -> None:
        check(device, *arguments)  # type: ignore[arg-type]
        if device == "desktop-1":
            checking.set()
            assert sent.wait(10)

    config = configured(tmp_path)
    with running(config) as server:
        links = enrol(server, tmp_path)
        link = links["desktop-1"]
        _, _, update = trained(link, tmp_path / "a")
        (tmp_path / "other").write_bytes(b"other tensors")
        monkeypatch.setattr(upload_validation, "check_upload", slow)
        posting = threading.Thread(target=send, args=(link, 1, update))
        posting.start()
        assert checking.wait(10)
        joined(server, tmp_path / "0").send_tensors(1, tmp_path / "other")
        sent.set()
        posting.join(10)
        # A third one, now that the update is accepted, removes only the second.
        (tmp_path / "third").write_bytes(b"more tensors")
        link.send_tensors(1, tmp_path / "third")
        kept = {path.name for path in (config.state / "files").iterdir()}
        assert fingerprint_file(update / TENSORS).sha256 in kept
        assert fingerprint_file(tmp_path / "other").sha256 not in kept
        for name in ("desktop-2", "board-1"):
            send_trained(links[name], 1, tmp_path / name)
        assert task(link).round == 2
        last = server.coordinator.status().history[-1]
    assert (last.updates, last.left_out) == (3, {})
