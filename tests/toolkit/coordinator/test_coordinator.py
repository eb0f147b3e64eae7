"""Whole federations over real sockets: their rounds, restarts, deadlines and ends."""

import errno
import json
import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation import round_loop
from device_agent.federation.run_options import RunOptions
from log_messages import logged
from profiles.errors import UpdateError
from refusals import refused
from toolkit.coordinator.join_links import NEEDS_HTTPS, NO_PAGE
from toolkit.coordinator.server import Server
from toolkit.coordinator.startup_message import startup_message
from toolkit.coordinator.storage.blobs import Blobs
from vector_fleet import (
    CONFIG,
    ROUNDS,
    SIZE,
    VectorModel,
    assert_soon,
    configured,
    enrol,
    joined,
    running,
    send,
    send_trained,
    task,
    train_vector,
    trained,
)


def test_a_whole_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, model, told = configured(tmp_path), VectorModel(), list[str]()
    kinds_ready: list[int] = []
    shown: list[str] = []
    up = threading.Event()
    cut = model.bundle

    def bundle(submodel: str, round_: int) -> dict[str, bytes]:
        assert up.wait(10)
        if round_ == 1:
            status = server.coordinator.status()
            kinds_ready.append(status.kinds_ready)
            shown.extend(map(str, status.preparing))
        return cut(submodel, round_)

    monkeypatch.setattr(model, "bundle", bundle)
    said: dict[int, list[str]] = {number: [] for number in range(3)}
    with running(config, model, told.append) as server:
        up.set()
        enrol(server, tmp_path)
        threads = [
            threading.Thread(
                target=round_loop.run,
                args=(RunOptions(data="held_out.npz", state=tmp_path / str(n)),),
                name=f"agent {n}",
                kwargs={"train": train_vector, "sleep": lambda seconds: time.sleep(0.02)},
            )
            for n in range(3)
        ]
        with ExitStack() as stack:
            for n, thread in enumerate(threads):
                stack.enter_context(logged(messages=said[n], thread=thread.name))
                thread.start()
            for thread in threads:
                thread.join(30)
        with logged() as later:
            assert round_loop.run(RunOptions(data="held_out.npz", state=tmp_path / "0")) == 0
        assert later == ["The last round is over; 0 updates sent since this agent started."]
        operator = CoordinatorClient(
            server.url, (config.state / "operator.token").read_text().strip()
        )
        status = operator.status()
    assert (status.state, status.round, model.folded) == ("finished", ROUNDS, [3, 3, 3])
    assert [(r.round, r.loss, r.updates) for r in status.history] == [
        (0, 0.0, 0), (1, 1.0, 3), (2, 2.0, 3), (3, 3.0, 3),
    ]  # fmt: skip
    assert [d.rounds_trained for d in status.devices] == [ROUNDS] * 3
    assert (status.kinds, kinds_ready) == (2, [0, 1])
    assert shown == ["preparing 1 of 2: full", "preparing 2 of 2: low-rank:0.5"]
    assert status.preparing == []
    assert all(d.bytes_up == ROUNDS * d.bytes_up // ROUNDS > 4 * SIZE for d in status.devices)
    for n in range(3):
        assert said[n][-1] == "The last round is over; 3 updates sent since this agent started."
        assert sum("train.onnx" in line for line in said[n]) == 1  # cached: it never changed
        assert load_file(tmp_path / str(n) / "personal.safetensors")["mine"] == [ROUNDS]
        assert len(list((tmp_path / str(n) / "files").iterdir())) == 3
    assert load_file(config.state / "global.safetensors")["w"].mean() == ROUNDS
    history = json.loads((config.state / "history.json").read_text())
    assert [entry["round"] for entry in history["history"]] == [0, 1, 2, 3]
    end = "All rounds are done; global model: state/global.safetensors. Stop with Ctrl-C."
    joins = [line for line in told if "has joined" in line]
    assert joins == [
        "desktop-1 (machine 0) has joined: 1 of 3 places taken.",
        "desktop-2 (machine 1) has joined: 2 of 3 places taken.",
        "board-1 (machine 2) has joined: 3 of 3 places taken.",
    ]
    stages = [line for line in told if re.match(r"Round \d+: ", line)]
    assert {line.split(": ")[1].split()[0] for line in stages} == {"evaluating", "preparing"}
    assert [line for line in told if line not in joins + stages] == [
        "Round 0 of 3: accuracy 0.5000, loss 0.0000, from 0 updates",
        "Round 1 of 3: accuracy 0.5000, loss 1.0000, from 3 updates",
        "Round 2 of 3: accuracy 0.5000, loss 2.0000, from 3 updates",
        "Round 3 of 3: accuracy 0.5000, loss 3.0000, from 3 updates",
        end,
    ]
    again: list[str] = []
    with running(config, VectorModel(), again.append):
        assert_soon(lambda: again == [end])


def test_the_greeting_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(tmp_path)
    with running(config) as server:
        greeting = startup_message(server.config, server.url, tmp_path / "fleet.toml", True)
    assert greeting == [
        f"Coordinator at {server.url}",
        "API reference at /docs (loads its style from a CDN) and /openapi.json.",
        f"Join: edgetailor-agent join {server.url} --token-file FILE",
        "  2 x desktop (full): state/tokens/desktop.token",
        "  1 x board (low-rank:0.5): state/tokens/board.token",
        f"Phones: {server.url}/join/",
        "  links with tokens: edgetailor tokens fleet.toml",
        f"Operator: {server.url}/ (token: state/operator.token)",
    ]
    assert max(map(len, greeting)) <= 80
    origin = tmp_path / "fleet.toml"
    assert startup_message(config, "http://192.168.1.10:8123", origin, True)[7] == (
        f"  {NEEDS_HTTPS}"
    )
    assert startup_message(config, server.url, origin, False)[5] == NO_PAGE
    without = config.model_copy(update={"phones": False})
    assert startup_message(without, server.url, origin, True) == [*greeting[:5], greeting[-1]]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert startup_message(config, server.url, origin, True)[-1].endswith(
        f": {config.state}/operator.token)"
    )


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with running(config) as server:
        links = enrol(server, tmp_path)
        for number, link in enumerate(links.values()):
            send_trained(link, 1, tmp_path / f"one-{number}")
        first = links["desktop-1"]
        work, _, update = trained(first, tmp_path / "two")
        assert work.round == 2
        send(first, 2, update)
    model, told = VectorModel(), list[str]()
    with running(config, model, told.append) as server:
        assert_soon(lambda: told == ["Continuing with round 2 of 3."])
        again = [joined(server, tmp_path / str(n)) for n in range(3)]
        for _ in range(200):
            status = again[0].status()
            if status.state == "training":
                break
            time.sleep(0.02)
        assert (status.round, status.history[-1].loss) == (2, 1.0)
        assert [d.rounds_trained for d in status.devices] == [2, 1, 1]
        assert again[0].work().state == "wait"  # its update was not forgotten
        for number, link in enumerate(again[1:]):
            send_trained(link, 2, tmp_path / f"again-{number}")
        assert task(again[0]).round == 3
    assert model.folded == [3]


def test_a_deadline_closes_a_round_with_what_it_has(tmp_path: Path) -> None:
    model = VectorModel()
    with running(
        configured(tmp_path, f"deadline_s = 1\nmin_updates = 1\n{CONFIG}"), model
    ) as server:
        links = enrol(server, tmp_path)
        late = links["board-1"]
        work, _, update = trained(late, tmp_path / "late")
        send_trained(links["desktop-1"], 1, tmp_path / "early")
        while task(late).round == 1:
            time.sleep(0.02)
        with refused("round.closed") as caught:
            send(late, work.round, update)
        assert isinstance(caught.value, RefusedError)
        assert caught.value.round_over
        assert re.fullmatch(
            r"Round 1 takes no updates now: round \d of 3 is (being trained|closed)\.",
            str(caught.value),
        )
    assert model.folded[0] == 1


def test_a_full_disk_is_told_once_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state/files")

    with running(configured(tmp_path), say=told.append) as server:
        links = enrol(server, tmp_path)
        updates = {name: trained(link, tmp_path / name)[2] for name, link in links.items()}
        with monkeypatch.context() as patch:
            patch.setattr(Blobs, "adopt", full)
            for name, link in links.items():
                with refused("client.unreachable", "HTTP 500"):
                    send(link, 1, updates[name])
        for name, link in links.items():
            send(link, 1, updates[name])
        assert task(links["board-1"]).round == 2
    results = [line for line in told if not re.match(r"Round \d+: ", line)]  # no stages
    assert results[4:] == [  # after the first model and three who joined
        "A request failed: state/files: No space left on device.",
        "Round 1 of 3: accuracy 0.5000, loss 1.0000, from 3 updates",
    ]


def test_tls_at_its_plain_port_is_no_line_of_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(configured(tmp_path)) as server:
        link = CoordinatorClient(server.url.replace("http:", "https:"), "s", patience_s=0)
        with refused("client.connection-failed") as caught:
            link.work()
    assert "the answer is not TLS; write http://" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_failure_of_the_rounds_ends_the_server(tmp_path: Path) -> None:
    model = VectorModel()
    model.weights[:] = np.inf
    server = Server(configured(tmp_path), model, Path("fleet.toml"))
    with refused("federation.diverged", "is inf", loss=np.inf):
        server.run()


@pytest.mark.parametrize("fallback", [None, "low-rank:0.3"])
def test_a_submodel_that_cannot_be_made_concerns_its_devices_only(
    tmp_path: Path, fallback: str | None
) -> None:
    class Unsplittable(VectorModel):
        def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
            if submodel == "low-rank:0.5" and round_ == 1:
                raise UpdateError("no singular values", code="update.values")
            return super().bundle(submodel, round_)

    line = "" if fallback is None else f'fallback = "{fallback}"\n'
    config = configured(tmp_path, CONFIG + line)
    with running(config, Unsplittable()) as server:
        links = enrol(server, tmp_path)
        for number, name in enumerate(("desktop-1", "desktop-2")):
            send_trained(links[name], 1, tmp_path / f"first-{number}")
        assert task(links["board-1"]).round == 2
        board = server.coordinator.store.registry.device("board-1")
        assert board.trouble == "it has no bundle in round 1: no singular values"
        assert server.coordinator.submodel(board) == (fallback or "low-rank:0.5")
        for number, link in enumerate(links.values()):
            send_trained(link, 2, tmp_path / f"second-{number}")
        assert task(links["desktop-1"]).round == 3
        history = server.coordinator.status().history
        assert [result.updates for result in history] == [0, 2, 3]
