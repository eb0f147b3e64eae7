"""`edgetailor serve` while it looks at submodels: the port is taken and says that it prepares."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import urllib3

from commands import command, edgetailor, environment, refusal, run
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.doctor.coordinator_checks import check_connection
from device_agent.federation.fleet_status import PATIENCE_S
from profiles.errors import ClientError

FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "digits.npz"
port = 0

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
from toolkit.coordinator.devices import submodel_assignment

def looks(config, model):
    while not Path("looked").exists():
        time.sleep(0.05)

submodel_assignment.planner = looks
sys.argv = ["edgetailor", "serve", "fleet.toml"]
from toolkit.cli import main
main()
"""
Preparing = tuple["subprocess.Popen[str]", str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the coordinator works."""
    made = tmp_path_factory.mktemp("coordinator")
    np.savez(made / "digits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    (made / "fleet.toml").write_text(FLEET)
    return made


@pytest.fixture(scope="module")
def preparing(folder: Path) -> Iterator[Preparing]:
    """A coordinator that prepares until the file `looked` is there, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=folder, env=environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = re.fullmatch(
            r"Preparing: devices that ask at (http://127\.0\.0\.1:\d+) are told to wait\.\n",
            process.stderr.readline(),
        )
        assert said is not None
        yield process, said[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", b"x" * 5_000_000)])
def test_whoever_asks_is_told_to_wait(
    preparing: Preparing, method: str, body: bytes | None
) -> None:
    _, url = preparing
    answer = urllib3.request(method, f"{url}/v1/devices", body=body, retries=False)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["code"] == "preparing"
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


def test_a_port_that_is_taken_by_one_that_prepares(preparing: Preparing, folder: Path) -> None:
    port = preparing[1].rpartition(":")[2]
    (folder / "second.toml").write_text(FLEET.replace("port = 0", f"port = {port}"))
    assert refusal(edgetailor("serve", "second.toml", cwd=folder)) == (
        f"Port {port} on 127.0.0.1 is in use: stop what uses it or set another `port` in "
        "second.toml."
    )
    sentence = refusal(edgetailor("serve", "fleet.toml", cwd=folder))
    assert "stop the coordinator that runs on it" in sentence


def test_an_agent_waits_and_says_so(preparing: Preparing, folder: Path) -> None:
    process, url = preparing
    token = folder / "state" / "tokens" / "desk.token"
    join = command("edgetailor-agent", "join", url, "--token-file", token, "--state", "a")
    agent = subprocess.Popen(
        join, cwd=folder, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with agent, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as stalled:
        stalled.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")  # no more
        assert agent.stderr is not None
        assert agent.stderr.readline() == (
            f"Coordinator at {url} is still preparing; asking every 5 s until it is ready\n"
        )
        (folder / "looked").touch()
        stdout, rest = agent.communicate(timeout=30)
    assert (agent.returncode, stdout.split(":")[0]) == (0, "desk-1")
    assert rest.startswith(f"Joined {url} as desk-1 ")
    done = run("edgetailor-agent", "status", "--state", "a", cwd=folder)
    assert (done.code, done.stdout.splitlines()[0][:8]) == (0, "round 0 ")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert said.startswith(f"Coordinator at {url}\n")
    assert said.endswith("\nInterrupted.\n")


def test_it_can_be_interrupted(folder: Path) -> None:
    (folder / "looked").unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=folder, env=environment(),
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Preparing: ")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[1] == "\nInterrupted.\n"
    assert process.returncode == 130
