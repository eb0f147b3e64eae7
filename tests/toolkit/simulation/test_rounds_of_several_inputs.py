"""Rounds of a model with several inputs, simulated and by real agents, against plain PyTorch."""

import threading
from pathlib import Path

import numpy as np
import safetensors.torch
from torch import Tensor, nn

import oracles
from device_agent.federation import round_loop
from device_agent.federation.membership import join
from device_agent.federation.run_options import RunOptions
from oracles import Device, Plan
from toolkit.coordinator.federation_config import load_config
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


def plain_rounds(model: nn.Module, rounds: list[list[Device]]) -> dict[str, Tensor]:
    unpacked = Unpacked(model)
    for devices in rounds:
        old = oracles.state_of(unpacked)
        updates = [(oracles.train_full(unpacked, d, PLAN), len(d.y)) for d in devices]
        unpacked.load_state_dict(oracles.mean(updates, old), strict=False)
    return {n.removeprefix("model."): v for n, v in oracles.state_of(unpacked).items()}


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
        {n: v.numpy() for n, v in came.items()}, plain_rounds(model, rounds), first
    )


def test_agents_train_and_judge_it(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    ratings(tmp_path, "held_out.npz", 9, draw)
    (tmp_path / "fleet.toml").write_text(f"port = 0\n{COMMON}{KIND}")
    config = load_config(tmp_path / "fleet.toml")
    agents = federation(config)
    first = {n: v.clone() for n, v in agents.model.tensors.items()}
    with running(config, agents) as server:
        threads = []
        for name in ("a", "b"):
            ratings(tmp_path, f"{name}.npz", 20, draw)
            join(server.url, token(config, "phone"), name, tmp_path / name)
            options = RunOptions(data=str(tmp_path / f"{name}.npz"), state=tmp_path / name)
            threads.append(threading.Thread(target=round_loop.run, args=(options,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [saved.round for saved in saved_rounds(config.state)] == [0, 1, 2]
    assert any((agents.model.tensors[n] - v).abs().max() > 1e-3 for n, v in first.items())
