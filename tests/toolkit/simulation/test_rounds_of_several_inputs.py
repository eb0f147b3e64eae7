"""Rounds of a model with several inputs, simulated and by real agents, against plain PyTorch."""

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import oracles
from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from device_agent.training.batching import held_out, round_seed
from device_agent.training.training_options import TrainingOptions
from log_messages import logged
from oracles import Device, Plan
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from toolkit.simulation.results import RunFolder
from toolkit.simulation.simulate import prepare, simulate
from toolkit.simulation.simulation_config import load_simulation
from vector_fleet import running, token

PLAN = Plan(batch_size=8, epochs=1, rate=0.2, momentum=0.9, weight_decay=0.0)
USERS, ITEMS, ROUNDS, CLIENTS = 30, 50, 2, 2
COMMON = f"""
model = "models_for_tests:two_towers"
inputs = ["user:int64", "item:int64", "numbers:2"]
rounds = {ROUNDS}
held_out = "held_out.npz"
[training]
batch_size = {PLAN.batch_size}
learning_rate = {PLAN.rate}
[aggregation]
bounds = false
judge = false
"""
KIND = '[[devices]]\nname = "phone"\nsubmodel = "full"\ncount = 2\n'


def ratings(folder: Path, name: str, samples: int, draw: np.random.Generator) -> None:
    np.savez(
        folder / name,
        x_user=draw.integers(USERS, size=samples),
        x_item=draw.integers(ITEMS, size=samples),
        x_numbers=draw.normal(size=(samples, 2)).astype(np.float32),
        y=draw.integers(3, size=samples),
    )


class Unpacked(nn.Module):
    """The model itself, called with the columns of a packed sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x[:, 0].long(), x[:, 1].long(), x[:, 2:])
        assert isinstance(output, Tensor)
        return output


def plain_rounds(model: nn.Module, rounds: list[list[Device]]) -> list[dict[str, Tensor]]:
    """The state of the model before the first round and after each."""
    unpacked = Unpacked(model)
    states = [oracles.state_of(unpacked)]
    for devices in rounds:
        old = oracles.state_of(unpacked)
        updates = [(oracles.train_full(unpacked, d, PLAN), len(d.y)) for d in devices]
        states.append(oracles.mean(updates, old))
        unpacked.load_state_dict(states[-1], strict=False)
    return [{n.removeprefix("model."): v for n, v in own.items()} for own in states]


def judged(
    model: nn.Module, state: dict[str, Tensor], x: np.ndarray, y: np.ndarray
) -> dict[str, float]:
    """What devices report of a model with this state."""
    model.load_state_dict(state)
    with torch.no_grad():
        output = Unpacked(model.double())(torch.from_numpy(x).double())
    labels = torch.from_numpy(y)
    right = (output.argmax(1) == labels).double().mean()
    return {"accuracy": float(right), "loss": float(oracles.cross_entropy(output, labels))}


def packed(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(file) as own:
        columns = [own["x_user"], own["x_item"], own["x_numbers"]]
        return np.column_stack(columns).astype(np.float32), own["y"]


def test_simulated_rounds_equal_a_plain_loop(seed: int, tmp_path: Path) -> None:
    from models_for_tests import two_towers

    draw = np.random.default_rng(seed)
    ratings(tmp_path, "data.npz", 60, draw)
    ratings(tmp_path, "held_out.npz", 9, draw)
    text = f'{COMMON}[simulation]\ndata = "data.npz"\nseed = {seed % 1000}\n{KIND}'
    (tmp_path / "fleet.toml").write_text(text)
    config = load_simulation(tmp_path / "fleet.toml")
    prepared = prepare(config, RunFolder(tmp_path / "prepared"))
    first = {n: v.clone() for n, v in prepared.federation.model.tensors.items()}
    number = config.simulation.seed
    rounds = [
        [
            Device(
                prepared.samples.x[prepared.parts[client]],
                prepared.samples.y[prepared.parts[client]],
                (number * 100003 + client) * 100003 + round_,
            )
            for client in range(CLIENTS)
        ]
        for round_ in range(1, ROUNDS + 1)
    ]
    history = simulate(tmp_path / "fleet.toml", tmp_path / "results")
    assert history[-1].accuracy is not None
    came = safetensors.torch.load_file(tmp_path / "results" / "global.safetensors")
    model = two_towers()
    model.load_state_dict(first)
    oracles.assert_trained(
        {n: v.numpy() for n, v in came.items()}, plain_rounds(model, rounds)[-1], first
    )


def test_agents_train_and_judge_it(seed: int, tmp_path: Path) -> None:
    from models_for_tests import two_towers

    draw, share = np.random.default_rng(seed), 0.2
    ratings(tmp_path, "held_out.npz", 9, draw)
    text = f"port = 0\n{COMMON}[evaluation]\nshare = {share}\n{KIND}"
    (tmp_path / "fleet.toml").write_text(text)
    config = load_config(tmp_path / "fleet.toml")
    agents = federation(config)
    first = {n: v.clone() for n, v in agents.model.tensors.items()}
    sizes, seeds = {"a": 20, "b": 30}, {"a": 7, "b": seed % 1000}
    # The pool is the outer one: when the coordinator has stopped, agents give up soon.
    with ThreadPoolExecutor(CLIENTS) as pool, running(config, agents) as server:
        runs = []
        for name, samples in sizes.items():
            ratings(tmp_path, f"{name}.npz", samples, draw)
            with logged() as messages:
                join(server.url, token(config, "phone"), name, tmp_path / name)
            given = "DATA: an .npz file with the arrays x_user, x_item, x_numbers, y."
            assert given in messages
            options = RunOptions(
                data=str(tmp_path / f"{name}.npz"),
                state=tmp_path / name,
                training=TrainingOptions(seed=seeds[name], threads=1),
            )
            runs.append(pool.submit(round_loop.run, options, patience_s=20))
        done, unfinished = wait(runs, timeout=120, return_when=FIRST_EXCEPTION)
        accepted = [own.result() for own in done]
    assert not unfinished
    assert accepted == [ROUNDS, ROUNDS]
    saved = saved_rounds(config.state)
    assert [own.round for own in saved] == [0, 1, 2]

    data = {name: packed(tmp_path / f"{name}.npz") for name in sizes}
    judges = {name: held_out(samples, share) for name, samples in sizes.items()}
    rounds = [
        [
            Device(*(np.delete(own, judges[name], 0) for own in arrays), round_seed(seeds[name], n))
            for name, arrays in data.items()
        ]
        for n in range(1, ROUNDS + 1)
    ]
    model = two_towers()
    model.load_state_dict(first)
    states = plain_rounds(model, rounds)
    came = {n: v.numpy() for n, v in agents.model.tensors.items()}
    oracles.assert_trained(came, states[-1], first)
    for x, y, figures in (
        (*packed(tmp_path / "held_out.npz"), saved),
        (
            *(np.concatenate([data[n][i][judges[n]] for n in sizes]) for i in range(2)),
            [own.devices for own in saved],
        ),
    ):
        for state, own in zip(states, figures, strict=True):
            assert own is not None
            expected = judged(model, state, x, y)
            assert own.accuracy == expected["accuracy"]
            assert own.loss == pytest.approx(expected["loss"], rel=1e-4)
