"""Simulated clients against real agents, on bundles and over HTTP, and against plain PyTorch.

A federation with clients of all families, over two rounds or more.
"""

import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from socket import create_server

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import oracles
from commands import ROOT, command, edgetailor, environment
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from oracles import Device, Plan, State
from parameters import long_one
from simulated_runs import kinds_of
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.federation_setup import federation
from toolkit.factorization import cp_decomposition
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulate import Simulation, prepare, simulate
from toolkit.simulation.simulation_config import SimulationConfig, load_simulation
from toolkit.simulation.torch_executor import sent_bytes
from trainings import train_bundle

ROUNDS, SELECTED = 2, 6
LIMIT_S = 900.0
PYTHONPATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
PLAN = Plan(batch_size=8, epochs=2, rate=0.01, momentum=0.9, weight_decay=0.01)
DECAY = 0.02
LOW_RANK, SLICE, WIDTH = f"low-rank:0.25,keep=1,decay={DECAY}", "slice:residual", "width:0.5"
ROLLING = "width:0.5,window=rolling"
# Small steps everywhere: with larger ones, rounding may grow a thousandfold from round to round.
CP = "cp:2.0,penalty=2.0,personal-steps=1,factor-steps=1,factor-rate=0.0001"
PFEDME = "pfedme,penalty=2.0,personal-steps=2,local-rate=0.02"
SMALL_SLICE = f"{SLICE},recording=float16,frozen=int8"
FAMILIES = ("full,recompute=yes", LOW_RANK, SLICE, SMALL_SLICE, ROLLING, WIDTH, CP, CP, PFEDME)
FEW = (SMALL_SLICE, ROLLING, ROLLING, CP, CP, CP)
PLAIN = ("full", "full", LOW_RANK, LOW_RANK, SLICE, ROLLING, ROLLING, WIDTH)
RANKS = {"strided": 2, "residual.conv": 2, "hidden": 2}  # a quarter of 8 outputs and 8 inputs


def configured(folder: Path, specs: tuple[str, ...], seed: int, rounds: int = ROUNDS) -> Path:
    """The file of a federation with a client of each spec, and its samples."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(CLASSES, size=200)
    x = draw.normal(labels[:, None, None, None] / CLASSES, 1, (200, *INPUT_SHAPE))
    np.savez(folder / "data.npz", x=x.astype(np.float32), y=labels)
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = {rounds}
        seed = {seed % 1000}
        [training]
        batch_size = {PLAN.batch_size}
        epochs = {PLAN.epochs}
        learning_rate = {PLAN.rate}
        weight_decay = {PLAN.weight_decay}
        [aggregation]
        bounds = false
        judge = false
        [simulation]
        data = "data.npz"
        participation = {SELECTED / len(specs)}
        partition = "dirichlet"
        alpha = 5
        seed = {seed % 1000}
        {kinds_of(specs)}"""
    )
    return folder / "fleet.toml"


def clients_of(simulation: Simulation, config: SimulationConfig) -> Iterator[list[Device]]:
    """For each round, the devices that take part; `number` is the client's."""
    seed, count = config.simulation.seed, len(simulation.specs)
    for round_ in range(1, config.rounds + 1):
        chosen = np.random.default_rng([seed, round_]).choice(count, SELECTED, replace=False)
        yield [
            Device(
                simulation.samples.x[simulation.parts[number]],
                simulation.samples.y[simulation.parts[number]],
                (seed * 100003 + number) * 100003 + round_,
            )
            for number in sorted(chosen.tolist())
        ]


def client_number(device: Device) -> int:
    return device.seed // 100003 % 100003


def simulated(file: Path) -> dict[str, Tensor]:
    """The global model after all rounds."""
    history = simulate(file, file.parent / "results")
    rounds = load_simulation(file).rounds
    assert [one.round for one in history] == list(range(1, rounds + 1))
    assert [one.clients for one in history] == [SELECTED] * rounds
    return safetensors.torch.load_file(file.parent / "results" / "global.safetensors")


def assert_close(
    came: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> None:
    """All tensors together within 1e-4 of what the rounds changed, each within 1e-3 of it."""
    floats = [name for name, value in start.items() if value.is_floating_point()]
    gaps = {name: float((came[name].double() - expected[name]).norm()) for name in floats}
    moved = {name: float((expected[name].double() - start[name]).norm()) for name in floats}
    assert np.linalg.norm(list(gaps.values())) <= 1e-4 * np.linalg.norm(list(moved.values()))
    for name in floats:
        size = float(start[name].norm())
        assert gaps[name] <= 1e-3 * moved[name] + 1e-6 * size, name


@pytest.mark.parametrize(
    ("specs", "rounds"), [(FEW, ROUNDS), long_one((FAMILIES, 3))], ids=["few", "all"]
)
def test_agents_on_exported_bundles(
    specs: tuple[str, ...],
    rounds: int,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # ALS ends below a threshold of its gain, where rounding decides about another sweep. Late
    # sweeps of collinear components amplify rounding.
    monkeypatch.setattr(cp_decomposition, "LEAST_GAIN", -math.inf)
    monkeypatch.setattr(cp_decomposition, "FIRST_SWEEPS", 3)
    file = configured(tmp_path, specs, seed, rounds)
    config = load_simulation(file)
    simulation = prepare(config, RunFolder(tmp_path / "other"))
    agents = federation(config)
    start = dict(agents.model.tensors)
    personal: dict[int, Mapping[str, np.ndarray]] = {}
    for round_, devices in enumerate(clients_of(simulation, config), 1):
        updates = []
        for device in devices:
            place = tmp_path / f"{round_}-{client_number(device)}"
            spec = specs[client_number(device)]
            trained = train_bundle(
                written(agents, spec, round_, place / "bundle"),
                (device.x, device.y),
                place / "update",
                threads=1,
                seed=device.seed,
                personal=personal.get(client_number(device)),
            )
            personal[client_number(device)] = trained.personal
            updates.append(read_update(place / "update"))
        agents.fold(updates)
    assert_close(simulated(file), agents.model.tensors, start)


def written(agents: Federation, spec: str, round_: int, folder: Path) -> Path:
    write_folder(folder, agents.bundle(spec, round_))
    return folder


@pytest.mark.long
def test_a_coordinator_with_agents(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, FAMILIES, seed, rounds=3)
    some = f"participation = {SELECTED / len(FAMILIES)}"
    assert some in file.read_text()
    file.write_text(file.read_text().replace(some, "participation = 1.0"))
    config = load_simulation(file)
    simulation = prepare(config, RunFolder(tmp_path / "prepared"))
    start = dict(simulation.federation.model.tensors)
    for client in range(len(FAMILIES)):
        data = simulation.client_data(client)
        np.savez(tmp_path / f"client-{client}.npz", x=data.x, y=data.y)
    np.savez(tmp_path / "held_out.npz", x=simulation.held_out[0], y=simulation.held_out[1])
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    top, _, rest = file.read_text().partition("[simulation]")
    kinds = rest[rest.index("[[devices]]") :]
    served = f'held_out = "held_out.npz"\nstate = "state"\nport = {port}\n{top}{kinds}'
    (tmp_path / "served.toml").write_text(served)

    def started(stack: ExitStack, *words: object) -> subprocess.Popen[bytes]:
        with (tmp_path / "processes.log").open("ab") as log:
            process = subprocess.Popen(
                command(*map(str, words)),
                cwd=tmp_path,
                env=environment(PYTHONPATH=PYTHONPATH),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    with ExitStack() as stack:
        server = started(stack, "edgetailor", "serve", "served.toml")
        tokens = tmp_path / "state" / "tokens"
        end = time.monotonic() + LIMIT_S
        while len(list(tokens.glob("*.token"))) < len(FAMILIES):
            alive = server.poll() is None and time.monotonic() < end
            assert alive, (tmp_path / "processes.log").read_text()
            time.sleep(0.1)
        agents = []
        for client in range(len(FAMILIES)):
            given = ["--state", f"agent-{client}"]
            token = ["--token-file", tokens / f"kind-{client}.token", "--name", f"agent-{client}"]
            join = command("edgetailor-agent", "join", f"http://127.0.0.1:{port}", *token, *given)
            subprocess.run(
                join,
                cwd=tmp_path,
                env=environment(PYTHONPATH=PYTHONPATH),
                check=True,
                timeout=LIMIT_S,
                capture_output=True,
            )
            own = ["--data", f"client-{client}.npz", "--threads", 1]
            number = 100003 * config.simulation.seed + client
            run = ("edgetailor-agent", "run", *own, "--seed", number, *given)
            agents.append(started(stack, *run))
        for agent in agents:
            assert agent.wait(LIMIT_S) == 0, (tmp_path / "processes.log").read_text()
        done = edgetailor("export-model", "state", 3, "served.safetensors", cwd=tmp_path)
        assert done.code == 0, done.stderr
    simulate(file, tmp_path / "simulated")
    assert_close(
        safetensors.torch.load_file(tmp_path / "simulated" / "global.safetensors"),
        safetensors.torch.load_file(tmp_path / "served.safetensors"),
        start,
    )


def test_the_bytes_of_8_bit_weights_and_their_scales() -> None:
    tensors = {"a": np.zeros((6, 5, 2), np.float32), "b": np.zeros((6, 5), np.float32)}
    assert sent_bytes(tensors, {"a"}) == 60 + 6 * 4 + 30 * 4


def test_plain_pytorch(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, PLAIN, seed)
    config = load_simulation(file)
    simulation = prepare(config, RunFolder(tmp_path / "other"))
    model = simulation.federation.module
    assert isinstance(model, torch.nn.Sequential)
    start = oracles.state_of(model)
    for round_, devices in enumerate(clients_of(simulation, config), 1):
        old = oracles.state_of(model)
        updates = [(plainly_trained(model, device, round_), len(device.y)) for device in devices]
        new = oracles.mean_of_blocks(updates, old)
        model.load_state_dict({name: value.float() for name, value in new.items()}, strict=False)
    assert_close(simulated(file), oracles.state_of(model), start)


def plainly_trained(model: torch.nn.Sequential, device: Device, round_: int) -> State:
    spec, small = PLAIN[client_number(device)], smooth_cnn(3, 4, 4, 6)
    family = spec.partition(":")[0]
    if family == "slice":
        return oracles.train_slice(model, "residual", device, PLAN)
    if family == "low-rank":
        return oracles.train_low_rank(model, RANKS, DECAY, device, PLAN)
    if spec == ROLLING:
        return oracles.train_window(model, small, device, PLAN, round_ - 1)
    if family == "width":
        return oracles.train_leading(model, small, device, PLAN)
    return oracles.train_full(model, device, PLAN)
