"""Options of [simulation] against plain PyTorch: baselines, dynamic capacities, validation."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import oracles
from device_agent.training import batching
from models_for_tests import CLASSES, INPUT_SHAPE, smooth_cnn
from oracles import Device, Plan, State
from simulated_runs import kinds_of
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.simulation.client_selection import ClientSelection
from toolkit.simulation.results import RoundResult, RunFolder
from toolkit.simulation.rounds import Simulation
from toolkit.simulation.simulate import prepare, simulate
from toolkit.simulation.simulation_config import SimulationConfig, load_simulation

ROUNDS, CLIENTS, SHARE = 3, 4, 0.3
PLAN = Plan(batch_size=8, epochs=1, rate=0.05, momentum=0.9, weight_decay=0.0)


def configured(folder: Path, seed: int, options: str, specs: tuple[str, ...] = ("full",)) -> Path:
    draw = np.random.default_rng(seed)
    labels = draw.integers(CLASSES, size=120)
    x = draw.normal(labels[:, None, None, None] / CLASSES, 1, (120, *INPUT_SHAPE))
    np.savez(folder / "data.npz", x=x.astype(np.float32), y=labels)
    (folder / "fleet.toml").write_text(
        f"""
        model = "models_for_tests:smooth_cnn"
        input_shape = {list(INPUT_SHAPE)}
        rounds = {ROUNDS}
        seed = {seed % 1000}
        [training]
        batch_size = {PLAN.batch_size}
        [aggregation]
        bounds = false
        judge = false
        [simulation]
        data = "data.npz"
        seed = {seed % 1000}
        {options}
        {kinds_of(specs, CLIENTS // len(specs))}"""
    )
    return folder / "fleet.toml"


def prepared(file: Path) -> tuple[Simulation, nn.Sequential]:
    simulation = prepare(load_simulation(file), RunFolder(file.parent / "other"))
    model = simulation.federation.module
    assert isinstance(model, nn.Sequential)
    return simulation, model


def device(simulation: Simulation, client: int, round_: int) -> Device:
    data = simulation.client_data(client)
    seed = (simulation.config.simulation.seed * 100003 + client) * 100003 + round_
    return Device(np.array(data.x), np.array(data.y), seed)


def load(model: nn.Module, state: State) -> nn.Module:
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=False)
    return model


def right(model: nn.Module, x: np.ndarray, y: np.ndarray) -> int:
    with torch.no_grad():
        output = model.eval()(torch.from_numpy(x))
    return int((output.argmax(1).numpy() == y).sum())


def loss(model: nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    with torch.no_grad():
        output = model.eval()(torch.from_numpy(x))
    return float(nn.functional.cross_entropy(output, torch.from_numpy(y)))


def run(file: Path) -> list[RoundResult]:
    return simulate(file, file.parent / "results")


def test_clients_that_train_alone(seed: int, tmp_path: Path) -> None:
    """The same clients each round, so that each continues its own model."""
    file = configured(tmp_path, seed, 'baseline = "local"')
    simulation, model = prepared(file)
    x, y = simulation.held_out
    own = [oracles.state_of(model) for _ in range(CLIENTS)]
    for result in run(file):
        losses, found = [], []
        for client in range(CLIENTS):
            load(model, own[client])
            own[client] = oracles.train_full(model, device(simulation, client, result.round), PLAN)
            losses.append(loss(load(model, own[client]), x, y))
            found.append(right(model, x, y) / len(y))
        assert result.loss == pytest.approx(np.mean(losses), rel=1e-3)
        assert result.accuracy == pytest.approx(np.mean(found), abs=1.5 / len(y) / CLIENTS)
        assert result.bytes_down == result.bytes_up == 0


def test_one_client_has_the_samples_of_all(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, seed, 'baseline = "centralised"', ("width:0.5", "slice:residual"))
    simulation, model = prepared(file)
    x, y = simulation.held_out
    for result in run(file):
        everything = device(simulation, 0, result.round)
        assert len(everything.y) == 120 - len(y)
        load(model, oracles.train_full(model, everything, PLAN))
        assert result.clients == 1
        assert result.loss == pytest.approx(loss(model, x, y), rel=1e-3)


def test_own_models_are_judged_on_samples_held_out(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, seed, f"validation = {SHARE}")
    simulation, model = prepared(file)
    first = oracles.state_of(model)
    correct = judged = 0
    for client in range(CLIENTS):
        whole = device(simulation, client, 1)
        kept = batching.held_out(len(whole.y), SHARE)
        rest = np.setdiff1d(np.arange(len(whole.y)), kept)
        trained = Device(whole.x[rest], whole.y[rest], whole.seed)
        state = oracles.train_full(load(model, first), trained, PLAN)
        correct += right(load(smooth_cnn(), state), whole.x[kept], whole.y[kept])
        judged += len(kept)
    came = run(file)[0].local_accuracy
    assert came == pytest.approx(correct / judged, abs=1.5 / judged)


def test_dynamic_capacities(seed: int, tmp_path: Path) -> None:
    file = configured(tmp_path, seed, 'capacities = "dynamic"', ("full", "slice:residual"))
    simulation, model = prepared(file)
    x, y = simulation.held_out
    for result in run(file):
        old, updates = oracles.state_of(model), []
        chosen = simulation.selection.clients(result.round)
        for client, spec in chosen:
            data = device(simulation, client, result.round)
            update = (
                oracles.train_full(model, data, PLAN)
                if spec == "full"
                else oracles.train_slice(model, "residual", data, PLAN)
            )
            updates.append((update, len(data.y)))
        load(model, oracles.mean(updates, old))
        assert result.loss == pytest.approx(loss(model, x, y), rel=1e-3)


def test_a_client_gets_every_capacity_as_often_as_there_are(seed: int) -> None:
    specs = ["full"] * 30 + ["width:0.5"] * 10
    drawn: dict[str, Counter[str]] = {}
    for kind in ("fixed", "dynamic"):
        table = SimulationTable(data="", participation=0.5, capacities=kind, seed=seed)
        config = SimulationConfig.model_construct(simulation=table)
        selection = ClientSelection(config, specs, [1] * len(specs))
        rounds = [selection.clients(round_) for round_ in range(1, 301)]
        assert all(len({client for client, _ in one}) == 20 for one in rounds)
        drawn[kind] = Counter(spec for one in rounds for client, spec in one if client == 35)
    assert list(drawn["fixed"]) == ["width:0.5"]
    # 150 draws with probability 3/4: a standard deviation of 3.5%, of which six are allowed.
    assert drawn["dynamic"]["full"] / drawn["dynamic"].total() == pytest.approx(0.75, abs=0.21)


def test_a_client_trains_every_submodel_up_to_its_own_as_often(seed: int, tmp_path: Path) -> None:
    """FjORD's draw, of submodels with 260, 366, 824 and 1,240 parameters, counted by hand."""
    specs = ("width:0.5", "full", "width:0.34", "slice:residual")
    file = configured(tmp_path, seed, 'capacities = "up-to-own"\nparticipation = 0.75', specs)
    simulation, _ = prepared(file)
    own = simulation.specs
    drawn: dict[str, Counter[str]] = {spec: Counter() for spec in specs}
    for round_ in range(1, 401):
        for client, spec in simulation.selection.clients(round_):
            drawn[own[client]][spec] += 1
    expected = {
        "width:0.34": ("width:0.34",),
        "width:0.5": ("width:0.34", "width:0.5"),
        "slice:residual": ("width:0.34", "width:0.5", "slice:residual"),
        "full": specs,
    }
    for spec, choices in expected.items():
        assert drawn[spec].keys() == set(choices)
        # 300 draws: a standard deviation of at most 2.9%, of which six are allowed.
        for times in drawn[spec].values():
            assert times / drawn[spec].total() == pytest.approx(1 / len(choices), abs=0.175)


def test_ordered_dropout(seed: int, tmp_path: Path) -> None:
    """A round in plain PyTorch, in which both widths train in blocks of the same tensors."""
    specs = ("full", "width:0.5")
    file = configured(tmp_path, seed, 'capacities = "up-to-own"', specs)
    simulation, model = prepared(file)
    x, y = simulation.held_out
    for result in run(file):
        old, updates = oracles.state_of(model), []
        for client, spec in simulation.selection.clients(result.round):
            data = device(simulation, client, result.round)
            small = smooth_cnn(3, 4, 4, 6) if spec == "width:0.5" else smooth_cnn()
            updates.append((oracles.train_leading(model, small, data, PLAN), len(data.y)))
        load(model, oracles.mean_of_blocks(updates, old))
        assert result.loss == pytest.approx(loss(model, x, y), rel=1e-3)
