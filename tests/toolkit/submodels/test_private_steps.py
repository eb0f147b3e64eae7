"""DP-SGD by the agent: each step against a loop over samples in float64."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import open_bundle
from device_agent.privacy.gaussian_noise import gaussian
from device_agent.privacy.sample_gradients import poisson_batch
from device_agent.runtime.litert_runtime import LitertSession
from device_agent.training.bundle_training import local_data
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig, split
from exporters.export import Format, export
from exporters.recording.shared_tensors import twin_of
from parameters import half_quick
from private_oracle import private_steps
from refusals import refused
from toolkit.simulation.torch_executor import TorchExecutor
from toolkit.submodels.global_model import from_model

SAMPLES, BATCH, CLASSES, CLIP, NOISE = 6, 4, 3, 0.5, 1.3
CONFIG = TrainingConfig(batch_size=BATCH, learning_rate=0.1, sample_clip=CLIP, sample_noise=NOISE)
Samples = tuple[np.ndarray, np.ndarray]


class Recurrent(nn.Module):
    """Ids of words through an embedding and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(11, 4), nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.gru(self.words(x))[0][:, -1]))


class Attention(nn.Module):
    """A layer of a transformer over steps of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            6, 2, 8, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layer(x).mean(1)))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def convolutions(norm: Callable[[], nn.Module] = lambda: nn.GroupNorm(2, 4)) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm(), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(4 * 9, CLASSES),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (7,)),
    "convolutions": (convolutions, (2, 6, 6)),
    "recurrent": (Recurrent, (5,)),
    "attention": (Attention, (4, 6)),
}


def data_of(shape: tuple[int, ...], ids: bool, samples: int = SAMPLES) -> Samples:
    draw = np.random.default_rng(torch.randint(2**31, ()).item())
    x = draw.integers(11, size=(samples, *shape)) if ids else draw.normal(size=(samples, *shape))
    return x.astype(np.int64 if ids else np.float32), draw.integers(CLASSES, size=samples)


def trained_by_agent(
    model: nn.Module, spec: str, config: TrainingConfig, data: Samples, folder: Path,
    noise_seed: int | list[int], format: Format = "onnx",
) -> dict[str, np.ndarray]:  # fmt: skip
    """The uploaded tensors after the schedule, with batches and noise from `noise_seed`."""
    submodel = split(model, spec, data[0].shape[1:], config)
    values = submodel.cut(from_model(model))
    export(submodel.program, values, folder / "bundle", base="", check=False, format=format)
    bundle = open_bundle(folder / "bundle")
    run = ScheduleRun(
        bundle, local_data(bundle, data), folder, TrainingOptions(threads=1), {},
        random_bytes=np.random.default_rng(noise_seed).bytes,
    )  # fmt: skip
    run.run_schedule()
    return {e.name: run.state[e.name] for e in bundle.manifest.tensors if e.role == "parameter"}


def drawn(
    model: nn.Module, noise_seed: int, batches: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """What the agent draws in each batch: the samples, then noise by name of the parameter."""
    stream = np.random.default_rng(noise_seed).bytes
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    for _ in range(batches):
        indices = poisson_batch(SAMPLES, BATCH / SAMPLES, stream)
        noise = {n: gaussian((int(np.prod(shapes[n])),), stream) for n in sorted(shapes)}
        yield indices, {n: value.reshape(shapes[n]) for n, value in noise.items()}


def check_steps(
    model: nn.Module, data: Samples, folder: Path, seed: int, config: TrainingConfig = CONFIG,
    format: Format = "onnx",
) -> None:  # fmt: skip
    """Train two batches by agent and by loop, and compare the changes of all parameters."""
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if config.optimizer == "adam":
        optimizer = functools.partial(torch.optim.Adam, lr=0.1)
    before = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    after = trained_by_agent(model, "full", config, data, folder, seed, format)

    def by_loop(nudge: float) -> dict[str, np.ndarray]:
        own = twin_of(model).double()
        with torch.no_grad():
            for value in own.parameters():
                value *= 1 + nudge * torch.randn_like(value)
        return private_steps(
            own, data, nn.functional.cross_entropy, optimizer,  # type: ignore[arg-type]
            list(drawn(model, seed, 2)), CLIP, CLIP * NOISE, BATCH,
        )  # fmt: skip

    right, nudged = by_loop(0.0), by_loop(2**-24)
    for name, expected in right.items():
        change, actual = expected - before[name], after[name] - before[name]
        rounding = 2**-24 * np.linalg.norm(before[name])
        error = np.linalg.norm(actual - change)
        # Adam divides by the gradient's size, so rounding counts where the gradient is almost 0.
        moved = np.linalg.norm(nudged[name] - expected)
        assert error <= 1e-5 * np.linalg.norm(change) + 4 * rounding + 4 * moved, name


@pytest.mark.parametrize("name", half_quick(MODELS))
def test_steps_equal_a_loop_over_samples(name: str, tmp_path: Path, seed: int) -> None:
    make, shape = MODELS[name]
    check_steps(make(), data_of(shape, name == "recurrent"), tmp_path, seed)


def test_steps_in_litert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A session computes one gradient only, because a graph could keep values between runs."""
    pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    run = LitertSession.run

    def once(session: LitertSession, *given: Any) -> dict[str, np.ndarray]:
        if any(name.startswith("gradient:") for name in session.outputs):
            assert not session._ran
        return run(session, *given)

    monkeypatch.setattr(LitertSession, "run", once)
    check_steps(convolutions(), data_of((2, 6, 6), ids=False), tmp_path, seed, format="tflite")


def test_batch_norms_use_the_received_statistics(tmp_path: Path, seed: int) -> None:
    model = convolutions(lambda: nn.BatchNorm2d(4))
    with torch.no_grad():
        model(3 * torch.randn(9, 2, 6, 6) + 1)
    (norm,) = (part for part in model if isinstance(part, nn.BatchNorm2d))
    norm.eval()  # the oracle's normalises by its statistics
    config = dataclasses.replace(CONFIG, batch_norm="static", optimizer="adam")
    check_steps(model, data_of((2, 6, 6), ids=False), tmp_path, seed, config)


@pytest.mark.parametrize("spec", half_quick(["low-rank:0.5,keep=0,decay=0.1", "width:0.5"]))
def test_without_clipping_a_step_is_the_usual_one_and_noise(
    spec: str, tmp_path: Path, seed: int
) -> None:
    model, data = convolutions(), data_of((2, 6, 6), ids=False, samples=BATCH)
    usual = TrainingConfig(batch_size=BATCH, learning_rate=0.1, momentum=0.0, weight_decay=0.01)
    private = dataclasses.replace(usual, sample_clip=1e6, sample_noise=1e-6)
    plain = trained_by_agent(model, spec, usual, data, tmp_path / "usual", seed)
    noised = trained_by_agent(model, spec, private, data, tmp_path / "private", seed)
    stream = np.random.default_rng(seed).bytes
    poisson_batch(BATCH, 1.0, stream)
    for name in sorted(plain):
        noise = gaussian((plain[name].size,), stream).reshape(plain[name].shape)
        np.testing.assert_allclose(noised[name] - plain[name], -0.1 / BATCH * noise, atol=2e-6)


def test_a_simulation_trains_as_the_agent(tmp_path: Path, seed: int) -> None:
    model, data = perceptron(), data_of((7,), ids=False)
    config = dataclasses.replace(CONFIG, epochs=2)
    noise_seed = [seed, 2]
    agent = trained_by_agent(model, "full", config, data, tmp_path, noise_seed)
    executor = TorchExecutor(split(model, "full", (7,), config))
    bundle = executor.bundle(from_model(model), 1.0, 1)
    simulated = executor.train(bundle, LocalData(*data), seed, {}, 0.0)
    assert simulated.record.steps == 4
    for name, value in agent.items():
        np.testing.assert_allclose(simulated.tensors[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["slice:0.5", "cp:2.0", "pfedme"])
def test_families_of_several_stages_are_refused(spec: str) -> None:
    with refused("spec.not-private"):
        split(convolutions(), spec, (2, 6, 6), CONFIG)


@pytest.mark.parametrize(
    ("norm", "batch_norm"),
    [
        (lambda: nn.BatchNorm2d(4), "global"),
        (lambda: nn.BatchNorm2d(4, track_running_stats=False), "static"),
    ],
)
def test_norms_across_samples_are_refused(norm: Callable[[], nn.Module], batch_norm: str) -> None:
    config = dataclasses.replace(CONFIG, batch_norm=batch_norm)  # type: ignore[arg-type]
    with refused("privacy.mixed-samples"):
        split(convolutions(norm), "full", (2, 6, 6), config)


@pytest.mark.parametrize(
    "change",
    [
        {"sample_noise": None},
        {"masked": True},
        {"loss": "contrastive"},
        {"loss": "a=mse + b=cross-entropy,weights=1/2/1"},
    ],
)
def test_settings_that_do_not_go_together(change: dict[str, Any]) -> None:
    with refused("option.conflict"):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    "change", [{"sample_clip": 0.0}, {"sample_noise": -1}, {"sample_delta": 1}]
)
def test_values_that_are_not_allowed(change: dict[str, Any]) -> None:
    with refused("option.invalid-value"):
        dataclasses.replace(CONFIG, **change)
