"""Three sites of five agents under Flower, in real processes: `make test-flower`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from commands import ROOT, command, environment, free_port
from models_for_tests import CLASSES, INPUT_SHAPE

pytestmark = pytest.mark.flower

ROUNDS, SITES = 3, 3
KINDS = {"whole": ("full", 2), "ranks": ("low-rank:0.5", 2), "slices": ("slice:residual", 1)}
AGENTS = sum(count for _, count in KINDS.values())
LIMIT_S = 1800.0
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
BIN = Path(sys.executable).parent


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT_S:g} s until {what}"
        time.sleep(0.1)


class Processes:
    """Processes that all end with the test; each has a log file of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: list[str], **more: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                arguments,
                cwd=self.folder,
                env=environment(**{"PYTHONPATH": PYTHONPATH, **more}),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    except BaseException:
        for path in sorted(folder.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        for process in started.running.values():
            process.terminate()
        for process in started.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def write_data(folder: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for name in ["held_out", *(f"agent-{n}" for n in range(SITES * AGENTS))]:
        labels = draw.integers(CLASSES, size=24)
        x = draw.normal(labels[:, None, None, None] / CLASSES, 1, (24, *INPUT_SHAPE))
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=labels)


def write_file(folder: Path, name: str, port: int, each: int, options: str = "") -> None:
    """A federation's file with `each` places for every place in `KINDS`."""
    kinds = "".join(
        f'[[devices]]\nname = "{kind}"\nsubmodel = "{spec}"\ncount = {count * each}\n'
        for kind, (spec, count) in KINDS.items()
    )
    (folder / f"{name}.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        held_out = "held_out.npz"
        rounds = {ROUNDS}
        state = "{name}"
        port = {port}
        seed = 5
        {options}
        [training]
        batch_size = 8
        {kinds}"""
    )


def start_agents(running: Processes, name: str, port: int, first: int, sites: int) -> None:
    """The agents of `sites` sites, from data file `first` on, at the coordinator of `name`."""
    url = f"http://127.0.0.1:{port}"
    tokens = running.folder / name / "tokens"
    until(lambda: all((tokens / f"{kind}.token").exists() for kind in KINDS), "there are tokens")
    number = first
    for _ in range(sites):
        for kind, (_, count) in KINDS.items():
            for _ in range(count):
                agent = f"{name}-agent-{number}"
                given = ["--state", f"state-{agent}"]
                token = ["--token-file", tokens / f"{kind}.token", "--name", agent]
                subprocess.run(
                    command("edgetailor-agent", "join", url, *token, *given),
                    cwd=running.folder,
                    env=environment(PYTHONPATH=PYTHONPATH),
                    check=True,
                    timeout=LIMIT_S,
                    capture_output=True,
                )
                data = ["--data", f"agent-{number}.npz", "--seed", number, "--threads", 1]
                running.start(agent, command("edgetailor-agent", "run", *data, *given))
                number += 1


def agents_done(running: Processes) -> bool:
    agents = [process for name, process in running.running.items() if "agent" in name]
    assert all(process.poll() in (None, 0) for process in agents)
    return all(process.poll() == 0 for process in agents)


def start_site(running: Processes, number: int) -> None:
    running.start(f"site-{number}", command("edgetailor", "serve", f"site-{number}.toml"))


def start_sites(running: Processes) -> None:
    """All sites with their agents, and the file of the federation above them."""
    write_file(running.folder, "top", 0, SITES)
    ports = [free_port() for _ in range(SITES)]
    for number, port in enumerate(ports):
        write_file(running.folder, f"site-{number}", port, 1, "site = true")
        start_site(running, number)
    for number, port in enumerate(ports):
        start_agents(running, f"site-{number}", port, AGENTS * number, 1)


def start_flower(running: Processes, timeout: float, keys: str = "") -> None:
    """A SuperLink, a SuperNode for each site, and the project's app, submitted by `flwr run`.

    `keys` are further lines of the run's configuration.
    """
    folder = running.folder
    port = free_port()
    home = {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(
        f"""
        [project]
        name = "sites"
        version = "1.0.0"
        description = ""
        license = "Apache-2.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "edgetailor"
        [tool.flwr.app.components]
        serverapp = "toolkit.flower.server_app:app"
        clientapp = "toolkit.flower.client_app:app"
        [tool.flwr.app.config]
        federation = "{folder / "top.toml"}"
        out = "{folder / "top"}"
        sites = {SITES}
        timeout = {timeout}
        {keys}
        """
    )
    (app / "README.md").write_text("The fleet.\n")
    running.start(
        "superlink",
        [
            *(str(BIN / "flower-superlink"), "--insecure"),
            "--disable-runtime-dependency-installation",
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        **home,
        PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
    )
    for number in range(SITES):
        running.start(
            f"supernode-{number}",
            [
                *(str(BIN / "flower-supernode"), "--insecure"),
                *("--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                *("--node-config", f'state="{folder / f"site-{number}"}"'),
            ],
            **home,
            PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
        )

    def submitted() -> bool:
        done = subprocess.run(
            [str(BIN / "flwr"), "run", str(app), "here"],
            cwd=folder,
            env=environment(**home, PYTHONPATH=PYTHONPATH),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        (folder / "flwr-run.log").write_text(done.stdout + done.stderr)
        return done.returncode == 0

    until(submitted, "the app is submitted")


def round_file(folder: Path, number: int) -> Path:
    return folder / "top" / f"round-{number}.safetensors"


def test_three_sites_are_one_coordinator(tmp_path: Path, seed: int) -> None:
    write_data(tmp_path, seed)
    with processes(tmp_path) as running:
        port = free_port()
        write_file(tmp_path, "one", port, SITES)
        running.start("one", command("edgetailor", "serve", "one.toml"))
        start_agents(running, "one", port, 0, SITES)
        until(lambda: agents_done(running), "the coordinator's last round is over")
    with processes(tmp_path) as running:
        start_sites(running)
        start_flower(running, timeout=600)
        until(round_file(tmp_path, ROUNDS).exists, "Flower's last round is over")
    came = load_file(round_file(tmp_path, ROUNDS))
    expected = load_file(tmp_path / "one" / "global.safetensors")
    start = load_file(round_file(tmp_path, 0))
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        moved = np.linalg.norm(value.astype(np.float64) - start[name])
        gap = np.linalg.norm(came[name].astype(np.float64) - value)
        assert gap <= 1e-4 * moved + 1e-6 * np.linalg.norm(value), name


@pytest.mark.parametrize(
    ("keys", "norm", "atol"),
    [
        ("dense = true\nclipping-norm = 0.1", 0.1, 1e-6),
        # SecAgg+ rounds each number to a multiple of 16 / 2^22.
        ("dense = true\nsecure = true", np.inf, 1e-6 + 16 / 2**22),
    ],
    ids=["clipped", "secure"],
)
def test_whole_models_are_averaged(
    tmp_path: Path, seed: int, keys: str, norm: float, atol: float
) -> None:
    """Oracle: the mean of the models in the sites' state folders, clipped by numpy."""
    write_data(tmp_path, seed)
    with processes(tmp_path) as running:
        start_sites(running)
        start_flower(running, 600, keys)
        until(round_file(tmp_path, ROUNDS).exists, "Flower's last round is over")
        until(lambda: agents_done(running), "the sites' last rounds are over")
    start = load_file(round_file(tmp_path, ROUNDS - 1))
    came = load_file(round_file(tmp_path, ROUNDS))
    changes = []
    for number in range(SITES):
        own = load_file(tmp_path / f"site-{number}" / "global.safetensors")
        change = {n: own[n] - v.astype(np.float64) for n, v in start.items() if v.dtype.kind == "f"}
        length = np.sqrt(sum((value**2).sum() for value in change.values()))
        assert length > 0
        changes.append({n: v * min(1.0, norm / length) for n, v in change.items()})
    for name in changes[0]:
        expected = start[name] + np.mean([change[name] for change in changes], axis=0)
        np.testing.assert_allclose(came[name], expected, rtol=1e-5, atol=atol, err_msg=name)
    lines = (tmp_path / "top" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["sites"] for line in lines] == [0] + [SITES] * ROUNDS


def test_a_killed_site_loses_its_round_only(tmp_path: Path, seed: int) -> None:
    write_data(tmp_path, seed)
    with processes(tmp_path) as running:
        start_sites(running)
        start_flower(running, timeout=90)
        until(round_file(tmp_path, 1).exists, "the first round is over")
        running.kill("site-0")
        until(round_file(tmp_path, 2).exists, "the round without a site is over")
        start_site(running, 0)
        until(round_file(tmp_path, ROUNDS).exists, "the last round is over")
    lines = (tmp_path / "top" / "history.jsonl").read_text().splitlines()
    rounds = [(line["round"], line["sites"], line["updates"]) for line in map(json.loads, lines)]
    assert rounds == [(0, 0, 0), (1, 3, 15), (2, 2, 10), (3, 3, 15)]
