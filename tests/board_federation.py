"""A federation of a native agent and an emulated board, which the tutorial's lines have set up."""

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from commands import ROOT, command, environment, free_port
from emulated_board import BOOT_S, HOST, Board, Lines, new_state_disk, overlay
from gate_proxy import Gate, gate
from toolkit.simulation.digits import digits

IMAGE = ROOT / ".board"
TUTORIAL = ROOT / "docs" / "tutorials" / "raspberry-pis.md"
BATCH, EPOCHS, SAMPLES = 8, 2, 96
BATCHES = SAMPLES // BATCH
SLOW_PIECE = 512
"""Bytes every 0.02 s, so that transfers take seconds."""
AGENT = "edgetailor/bin/python closely.py run --data local.npz --threads 1"
"""The agent with a checkpoint after every batch, see `tests/board/closely.py`."""
FEDERATION = f"""
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1000
deadline_s = 86400.0
held_out = "held_out.npz"

[training]
batch_size = {BATCH}
epochs = {EPOCHS}
learning_rate = 0.05
"""
KIND = '\n[[devices]]\nname = "{}"\nsubmodel = "{}"\ncount = {}\n'
FIXED = "slice:units.2"
"""The board's submodel: the first half of the model is recorded, the second is trained."""
TWO = (
    f"min_updates = 2\n{FEDERATION}{KIND.format('pi', FIXED, 1)}{KIND.format('native', 'full', 1)}"
)
"""A board and a native agent. No round ends without both, even if one of them has stopped."""


@dataclass
class Served:
    """A coordinator on this machine, and the gate through which boards reach it."""

    folder: Path
    port: int
    gate: Gate
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The URL for boards."""
        return f"{self.scheme}://{HOST}:{self.port}"

    def token(self, kind: str) -> Path:
        return self.folder / "state" / "tokens" / f"{kind}.token"


@contextmanager
def process(folder: Path, log: str, name: str, *arguments: object) -> Iterator[None]:
    """Run a command of the project while the block runs."""
    with (folder / log).open("a") as out:
        started = subprocess.Popen(
            command(name, *arguments), cwd=folder, env=environment(), stdout=out, stderr=out
        )
    try:
        yield
    finally:
        started.terminate()
        started.wait()


@contextmanager
def serving(
    folder: Path, config: str, x: np.ndarray | None = None, y: np.ndarray | None = None
) -> Iterator[Served]:
    """A coordinator with its state in `folder`; it continues where an earlier one ended.

    Its held-out samples are `x` and `y`, or digits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports = folder / "ports.json"
    if not ports.exists():
        ports.write_text(json.dumps([free_port(), free_port()]))
        if x is None or y is None:
            x, y = (array[:200] for array in digits())
        np.savez(folder / "held_out.npz", x=x, y=y)
    inner, outer = json.loads(ports.read_text())
    (folder / "federation.toml").write_text(f"port = {inner}\n{config}")
    with (
        process(folder, "serve.log", "edgetailor", "serve", "federation.toml"),
        gate(f"http://127.0.0.1:{inner}", outer) as (_, opened),
    ):
        end = time.monotonic() + BOOT_S
        while not (folder / "state" / "tokens").is_dir():
            assert time.monotonic() < end, (folder / "serve.log").read_text()
            time.sleep(0.2)
        yield Served(folder, outer, opened)


@contextmanager
def native_agent(served: Served, kind: str) -> Iterator[None]:
    """An agent on this machine, with digits of its own."""
    x, y = digits()
    np.savez(served.folder / "native.npz", x=x[200:296], y=y[200:296])
    inner = f"http://127.0.0.1:{json.loads((served.folder / 'ports.json').read_text())[0]}"
    state = ["--state", served.folder / "native"]
    if not (served.folder / "native").exists():
        subprocess.run(
            command("edgetailor-agent", "join", inner, "--token-file", served.token(kind), *state),
            env=environment(),
            check=True,
        )
    with process(
        served.folder, "native.log", "edgetailor-agent", "run", "--data", "native.npz", *state
    ):
        yield


@dataclass
class Installed:
    """A board that the tutorial has set up and that has trained; saved without its state disk.

    `start` begins at that moment as often as wanted.
    """

    folder: Path
    said: dict[str, str]

    @property
    def disk(self) -> Path:
        return self.folder / "installed.qcow2"

    @property
    def memory(self) -> Path:
        return self.folder / "installed.memory"

    @property
    def state(self) -> Path:
        """The state disk of a device that has joined and waits for a round."""
        return self.folder / "state.raw"

    def board(self, name: str, state: Path | None = None) -> Board:
        """Start a board from that moment, with this state disk."""
        board = Board(IMAGE, self.folder / name)
        board.folder.mkdir(exist_ok=True)
        board.start(overlay(board.folder / "disk.qcow2", self.disk), self.memory)
        if state is not None:
            board.attach(state)
            board.pretend_boot()
        return board


def hold_update(agent: Lines, served: Served) -> None:
    """Let the agent train to the end, but its update does not arrive: the round stays open."""
    agent.until(f"epoch {EPOCHS}: batch {BATCHES} ")
    served.gate.state = "still"
    agent.until("Sending the update")


def cut_connections(served: Served) -> None:
    """End all connections with what is in them, and let new ones pass."""
    served.gate.state = "refuse"
    time.sleep(1)
    served.gate.state, served.gate.piece = "open", None


def tensors_in(file: Path) -> dict[str, bytes]:
    """The bytes of each tensor in a .safetensors file."""
    return {name: array.tobytes() for name, array in load_file(file).items()}


def check_whole(folder: Path) -> None:
    """Check that all files of a state folder are complete."""
    for name in ("device.json", "attempts.json", "privacy.json", "forms.json"):
        if (folder / name).exists():
            json.loads((folder / name).read_bytes())
    assert json.loads((folder / "device.json").read_bytes())["secret"]
    assert (folder / "device.key").stat().st_size
    assert "\0" not in (folder / "rounds.log").read_text()
    for file in folder.glob("files/[!.]*"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    if (folder / "bundle").exists():
        manifest = json.loads((folder / "bundle" / "manifest.json").read_bytes())
        for file in folder.glob("bundle/[!m]*"):  # a device fetches one form of each graph
            fetched = hashlib.sha256(file.read_bytes()).hexdigest()
            assert fetched == manifest["files"][file.name]["sha256"]
    if (folder / "update").exists():
        json.loads((folder / "update" / "update.json").read_bytes())
        load_file(folder / "update" / "update.safetensors")


def tutorial_lines(number: int) -> list[str]:
    """The shell lines in a numbered section of the tutorial on Raspberry Pis."""
    section = re.search(rf"^## {number}\. .*?(?=^## |\Z)", TUTORIAL.read_text(), re.M | re.S)
    assert section is not None
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", section[0], re.M | re.S)
    text = "".join(blocks).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line.removeprefix("$ ")) for line in text.splitlines() if line]


def set_up(made: Installed, served: Served, wheel: Path) -> dict[str, str]:
    """Run the tutorial's lines on a new board until it has trained, and save it.

    Returns:
        What each line wrote, by the line as the tutorial has it; what was seen else, by its name.
    """
    board = Board(IMAGE, made.folder / "first")
    try:
        return _set_up(board, made, served, wheel)
    finally:
        board.cut()


def _set_up(board: Board, made: Installed, served: Served, wheel: Path) -> dict[str, str]:
    said: dict[str, str] = {}
    begun = time.monotonic()
    board.start(overlay(made.disk, IMAGE / "disk.raw"))
    said["boot"] = f"{time.monotonic() - begun:.0f}"
    x, y = digits()
    np.savez(served.folder / "local.npz", x=x[296 : 296 + SAMPLES], y=y[296 : 296 + SAMPLES])
    copied = [wheel, served.token("pi"), served.folder / "local.npz"]
    for file in [*copied, ROOT / "tests" / "board" / "closely.py"]:
        board.put(file, file.name)
    activated = ""
    for line in tutorial_lines(4):
        if line.startswith("sudo apt"):  # the image has the package, and no network
            continue
        said[line] = board.ok(activated + line.replace("http://SERVER:8123", served.url))
        if line.startswith(". "):
            activated = f"{line}; "
    service, journal = tutorial_lines(5)
    said[service] = board.run(activated + service).text  # this board has no sensor of temperature
    hour = time.gmtime().tm_hour
    later = f"{(hour + 11) % 24:02}:00-{(hour + 13) % 24:02}:00"
    service = service.replace("--max-temperature 70 ", "").replace("22:00-07:00", later)
    said["service"] = board.ok(activated + service)
    board.ok("sudo loginctl enable-linger $USER")
    said["unit"] = board.ok("systemctl --user cat edgetailor-agent")
    log = board.follow(f"{journal} -n all -o cat")
    log.until("Round 1: the update was accepted")
    [status] = tutorial_lines(6)
    said[status] = board.ok(activated + status)
    board.ok("systemctl --user stop edgetailor-agent")
    log.end()
    # What a device has that waits for a round
    board.attach(new_state_disk(made.state), "/mnt")
    board.root(
        "cd /home/pi/.local/state; cp -a edgetailor-agent /mnt; "
        "cd /mnt/edgetailor-agent; rm -rf files bundle update .update.training"
    )
    board.detach("/mnt")
    board.save(made.memory)
    return said
