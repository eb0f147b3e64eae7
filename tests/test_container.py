"""The steps of the Containerfile in a bare root file system: `serve` starts there as its user."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import urllib3

from device_agent.federation.membership import join

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "Containerfile"
SUITES = {"docker.io/library/debian:bookworm-slim": "bookworm"}
"""The suite of Debian whose minimal system is the content of an image."""
NEEDED = ("mmdebstrap", "unshare", "chroot", "setpriv")
FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "held_out.npz"
host = "0.0.0.0"
port = {port}
[[devices]]
name = "board"
submodel = "slice:units.2"
"""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the recipe, with their arguments in one line."""
    lines = [line for line in RECIPE.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", "")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in whole.splitlines()]


@dataclass
class Image:
    """What the instructions so far have made."""

    root: Path
    context: Path
    suite: str = ""
    user: str = "root"
    folder: str = "/"
    arguments: dict[str, str] = field(default_factory=dict)
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def follow(self, instruction: str, text: str) -> None:
        getattr(self, f"_{instruction.lower()}")(text)

    def within(self, command: list[str], **more: str) -> list[str]:
        """A command line that runs `command` in the root file system, as the present user."""
        pairs = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": f"/home/{self.user}" if self.user != "root" else "/root",
            **self.arguments,
            **more,
        }
        environment = [f"{name}={value}" for name, value in pairs.items()]
        mounts = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        for folder in filter(os.path.isdir, os.environ.get("PIP_FIND_LINKS", "").split()):
            (self.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {folder} {self.root}{folder}")
        as_user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        inner = shlex.join(
            [
                *("exec", "chroot", str(self.root), "env", "-i", *environment),
                *("setpriv", *as_user[1:], "sh", "-c"),
                f"cd {self.folder} && exec {shlex.join(command)}",
            ]
        )
        return ["unshare", "--mount", "sh", "-ec", "; ".join([*mounts, inner])]

    def _from(self, image: str) -> None:
        self.suite = SUITES[image]
        made = ["mmdebstrap", "--variant=minbase", self.suite, str(self.root)]
        subprocess.run([*made, "http://deb.debian.org/debian"], check=True, timeout=600)

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        # pip would ask an index that cannot be reached five times for each package.
        self.arguments[name] = value if is_known(urlsplit(value).hostname or "") else ""

    def _run(self, line: str) -> None:
        network = {name: value for name, value in os.environ.items() if is_of_network(name)}
        for file in ("/etc/resolv.conf", network.get("PIP_CERT", "")):
            if file and Path(file).exists():
                (self.root / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.root / file.lstrip("/"))
        subprocess.run(self.within(["sh", "-c", line], **network), check=True, timeout=1500)

    def _copy(self, text: str) -> None:
        *sources, target = text.split()
        folder = self.root / target.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        ignored = (ROOT / ".dockerignore").read_text().splitlines()
        for source in sources:
            (file,) = self.context.glob(source)
            kept = [rule[1:] for rule in ignored if rule.startswith("!")]
            assert any(file.relative_to(self.context).match(rule) for rule in kept), file
            shutil.copy(file, folder)

    def _user(self, name: str) -> None:
        self.user = name

    def _workdir(self, folder: str) -> None:
        self.folder = folder

    def _volume(self, folder: str) -> None:
        assert (self.root / folder.lstrip("/")).is_dir()

    def _expose(self, port: str) -> None:
        assert port == "8123"

    def _entrypoint(self, text: str) -> None:
        self.entry = json.loads(text)

    def _cmd(self, text: str) -> None:
        self.command = json.loads(text)


def is_of_network(name: str) -> bool:
    """Whether a variable says how this machine reaches package indexes."""
    return bool(re.fullmatch(r"PIP_\w+|(https?|no)_proxy", name, re.IGNORECASE))


def is_known(host: str) -> bool:
    """Whether this machine finds an address of `host`."""
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and {missing or 'nothing else'}")
    folder = tmp_path_factory.mktemp("image")
    context, root = folder / "context", folder / "root"
    context.mkdir()
    shutil.copy(ROOT / "constraints.txt", context)
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", context / "dist", ROOT], check=True, timeout=600)
    made = Image(root, context)
    for instruction, text in instructions():
        made.follow(instruction, text)
    yield made
    shutil.rmtree(root)


@pytest.mark.long
def test_serve_starts_in_the_image_and_a_device_joins(image: Image, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    federation = image.root / "federation"
    owner = federation.stat().st_uid
    (federation / "fleet.toml").write_text(FLEET.format(port=port))
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 1, 8, 8)).astype(np.float32)
    np.savez(federation / "held_out.npz", x=x, y=np.arange(20) % 10)
    said = tmp_path / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            image.within([*image.entry, *image.command]), stdout=out, stderr=out
        )
        try:
            answers = health(f"http://127.0.0.1:{port}", process, said)
            assert answers == {"/healthz": 200, "/readyz": 200}
            (state,) = (path for path in federation.iterdir() if path.is_dir())
            assert {path.stat().st_uid for path in [state, *state.iterdir()]} == {owner} != {0}
            token = (state / "tokens" / "board.token").read_text().strip()
            joined = join(f"http://127.0.0.1:{port}", token, "shed", tmp_path / "device")
            assert joined.device == "board-1"
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code == 0, said.read_text()


def health(url: str, process: subprocess.Popen[bytes], said: Path) -> Mapping[str, int]:
    """The answers of `serve` about its health, once it is ready; or why it is not."""
    answers: dict[str, int] = {}
    until = time.monotonic() + 300
    while answers.get("/readyz") != 200:
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < until, (answers, said.read_text())
        time.sleep(0.5)
        for route in ("/healthz", "/readyz"):
            try:
                answers[route] = urllib3.request("GET", url + route, retries=False).status
            except urllib3.exceptions.HTTPError:
                answers[route] = 0
    return answers


def test_the_recipe_says_what_its_guide_says() -> None:
    guide = (ROOT / "docs" / "guides" / "container.md").read_text()
    found = dict(instructions())
    assert f"`{found['VOLUME']}`" in guide
    assert f"{found['EXPOSE']}:{found['EXPOSE']}" in guide
    assert json.loads(found["ENTRYPOINT"])[0] in guide
    assert f"`{' '.join(json.loads(found['CMD']))}`" in guide
    assert "--uid 10001" in RECIPE.read_text()
    assert found["FROM"] in SUITES
