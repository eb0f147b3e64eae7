"""Secure sums with differential privacy: real agents clip and add the noise, over HTTP."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load, load_file

from device_agent.federation import membership, round_loop
from device_agent.federation.run_options import RunOptions
from device_agent.formats.manifest import MANIFEST, WEIGHTS, Manifest, TensorEntry, uploaded
from device_agent.formats.update import write_update
from device_agent.training.batching import ROUND_SEEDS
from device_agent.training.training_options import TrainingOptions
from hostile_fleet import samples
from models_for_tests import INPUT_SHAPE
from toolkit.aggregation.privacy.budget import PrivacyBudget, Sampled
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.federation_file.load_config import load_config
from toolkit.coordinator.federation_setup import federation
from toolkit.coordinator.storage.saved_rounds import model_file
from vector_fleet import record_for, running, token

CLIP, DELTA, ROUNDS = 0.5, 0.01, 2
KINDS = {"wide": "full", "narrow": "width:0.5", "factors": "low-rank:0.5,keep=0"}
DEVICES = [f"{kind}-{n}" for kind in KINDS for n in range(3)]
FLEET = f"""
model = "models_for_tests:smooth_cnn"
input_shape = {list(INPUT_SHAPE)}
rounds = {ROUNDS}
held_out = "held_out.npz"
port = 0
deadline_s = 60

[training]
batch_norm = "static"

[privacy]
secure_aggregation = true
smallest_group = 3
clip = {CLIP}
delta = {DELTA}
noise_multiplier = {{noise}}

[[devices]]
name = "wide"
submodel = "{KINDS["wide"]}"
count = 3

[[devices]]
name = "narrow"
submodel = "{KINDS["narrow"]}"
count = 3

[[devices]]
name = "factors"
submodel = "{KINDS["factors"]}"
count = 3
"""
Arrays = dict[str, np.ndarray]


def fleet(folder: Path, noise: float) -> CoordinatorConfig:
    x, y = samples(64, 0)
    np.savez(folder / "held_out.npz", x=x, y=y)
    (folder / "fleet.toml").write_text(FLEET.format(noise=noise))
    return load_config(folder / "fleet.toml")


def change_of(name: str, round_: int, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """What the training of a device adds to a tensor. Some changes are within the clip."""
    size = 0.001 if name.endswith("0") else 0.1
    draw = np.random.default_rng([*name.encode(), round_, *tensor.encode()])
    return (size * draw.standard_normal(shape)).astype(np.float32)


def trains(name: str, seen: dict[tuple[str, int], tuple[Arrays, Manifest]]) -> Callable[..., Any]:
    def train(
        folder: Path, data: str, out: Path, *, options: TrainingOptions, on_epoch: Any, **more: Any
    ) -> object:
        round_ = options.seed % ROUND_SEEDS
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        received = load_file(folder / WEIGHTS)
        seen[name, round_] = received, manifest
        table = uploaded(manifest.tensors)
        tensors = {
            e.name: received[e.name] + change_of(name, round_, e.name, e.shape) for e in table
        }
        return write_update(out, replace(record_for(manifest, folder), tensors=table), tensors)

    return train


def run(folder: Path, noise: float) -> tuple[CoordinatorConfig, Any, dict[Any, Any], list[str]]:
    config, seen = fleet(folder, noise), dict[tuple[str, int], tuple[Arrays, Manifest]]()
    said: list[str] = []
    with running(config, federation(config), said.append) as server:
        threads = []
        for name in DEVICES:
            state = folder / name
            membership.join(server.url, token(config, name.split("-")[0]), name, state)
            options = RunOptions(data=str(config.held_out), state=state)
            more = {"train": trains(name, seen), "sleep": lambda seconds: time.sleep(0.02)}
            thread = threading.Thread(target=round_loop.run, args=(options,), kwargs=more)
            threads.append(thread)
            thread.start()
        for thread in threads:
            thread.join(90)
        status = server.coordinator.status()
    return config, status, seen, said


def composed(tensors: Arrays, table: tuple[TensorEntry, ...]) -> Arrays:
    """The tensors of an update by the names of the global model, float64."""
    whole = {e.stands_for or "": tensors[e.name].astype(float) for e in table if e.factor is None}
    sides = {(e.stands_for or "", e.factor): tensors[e.name].astype(float) for e in table}
    for (name, side), u in sides.items():
        if side == "u":
            v = sides[name, "v"]
            whole[name] = v @ u if u.ndim == 2 else np.einsum("rmha,nrbw->nmhw", u, v)
    return whole


def expected_model(
    seen: dict[Any, Any], round_: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[Arrays, Arrays]:
    """Numpy's own: the mean of what devices received with their clipped changes; the holders."""
    total = {name: np.zeros(shape) for name, shape in shapes.items()}
    holders = {name: np.zeros(shape) for name, shape in shapes.items()}
    for device in DEVICES:
        received, manifest = seen[device, round_]
        table = uploaded(manifest.tensors)
        moved = {e.name: change_of(device, round_, e.name, e.shape) for e in table}
        after = composed({e.name: received[e.name] + moved[e.name] for e in table}, table)
        before = composed(received, table)
        parts = {name: after[name] - before[name] for name in after}
        norm = np.sqrt(sum(np.square(part).sum() for part in parts.values()))
        for name, part in parts.items():
            # A width of one half has the first channels of each axis.
            place = tuple(slice(0, n) for n in part.shape)
            total[name][place] += before[name] + part * min(1.0, CLIP / norm)
            holders[name][place] += 1
    mean = {name: total[name] / np.maximum(holders[name], 1) for name in shapes}
    return {n: v for n, v in mean.items() if holders[n].any()}, holders


def model_after(config: CoordinatorConfig, round_: int) -> Arrays:
    tensors = load(model_file(config.state, round_).read_bytes())
    return {n: v.astype(float) for n, v in tensors.items() if v.dtype == np.float32}


def test_almost_without_noise_the_model_moves_by_the_mean_clipped_change(tmp_path: Path) -> None:
    config, status, seen, said = run(tmp_path, 1e-6)
    for round_ in range(1, ROUNDS + 1):
        old, found = (model_after(config, n) for n in (round_ - 1, round_))
        mean, _ = expected_model(seen, round_, {n: v.shape for n, v in found.items()})
        for name, value in mean.items():
            assert np.abs(value - old[name]).max() > 0.001
            np.testing.assert_allclose(found[name], value, atol=4e-6, err_msg=name)
    assert [result.updates for result in status.history] == [0, 9, 9]
    assert "Round 1: secure sum of full: 3 devices." in said
    assert all(device.loss is None for device in status.devices)


def test_the_devices_add_the_noise_and_the_budget_is_counted(tmp_path: Path) -> None:
    noise = 0.7
    config, status, seen, _ = run(tmp_path, noise)
    found = model_after(config, 1)
    mean, holders = expected_model(seen, 1, {name: v.shape for name, v in found.items()})
    left = []
    for name in mean:
        groups = holders[name] / 3
        # Each device of a group of three adds half of the noise that the sum needs.
        deviation = noise * CLIP * np.sqrt(groups * 3 / 2)
        rest = (found[name] - mean[name])[holders[name] > 0] * holders[name][holders[name] > 0]
        left.append(rest / deviation[holders[name] > 0])
    numbers = np.concatenate(left)
    assert abs(numbers.std() - 1) < 6 / np.sqrt(2 * numbers.size)
    spent = [result.privacy.epsilon for result in status.history[1:]]
    budget = PrivacyBudget(DELTA)
    assert spent == pytest.approx([budget.spent([Sampled(1.0, noise)] * n) for n in (1, 2)])
