"""`edgetailor serve` while it starts and while it plans, and what devices are told meanwhile."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import urllib3

from commands import LIMIT_S, ROOT, command, edgetailor, environment, free_port, refusal, run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.federation.fleet_status import PATIENCE_S
from device_agent.federation.identity.device_keys import DeviceKey
from device_agent.formats.protocol.problems import NEEDS_PROFILE, PREPARING
from made_calibration import DEVICE
from parameters import some_long
from profiles.errors import ClientError, InputError
from toolkit.coordinator.server import Server
from toolkit.coordinator.storage.folder_lock import FolderLock
from vector_fleet import MACHINE, VectorModel, assert_soon, configured

FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "digits.npz"
port = {port}

[[devices]]
name = "phone"
submodel = "auto"

[[devices]]
name = "desk"
submodel = "full"
"""
SERVE = """
import sys, time
from pathlib import Path
from device_agent.formats.protocol.fleet import Preparation
from toolkit.coordinator import federation_setup
from toolkit.coordinator.devices import submodel_assignment

load = federation_setup.federation

def federation(config, report):
    while not Path("loaded").exists():
        time.sleep(0.05)
    return load(config, report)

class Planner:
    def submodel(self, kind, device):
        return "full"

def make_planner(config, progress, stopping):
    progress(Preparation(task="plan", submodel="low-rank:0.25", number=2, total=5))
    while not Path("planned").exists():
        if stopping.wait(0.05):
            raise RuntimeError("stopped")
    return Planner()

federation_setup.federation = federation
submodel_assignment.make_planner = make_planner
sys.argv = ["edgetailor", "serve", "fleet.toml"]
from toolkit.cli import main
main()
"""
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, port: int) -> Path:
    """Where the coordinator works; its tokens are those of the test."""
    coordinator = tmp_path_factory.mktemp("coordinator")
    np.savez(coordinator / "digits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    (coordinator / "fleet.toml").write_text(FLEET.format(port=port))
    (coordinator / "state" / "tokens").mkdir(parents=True)
    for kind in ("desk", "phone"):
        (coordinator / "state" / "tokens" / f"{kind}.token").write_text(f"token-of-{kind}\n")
    return coordinator


@pytest.fixture(scope="module")
def process(folder: Path, url: str) -> Iterator[Process]:
    """A coordinator that loads its model until `loaded` is there, and plans until `planned` is."""
    started = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=folder, env=environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert_soon(lambda: answers(url), LIMIT_S)
        yield started
    finally:
        started.kill()
        started.communicate()


def answers(url: str) -> bool:
    try:
        return urllib3.request("GET", url, retries=False).status == 503
    except urllib3.exceptions.HTTPError:
        return False


@pytest.mark.long
def test_a_start_with_a_planned_kind(process: Process, folder: Path, url: str, port: int) -> None:
    """One start, from the first answer to the end: each step needs the one before it."""
    for method, body in (("GET", None), ("POST", b"x" * 5_000_000)):
        everybody_is_told_to_wait(url, method, body)
    the_port_is_taken(folder, port)
    an_agent_waits_for_the_start_and_joins_while_others_are_planned_for(folder, url)
    the_state_folder_is_used(folder)
    a_device_that_is_planned_for_waits_for_the_plan(folder, url)
    assert_logged(process, url)


def everybody_is_told_to_wait(url: str, method: str, body: bytes | None) -> None:
    answer = urllib3.request(method, f"{url}/v1/devices", body=body, retries=False)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["code"] == PREPARING
    said = {f.check: (f.result, f.detail) for f in check_connection(url, None, "some-token")}
    assert said["coordinator"] == ("PASS", f"answers at {url}")
    assert said["token"] == ("SKIP", "the coordinator is still preparing")
    slept: list[float] = []
    with pytest.raises(ClientError) as error:
        CoordinatorClient(url, "secret", patience_s=PATIENCE_S, sleep=slept.append).status()
    assert str(error.value) == (
        f"Coordinator at {url} is still preparing. Try again in a few minutes."
    )
    assert slept == [5]


def the_port_is_taken(folder: Path, port: int) -> None:
    assert refusal(edgetailor("serve", "fleet.toml", cwd=folder)) == (
        f"Port {port} on 127.0.0.1 is in use: stop the program that uses it, or set another "
        "`port` in fleet.toml."
    )


def an_agent_waits_for_the_start_and_joins_while_others_are_planned_for(
    folder: Path, url: str
) -> None:
    token = folder / "state" / "tokens" / "desk.token"
    join = command("edgetailor-agent", "join", url, "--token-file", token, "--state", "a")
    agent = subprocess.Popen(
        join, cwd=folder, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    port = int(url.rpartition(":")[2])
    with agent, socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")  # no more
        assert agent.stderr is not None
        assert agent.stderr.readline() == (
            f"Coordinator at {url} is still preparing; asking every 5 s until it is ready\n"
        )
        (folder / "loaded").touch()
        stdout, rest = agent.communicate(timeout=120)
    assert (agent.returncode, stdout.split()[0]) == (0, "desk-1")
    assert f"Joined {url} as desk-1 " in rest
    done = run("edgetailor-agent", "status", "--state", "a", cwd=folder)
    assert (done.code, done.stdout.splitlines()[0][:8]) == (0, "round 0 ")
    assert "  planning 2 of 5: low-rank:0.25" in done.stdout.splitlines()


def the_state_folder_is_used(folder: Path) -> None:
    (folder / "second.toml").write_text(FLEET.format(port=0))
    sentence = refusal(edgetailor("serve", "second.toml", cwd=folder))
    assert "first stop the coordinator that uses it" in sentence


def a_device_that_is_planned_for_waits_for_the_plan(folder: Path, url: str) -> None:
    def ask(profile: object) -> urllib3.BaseHTTPResponse:
        request = DeviceKey.new().join_request("token-of-phone", "mine", MACHINE)
        return urllib3.request(
            "POST", f"{url}/v1/devices", json=asdict(replace(request, profile=profile)),
            headers={"Authorization": "Bearer token-of-phone"}, retries=False,
        )  # fmt: skip

    assert ask(None).json()["code"] == NEEDS_PROFILE  # it may measure meanwhile
    profile = msgspec.to_builtins(DEVICE)
    answer = ask(profile)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["code"] == PREPARING
    operator = CoordinatorClient(url, (folder / "state" / "operator.token").read_text().strip())
    assert [one.device for one in operator.status().devices] == ["desk-1"]
    (folder / "planned").touch()
    assert_soon(lambda: not [p for p in operator.status().preparing if p.task == "plan"], LIMIT_S)
    joined = ask(profile)
    assert (joined.status, joined.json()["device"]) == (200, "phone-1")


def assert_logged(process: Process, url: str) -> None:
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 130
    assert lines.index("Loading PyTorch.") < lines.index(f"Coordinator at {url}")
    assert "Planning first: devices of kind phone wait; others may join." in lines
    planned = lines.index("The plan is ready: devices of every kind may join.")
    (desk,) = (
        n for n, line in enumerate(lines) if line.startswith("desk-1 (") and "1 of 2" in line
    )
    assert desk < planned < lines.index("phone-1 (mine) has joined: 2 of 2 places taken.")
    assert lines[-1] == "Interrupted."


TORCH = """
import pathlib, time
pathlib.Path("imported").touch()
for _ in range(1200):
    time.sleep(0.05)
"""


def test_port_and_state_folder_are_taken_before_torch_is_imported(tmp_path: Path) -> None:
    """By a coordinator whose import of torch never ends."""
    np.savez(tmp_path / "digits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    (tmp_path / "fleet.toml").write_text(FLEET.format(port=0))
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "torch.py").write_text(TORCH)
    path = f"{tmp_path / 'blocked'}:{ROOT}"
    with subprocess.Popen(
        command("edgetailor", "serve", "fleet.toml"),
        cwd=tmp_path, env=environment(PYTHONPATH=path), stderr=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        try:
            assert started.stderr is not None
            said = started.stderr.readline()
            port = int(said.removeprefix("Starting at port ").split()[0])
            assert started.stderr.readline() == "Loading PyTorch.\n"
            assert_soon((tmp_path / "imported").exists, LIMIT_S)
            assert answers(f"http://127.0.0.1:{port}")
            with pytest.raises(InputError, match="is in use"):
                FolderLock(tmp_path / "state")
        finally:
            started.kill()


def test_a_damaged_token_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    config = configured(tmp_path)
    Server(config, VectorModel(), tmp_path / "fleet.toml").close()
    (config.state / "operator.token").write_bytes(b"")
    done = subprocess.run(
        command("edgetailor", "serve", "fleet.toml"),
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "operator.token is damaged" in done.stderr
    assert "Loading PyTorch" not in done.stderr


@pytest.mark.parametrize("stage", some_long(["loading", "planning"], "planning"))
def test_it_can_be_interrupted(folder: Path, url: str, stage: str) -> None:
    (folder / "planned").unlink(missing_ok=True)
    (folder / "loaded").unlink(missing_ok=True)
    if stage == "planning":
        (folder / "loaded").touch()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=folder, env=environment(),
        stderr=subprocess.PIPE, text=True,
    ) as started:  # fmt: skip
        assert started.stderr is not None
        if stage == "loading":
            assert_soon(lambda: answers(url), LIMIT_S)
        else:
            while not started.stderr.readline().startswith("Planning first"):
                pass
        started.send_signal(signal.SIGINT)
        lines = started.communicate(timeout=120)[1].splitlines()
    assert lines[-1] == "Interrupted."
    assert not any("Error" in line or "Traceback" in line for line in lines)
    assert started.returncode == 130
