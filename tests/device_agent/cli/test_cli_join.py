"""`edgetailor-agent join`, `run` and `status`, with a coordinator and without."""

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from bundles import everything
from commands import Agent, Done, free_port, interrupted, refusal, run
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.state_folder import Identity

STOPPED = "\nInterrupted.\n"  # on a line of its own, behind the terminal's ^C


def nobody() -> str:
    """The URL of a port without a server."""
    return f"http://127.0.0.1:{free_port()}"


def joined(folder: Path, url: str) -> Path:
    """A state folder as `join` leaves it."""
    identity = Identity(
        url=url, device="board-1", secret="s", name="desk", submodel="full",
        token_sha256=hashlib.sha256(b"t").hexdigest(),
    )  # fmt: skip
    DeviceState(folder / "state").remember(identity)
    return folder / "state"


@pytest.mark.parametrize("command", [("status",), ("run", "--data", "local.npz")])
def test_before_joining(agent: Agent, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert refusal(agent(*command, "--state", "state")) == (
        "state has not joined a coordinator yet. Run `edgetailor-agent join URL --token-file FILE` "
        "first."
    )
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("url", "token", "message"),
    [
        ("http://127.0.0.1:1", None, r"The token file token cannot be read: .*No such file"),
        ("http://127.0.0.1:1", "two words", "A token is one word of ASCII characters"),
        ("http://127.0.0.1:1", "", "A token is one word of ASCII characters"),
        (
            "127.0.0.1:8123",
            "t",
            r"Invalid URL of a coordinator '127\.0\.0\.1:8123': write it like http",
        ),
        ("ftp://host", "t", "Invalid URL of a coordinator 'ftp://host'"),
        ("http://..", "t", "Invalid URL of a coordinator 'http://\\.\\.'"),
        ("http://me:secret@127.0.0.1:1", "t", "must not contain a user name or a password"),
        ("http://127.0.0.1:1", "\udcff\udcfe", "^The token file token is not a text file. Give"),
        ("http://127.0.0.1:1", "t" * 5000, "^The token file token has more than 4096 bytes. Give"),
    ],
)
def test_join_refuses(
    agent: Agent, tmp_path: Path, url: str, token: str | None, message: str
) -> None:
    if token is not None:
        (tmp_path / "token").write_bytes(os.fsencode(token))
    done = agent("join", url, "--token-file", "token", "--state", "state")
    assert re.search(message, refusal(done))
    assert not (tmp_path / "state" / "device.json").exists()


@pytest.mark.parametrize(
    "command", [("join", "http://127.0.0.1:1", "--token-file", "t"), ("status",), ("leave",)]
)
@pytest.mark.parametrize("state", ["file", "file/below"])
def test_a_state_folder_that_is_a_file(
    agent: Agent, tmp_path: Path, command: tuple[str, ...], state: str
) -> None:
    (tmp_path / "t").write_text("t\n")
    (tmp_path / "file").write_text("mine")
    assert refusal(agent(*command, "--state", state)) == (
        f"The state must be a folder; {state} is a file or below a file. Give a folder with "
        "--state."
    )
    assert set(everything(tmp_path)) == {"t", "file"}


def test_join_waits_for_a_coordinator_and_can_be_interrupted(tmp_path: Path) -> None:
    url = nobody()
    (tmp_path / "token").write_text("t\n")
    done = interrupted(
        "edgetailor-agent", "join", url, "--token-file", "token", "--state", "state",
        cwd=tmp_path, after="trying again",
    )  # fmt: skip
    assert done == Done(130, "", waiting(url, " for up to 1 min 0 s") + STOPPED)
    assert not (tmp_path / "state").exists()


def test_run_waits_for_its_coordinator(tmp_path: Path) -> None:
    url = nobody()
    np.savez(tmp_path / "local.npz", x=np.zeros((2, 1), np.float32), y=np.zeros(2, np.int64))
    done = interrupted(
        "edgetailor-agent", "run", "--data", "local.npz", "--state", joined(tmp_path, url),
        cwd=tmp_path, after="trying again",
    )  # fmt: skip
    stamp = r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d\] "
    talk, stamped = re.subn(f"(?m)^{stamp}", "", done.stderr)
    assert stamped == 1
    assert talk == waiting(url) + STOPPED
    assert (done.code, done.stdout) == (130, "")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ("nosuch.npz",),
            2,
            r"^nosuch\.npz does not exist; give an \.npz file with x and y, or x_NAME and y_NAME "
            r"for several inputs or outputs\.$",
        ),
        (("text.npz",), 2, r"^text\.npz is not a readable \.npz file: "),
        (("no_y.npz",), 2, r"^no_y\.npz has no array 'y', only x\. "),
        (("nosuch:local",), 2, r"^nosuch:local cannot be loaded: No module named 'nosuch'\.$"),
        (
            ("doubles.npz",), 2,
            r"^doubles\.npz: x must be float32 or int64 or int32 and y int64 or float32; they are "
            r"float64 and int64\. Convert them with numpy's astype\.$",
        ),
        (
            ("odd.npz",), 2,
            r"^odd\.npz: x and y must contain the same number of samples; they are \(3, 1\) and "
            r"\(2,\)\.$",
        ),
        (("one.npz",), 2, r"^one\.npz contains 1 sample\. Give at least 2\.$"),
        (("folder",), 2, r"The folder folder has no y\.npy"),
    ],
)  # fmt: skip
def test_run_checks_the_data_before_the_first_round(
    agent: Agent,
    coordinator: str,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    x, labels = np.zeros((2, 1), np.float32), np.zeros(2, np.int64)
    (tmp_path / "text.npz").write_text("x,y\n")
    np.savez(tmp_path / "no_y.npz", x=x)
    np.savez_compressed(tmp_path / "doubles.npz", x=x.astype(float), y=labels)
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 1), np.float32), y=labels)
    np.savez(tmp_path / "one.npz", x=x[:1], y=labels[:1])
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", x)
    done = agent("run", "--state", joined(tmp_path, coordinator), "--data", *options)
    assert re.search(message, refusal(done, code)), done


def test_run_checks_its_limit_of_memory_before_the_first_round(
    coordinator: str, tmp_path: Path
) -> None:
    """In a process that has loaded nothing else."""
    np.savez(tmp_path / "fine.npz", x=np.zeros((2, 1), np.float32), y=np.zeros(2, np.int64))
    state = joined(tmp_path, coordinator)
    options = ("--data", "fine.npz", "--max-memory", "20MB")
    done = run("edgetailor-agent", "run", "--state", state, *options, cwd=tmp_path)
    assert re.search(
        r"^The agent uses [3-7]\d\.\dMB before any training, but --max-memory allows only "
        r"20\.0MB\. Raise this limit\.$",
        refusal(done, 5),
    )


def test_status_gives_up_on_a_coordinator_that_is_away(agent: Agent, tmp_path: Path) -> None:
    url = nobody()
    done = agent("status", "--state", joined(tmp_path, url))
    assert done == Done(
        6,
        "",
        waiting(url, " for up to 5 s")
        + f"Error: Coordinator at {url} cannot be reached (connection refused); gave up after 3 s. "
        "Check the URL, and that `edgetailor serve` runs there.\n",
    )


def waiting(url: str, long: str = "") -> str:
    return f"Coordinator at {url} cannot be reached (connection refused); trying again{long}\n"


STATUS = {
    "version": 1,
    "state": "training",
    "round": 3,
    "rounds": 12,
    "expected_devices": 2,
    "devices": [
        {
            "device": "board-1", "name": "desk", "submodel": "low-rank:0.25", "state": "training",
            "loss": 1.25, "rounds_trained": 2, "bytes_down": 10, "bytes_up": 5, "idle_s": 0.5,
            "note": None, "round": 3,
        },
        {
            "device": "phone-1", "name": "pocket", "submodel": "cp:2.0", "state": "waiting",
            "loss": None, "rounds_trained": 2, "bytes_down": 10, "bytes_up": 5, "idle_s": 0.5,
            "note": None, "round": None,
        },
    ],
    "history": [
        {
            "round": 2, "accuracy": 0.8125, "loss": 0.7, "updates": 2, "left_out": {},
            "limited": {}, "changes": [], "staleness": [],
        }
    ],
    "states": {"training": 1, "waiting": 1},
    "warnings": [],
    "kinds": 2,
    "kinds_ready": 2,
    "preparing": [],
}  # fmt: skip


@pytest.fixture
def coordinator() -> Iterator[str]:
    """The URL of a coordinator that knows one device, whose secret is `s`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == "Bearer s"
            problem = {"code": "client.not-authorised", "message": "This device has left."}
            body = json.dumps(STATUS if allowed else problem).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:  # a report, such as why the device stops
            self.send_response(204)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_status(agent: Agent, tmp_path: Path, coordinator: str) -> None:
    state = joined(tmp_path, coordinator)
    assert agent("status", "--state", state) == Done(
        0,
        "round 3 of 12, training, global accuracy 81.2%\n"
        "  board-1 (desk)   low-rank:0.25    training round 3 loss 1.2500\n"
        "  phone-1 (pocket) cp:2.0           waiting\n",
        "",
    )
    done = agent("status", "--state", state, "--json")
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == STATUS


def test_status_of_a_device_that_was_removed(
    agent: Agent, tmp_path: Path, coordinator: str
) -> None:
    identity = Identity(url=coordinator, device="d", secret="old", name="n", submodel="full")
    DeviceState(tmp_path / "state").remember(identity)
    done = agent("status", "--state", "state")
    assert refusal(done, code=6) == "This device has left."


def test_joining_twice_changes_nothing(agent: Agent, tmp_path: Path, coordinator: str) -> None:
    state = joined(tmp_path, coordinator)
    before = everything(state)
    (tmp_path / "token").write_text("t")
    done = agent("join", coordinator, "--token-file", "token", "--state", state)
    assert done == Done(
        0,
        f"board-1 has joined; next: edgetailor-agent run --data DATA --state {state}\n",
        f"desk has joined {coordinator} already, as board-1.\n",
    )
    (tmp_path / "other").write_text("another kind's")
    other = agent("join", coordinator, "--token-file", "other", "--state", state)
    assert refusal(other) == (
        f"{state} belongs to board-1, which joined {coordinator} with another token. For a second "
        "device on this machine, give another folder with --state. To give up the membership as "
        "board-1 and join with this token, use --replace."
    )
    other = agent("join", nobody(), "--token-file", "token", "--state", state)
    assert f"{state} belongs to the coordinator {coordinator}" in refusal(other)
    assert everything(state) == before
