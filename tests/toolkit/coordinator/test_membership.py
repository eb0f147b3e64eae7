"""Joining over real sockets: keys, tokens, clocks, and answers that are lost."""

import base64
import json
import shutil
import socket
import stat
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest

from bundles import everything
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.federation.membership import join, machine_line
from device_agent.formats.protocol.problems import NOT_AUTHORISED
from device_agent.formats.protocol.rounds import SubmodelFailure
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from profiles.errors import AuthorisationError
from refusals import refused as raises_code
from toolkit.coordinator.server import Server
from toolkit.data_table import preprocessing_of
from vector_fleet import (
    CONFIG,
    MACHINE,
    ask,
    configured,
    documented,
    running,
    send,
    send_trained,
    task,
    token,
    trained,
)

OPENSSL = shutil.which("openssl")


def test_the_key_is_the_device(server: Server, tmp_path: Path, said: list[str]) -> None:
    first = join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    assert said[0] == "DATA: an .npz file with the samples x (n, 2) and the labels y (int64)."
    assert said[2:] == [  # after a warning of the bare token
        f"Joined {server.url} as board-1 (desk); it trains low-rank:0.5.",
        f"This machine: {machine_line()}.",
    ]
    assert stat.S_IMODE((tmp_path / "a" / "device.key").stat().st_mode) == 0o600
    (tmp_path / "a" / "device.json").unlink()
    again = join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    assert (again.device, again.name) == (first.device, "desk")
    assert len(CoordinatorClient(server.url, again.secret).status().devices) == 1
    with raises_code(NOT_AUTHORISED):
        CoordinatorClient(server.url, first.secret).work()
    (known,) = server.coordinator.store.registry.devices()
    assert json.loads(known.machine or "")["cpu_count"] >= 1


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
def test_openssl_agrees_with_key_and_signature(tmp_path: Path) -> None:
    key = DeviceKey.new()
    request = key.join_request("token", "desk", MACHINE)
    (tmp_path / "key").write_bytes(key.pem())
    text = (
        "edgetailor-join-1\n"
        "3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0\n"  # sha256sum of "token"
        f"{request.public_key}\n{request.timestamp}\n"
    )
    (tmp_path / "text").write_text(text)
    (tmp_path / "signature").write_bytes(base64.b64decode(request.signature))

    def openssl(*arguments: str) -> bytes:
        return subprocess.run(
            ["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True
        ).stdout

    public = openssl("pkey", "-in", "key", "-pubout", "-outform", "DER", "-out", "-")
    assert public[-32:] == base64.b64decode(request.public_key)
    openssl("pkeyutl", "-verify", "-inkey", "key", "-rawin", "-in", "text", "-sigfile", "signature")
    assert abs(request.timestamp - time.time()) < 5


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"timestamp": 0}, 403, "join.bad-signature"),
        ({"signature": "AAAA"}, 403, "join.bad-signature"),
        ({"public_key": DeviceKey.new().public}, 403, "join.bad-signature"),
        ({"public_key": "????"}, 422, "join.bad-key"),
        ({"machine": {"cpu_count": "many"}}, 422, "join.bad-machine"),
        ({"machine": MACHINE | {"cpu_count": "many"}}, 422, "join.bad-machine"),
        ({"machine": MACHINE | {"system": "x" * 5000}}, 422, "join.bad-machine"),
    ],
)
def test_requests_that_are_not_the_key_holders(
    server: Server, change: dict[str, object], status: int, code: str
) -> None:
    bearer = token(server.config, "board")
    request = replace(DeviceKey.new().join_request(bearer, "desk", MACHINE), **change)
    answer = ask(server, request, bearer)
    assert (answer.status, answer.json()["code"]) == (status, code)
    assert server.coordinator.status().devices == []


def test_a_folder_in_place_of_the_key_is_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "a" / "device.key"
    path.mkdir(parents=True)
    with raises_code("state.unreadable", path=str(path), reason="Is a directory"):
        join(server.url, token(server.config, "board"), "desk", tmp_path / "a")


@pytest.mark.parametrize("before", [[], ["new"], ["new", "new/state"]])
def test_a_refused_join_leaves_no_new_folder(
    server: Server, tmp_path: Path, before: list[str]
) -> None:
    for folder in before:
        (tmp_path / folder).mkdir()
    with raises_code("join.unknown-token"):
        join(server.url, "guess", "desk", tmp_path / "new" / "state")
    assert [name for name in ("new", "new/state") if (tmp_path / name).exists()] == before


def test_a_request_signed_for_another_token(server: Server) -> None:
    request = DeviceKey.new().join_request(token(server.config, "desktop"), "desk", MACHINE)
    answer = ask(server, request, token(server.config, "board"))
    assert (answer.status, answer.json()["code"]) == (403, "join.bad-signature")


def test_what_join_says_can_be_looked_up(tmp_path: Path) -> None:
    """docs/guides/agent.md lists refusals by the sentences that people see, and by code."""
    said: dict[str, str] = {}

    def refused(
        server: Server, key: DeviceKey, bearer: str, clock: Clock = SYSTEM_CLOCK, **change: object
    ) -> None:
        request = replace(key.join_request(bearer, "desk", MACHINE, clock=clock), **change)
        problem = ask(server, request, bearer).json()
        said[problem["code"]] = problem["message"]

    config, key = configured(tmp_path / "c"), DeviceKey.new()
    with running(config) as server:
        board, desktop = token(config, "board"), token(config, "desktop")
        assert ask(server, key.join_request(board, "desk", MACHINE), board).status == 200
        refused(server, key, "guess")
        refused(server, key, (config.state / "operator.token").read_text().strip())
        refused(server, key, desktop)
        refused(server, DeviceKey.new(), board)
        refused(server, key, board, timestamp=0)
        refused(server, key, board, Clock(lambda: 946728000))
    with running(configured(tmp_path / "c", f"token_days = 0.0000001\n{CONFIG}")) as server:
        refused(server, DeviceKey.new(), desktop)
    assert set(said) == {
        "join.unknown-token", "join.other-kind", "join.used-up-token", "join.bad-signature",
        "join.skewed-clock", "join.expired-token", "join.operator-token",
    }  # fmt: skip
    assert said["join.operator-token"] == (
        "This is an operator's token, which no device may use. Join with a join token: "
        "tokens/desktop.token or tokens/board.token in the coordinator's state folder."
    )
    for code, message in said.items():
        assert documented(code).match(message), (code, message)


@pytest.mark.parametrize(("seconds", "shown"), [(-86400, "1999-12-31"), (86400, "2000-01-02")])
def test_a_skewed_clock(server: Server, tmp_path: Path, seconds: int, shown: str) -> None:
    noon = 946728000  # 2000-01-01 12:00 UTC
    server.coordinator.wall_clock = lambda: noon
    clock, bearer = Clock(lambda: noon + seconds, lambda: True), token(server.config, "board")
    with raises_code("join.skewed-clock") as caught:
        join(server.url, bearer, "x", tmp_path / "a", clock=clock)
    message = str(caught.value)
    assert message.startswith(f"The device's clock says {shown} 12:00:00 UTC, ")
    assert " 2000-01-01 12:00:00 UTC; " in message
    assert " 5 minutes" in message
    assert message.endswith(
        ". Set the device's clock (`timedatectl set-ntp true`), then join again."
    )


def test_tokens_expire_for_new_devices_only(tmp_path: Path) -> None:
    config = configured(tmp_path / "c")
    with running(config) as server:
        first = join(server.url, token(config, "desktop"), "one", tmp_path / "a")
    config = configured(tmp_path / "c", f"token_days = 0.0000001\n{CONFIG}")
    with running(config) as server:
        with pytest.raises(AuthorisationError) as error:
            join(server.url, token(config, "desktop"), "two", tmp_path / "b")
        assert str(error.value) == (
            f"This join token expired on {time.strftime('%Y-%m-%d', time.gmtime())}. Ask the "
            "operator for another one: `edgetailor make-token desktop` makes it."
        )
        (tmp_path / "a" / "device.json").unlink()
        again = join(server.url, token(config, "desktop"), "one", tmp_path / "a")
        assert again.device == first.device
    (config.state / "tokens" / "desktop.token").unlink()
    config = configured(tmp_path / "c")
    with running(config) as server:
        second = join(server.url, token(config, "desktop"), "two", tmp_path / "b")
        assert second.device == "desktop-2"


@contextmanager
def deaf(server: Server) -> Iterator[str]:
    """The URL of a proxy that hands one join on, and never an answer."""

    def serve(listening: socket.socket) -> None:
        listening.accept()[0].close()  # what the federation says of itself
        near, _ = listening.accept()
        far = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        with near, far:
            for end in (near, far):
                end.settimeout(10)
            heard = b""
            while not heard.endswith(b"}"):
                heard += (piece := near.recv(1 << 16))
                far.sendall(piece)
            assert far.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_a_join_whose_answer_was_lost(server: Server, tmp_path: Path) -> None:
    bearer = token(server.config, "board")
    with deaf(server) as url, raises_code("client.no-answer-to-join"):
        join(url, bearer, "desk", tmp_path / "a")
    assert [d.device for d in server.coordinator.status().devices] == ["board-1"]
    assert set(everything(tmp_path / "a")) == {"device.key"}
    assert join(server.url, bearer, "desk", tmp_path / "a").device == "board-1"
    assert [d.device for d in server.coordinator.status().devices] == ["board-1"]


def test_a_device_that_the_coordinator_has_forgotten_joins_again(
    server: Server, tmp_path: Path, said: list[str]
) -> None:
    """As after a restored backup that is older than its join."""
    bearer = token(server.config, "board")
    join(server.url, bearer, "desk", tmp_path / "a")
    state = DeviceState(tmp_path / "a")
    state.remember(msgspec.structs.replace(state.member(), secret="forgotten"))
    again = join(server.url, bearer, "desk", tmp_path / "a")
    assert CoordinatorClient(server.url, again.secret).work().state == "wait"
    assert [d.device for d in server.coordinator.status().devices] == ["board-1"]
    # After the data, the warning of the bare token, and both lines of the first join.
    assert said[4] == f"{server.url} does not know board-1 any more: the device joins again."


def test_a_smaller_submodel_for_a_device_that_cannot(tmp_path: Path) -> None:
    text = CONFIG.replace("count = 2", 'count = 1\nfallback = "slice:0.2"')
    config = configured(tmp_path / "c", text)
    with running(config) as server:
        links = {}
        for number, kind in enumerate(["desktop", "board"]):
            identity = join(server.url, token(config, kind), kind, tmp_path / str(number))
            links[identity.device] = CoordinatorClient(server.url, identity.secret)
        desktop, board = links["desktop-1"], links["board-1"]
        assert task(desktop).round == task(board).round == 1
        failure = SubmodelFailure(submodel="full", failures=3, reason="out\nof memory")
        server.coordinator.activity["desktop-1"].missed = "late"  # a report is newer than that
        assert asdict(desktop.report(failure)) == {"submodel": "slice:0.2", "round": 2}
        assert desktop.work().state == "wait"  # nobody waits for it in this round
        note = "full failed 3 times: out of memory"
        assert {d.device: d.note for d in desktop.status().devices} == {
            "desktop-1": note, "board-1": None,
        }  # fmt: skip
        send_trained(board, 1, tmp_path / "one")
        work, record, update = trained(desktop, tmp_path / "two")
        assert (work.round, record.submodel) == (2, "slice:0.2")
        assert asdict(desktop.report(failure)) == {"submodel": "slice:0.2", "round": 2}  # too late
        send(desktop, 2, update)
        small = SubmodelFailure(submodel="low-rank:0.5", failures=3, reason="diverged")
        assert asdict(board.report(small)) == {"submodel": None, "round": 0}
        assert task(desktop).round == 3
    with running(config) as server:
        status = server.coordinator.status()
        assert {d.device: d.submodel for d in status.devices} == {
            "desktop-1": "slice:0.2", "board-1": "low-rank:0.5",
        }  # fmt: skip
        assert status.devices[0].note == note


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            'kind = "images"\nclasses = ["cat", "dog"]',
            "DATA: a folder of pictures, in a folder for each class: cat, dog.",
        ),
        (
            'kind = "series"\ncolumns = ["ax", "ay"]\nlabel = "state"',
            "DATA: CSV files with the columns ax, ay, and state for the label.",
        ),
    ],
)
def test_join_says_which_data_the_federation_takes(
    tmp_path: Path, said: list[str], data: str, line: str
) -> None:
    preprocessing = preprocessing_of(tomllib.loads(data))
    config = configured(tmp_path / "c").model_copy(update={"data": preprocessing})
    with running(config) as server:
        server.coordinator.config = config
        join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    assert line in said


def test_join_names_the_type_of_labels_that_a_loss_packs(tmp_path: Path, said: list[str]) -> None:
    config = configured(tmp_path / "c")
    training = replace(config.training, loss="contrastive")
    with running(config) as server:
        server.coordinator.config = config.model_copy(update={"training": training})
        join(server.url, token(server.config, "board"), "desk", tmp_path / "a")
    assert "DATA: an .npz file with the samples x (n, 2) and the labels y (int64)." in said
