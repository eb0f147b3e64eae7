"""Models that take some numbers of a sample as ids: the user gives the range of the samples."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from device_agent.formats.bundle import open_bundle
from device_agent.training.random_run import synthetic
from edgetailor import TrainingConfig, evaluate, export, inspect, set_input_range, split
from one_step import RATE, SAMPLES, check_training
from parameters import half_quick, needs_litert, quarter_quick, some_long, some_quick
from refusals import refused
from toolkit.simulation.torch_executor import TorchSession
from toolkit.submodels.global_model import from_model
from trainings import train_bundle


class Columns(nn.Module):
    """A table with categories in its first columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.hidden, self.last = (
            nn.Embedding(5, 4),
            nn.Linear(14, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        codes = self.embedded(x[:, :3].long()).flatten(1)
        return self.last(torch.tanh(self.hidden(torch.cat([codes, x[:, 3:]], 1))))


class OneHot(nn.Module):
    """A table whose first column becomes one input for each category."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        kinds = functional.one_hot(x[:, 0].long(), 5).float()
        return self.last(torch.tanh(self.hidden(torch.cat([kinds, x[:, 1:]], 1))))


class Lookup(nn.Module):
    """A table of rates, looked up by the range that a value is in, and the value's logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.edges, self.rates = (
            nn.Buffer(torch.tensor([1.0, 2.0, 3.0])),
            nn.Parameter(torch.randn(4, 4)),
        )
        self.hidden, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rates = self.rates[torch.bucketize(x[:, 0].contiguous(), self.edges)]
        return self.last(torch.tanh(self.hidden(torch.cat([rates, x[:, 1:].log()], 1))))


class Hours(nn.Module):
    """A series with hours and weekdays beside what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.hour, self.weekday = nn.Embedding(24, 3), nn.Embedding(7, 2)
        self.rnn, self.last = nn.GRU(7, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hour, weekday = self.hour(x[..., 2].int()), self.weekday(x[..., 3].int())
        states, _ = self.rnn(torch.cat([x[..., :2], hour, weekday], -1))
        return self.last(states[:, -1])


class Recommender(nn.Module):
    """Users and items by number, in one array of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.last = (
            nn.Embedding(30, 4),
            nn.Embedding(50, 4),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        user, item = x.to(torch.int64).unbind(1)
        return self.last(torch.cat([self.users(user), self.items(item)], 1))


def columns(draw: np.random.Generator, samples: int) -> np.ndarray:
    ids, numbers = draw.integers(5, size=(samples, 3)), draw.normal(size=(samples, 2))
    return np.concatenate([ids, numbers], 1)


def one_hot(draw: np.random.Generator, samples: int) -> np.ndarray:
    return np.concatenate([draw.integers(5, size=(samples, 1)), draw.normal(size=(samples, 4))], 1)


def values(draw: np.random.Generator, samples: int) -> np.ndarray:
    return draw.uniform(0.5, 4.0, (samples, 2))


def hours(draw: np.random.Generator, samples: int) -> np.ndarray:
    ids = [draw.integers(n, size=(samples, 6, 1)) for n in (24, 7)]
    return np.concatenate([draw.normal(size=(samples, 6, 2)), *ids], 2)


def pairs(draw: np.random.Generator, samples: int) -> np.ndarray:
    return np.stack([draw.integers(30, size=samples), draw.integers(50, size=samples)], 1)


Draw = Callable[[np.random.Generator, int], np.ndarray]
TABLES: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "columns": (Columns, columns),
    "one-hot": (OneHot, one_hot),
    "lookup": (Lookup, values),
    "hours": (Hours, hours),
    "recommender": (Recommender, pairs),
}
QUICK = [("columns", "tflite"), ("one-hot", "onnx"), ("recommender", "onnx")]
ROWS = [(name, format) for name in TABLES for format in ("onnx", "tflite")]


@pytest.mark.parametrize(("name", "format"), quarter_quick(some_quick(ROWS, *QUICK)))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    needs_litert(format)
    build, drawn = TABLES[name]
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    x, y = drawn(draw, SAMPLES).astype(np.float32), draw.integers(3, size=SAMPLES)
    model = set_input_range(build(), examples=drawn(draw, 100))
    right = copy.deepcopy(model).double()
    before = {n: p.detach().clone() for n, p in right.named_parameters()}
    functional.cross_entropy(right(torch.from_numpy(x).double()), torch.from_numpy(y)).backward()

    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, learning_rate=RATE)
    bundle, data = tmp_path / "bundle", tmp_path / "data.npz"
    export(split(model, "full", x.shape[1:], config), from_model(model), bundle, format=format)
    np.savez(data, x=x, y=y)
    check_training(tmp_path, right, before)

    # What a device profiles and compares its runtimes with are such samples too.
    random = synthetic(open_bundle(bundle), 50).x
    with torch.no_grad():
        assert model(torch.from_numpy(random)).isfinite().all()


SPECS = ("low-rank:0.5,keep=0", "width:0.5", "cp:2.0", "pfedme", "slice:hidden", "slice:last")


@pytest.mark.parametrize("spec", half_quick(some_long(SPECS, *SPECS[:1], *SPECS[2:5])))
def test_every_family_takes_the_range(spec: str, tmp_path: Path) -> None:
    model = set_input_range(Columns(), examples=columns(np.random.default_rng(0), 50))
    bundle = export(split(model, spec, (5,)), from_model(model), tmp_path / "bundle")
    assert bundle.verdict is not None
    assert bundle.verdict.passed


@pytest.mark.parametrize(
    "name", half_quick(some_long(["columns", "one-hot", "hours", "recommender"], "hours"))
)
def test_a_model_with_ids_is_refused_without_a_range(name: str) -> None:
    build, drawn = TABLES[name]
    shape = drawn(np.random.default_rng(0), 2).shape[1:]
    with refused("model.ids-out-of-range", "test_tables.py, line"):
        inspect(build(), shape, ["full"], 8)
    # The remedy works.
    inspect(set_input_range(build(), 0, 4), shape, ["full"], 8)


def test_luck_does_not_decide() -> None:
    # Most standard normal numbers become the id 0.
    class Lucky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table((x[:, 0] / 10 + 4).long()))

    with refused("model.ids-out-of-range"):
        inspect(Lucky(), (1,), ["full"], 8)
    with refused("model.ids-out-of-range", "The range that you gave"):
        inspect(set_input_range(Lucky(), -200, 200), (1,), ["full"], 8)
    # The remedy works: with these samples, the ids are 0 to 8.
    inspect(set_input_range(Lucky(), -40.0, 40.0), (1,), ["full"], 8)


@pytest.mark.parametrize(("low", "high"), [(0, 1000), (-1, 999)])
def test_both_ends_of_a_range_are_tried(low: int, high: int) -> None:
    """Few random samples hold one of them."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(1000, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.table(x[:, 0].long()))

    inspect(set_input_range(Large(), 0, 999), (1,), ["full"], 8)
    with refused("model.ids-out-of-range", "The range that you gave"):
        inspect(set_input_range(Large(), low, high), (1,), ["full"], 8)


def test_ids_that_the_model_clamps_need_no_range() -> None:
    class Clamped(Columns):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x[:, :3].clamp(0, 4), x[:, 3:]], 1))

    [sizes] = inspect(Clamped(), (5,), ["full"], 8)
    assert sizes.params


def test_a_range_must_fit_the_model() -> None:
    tokens = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    with refused("config.range-misfit"):
        inspect(set_input_range(tokens, 0.0, 4.0), (3,), ["full"], 8)
    with refused("model.ids-out-of-range"):
        inspect(set_input_range(tokens, 0, 9), (3,), ["full"], 8)
    with refused("config.range-misfit", shape=[5]):
        rows = np.random.default_rng(0).normal(size=(9, 4))
        inspect(set_input_range(Columns(), examples=rows), (5,), ["full"], 8)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_real_samples_with_an_unknown_id_are_refused(wrong: int) -> None:
    x = columns(np.random.default_rng(0), 6).astype(np.float32)
    model = set_input_range(Columns(), examples=x)
    submodel = split(model, "full", (5,))
    train = next(own for own in submodel.program.signatures if own.name == "train")
    weights = from_model(model).tensors
    x[4, 1] = wrong
    y = np.zeros(6, np.int64)
    with refused("data.unknown-ids"):
        evaluate(model, x, y)
    feeds = {"x": x, "y": y, "rate": np.array(0.1, np.float32)}
    state = {
        port.name: weights[port.state].numpy()
        if port.state in weights
        else np.zeros(port.shape, np.float32)  # type: ignore[arg-type]
        for port in train.inputs
        if port.state is not None
    }
    with refused("data.unknown-ids"):
        TorchSession(train).run({**feeds, **state})


@pytest.mark.parametrize("format", half_quick(["onnx", "tflite"]))
def test_a_device_refuses_samples_with_an_unknown_id(format: str, tmp_path: Path) -> None:
    needs_litert(format)
    x, y = columns(np.random.default_rng(0), SAMPLES).astype(np.float32), np.zeros(SAMPLES, int)
    model = set_input_range(Columns(), examples=x)
    config = TrainingConfig(batch_size=SAMPLES)
    bundle, data = tmp_path / "bundle", tmp_path / "data.npz"
    export(split(model, "full", (5,), config), from_model(model), bundle, format=format)
    for wrong in (-1, 5, -5):  # a runtime may count negative ids from the end of the table
        bad = x.copy()
        bad[4, 1] = wrong
        np.savez(data, x=bad, y=y)
        with refused("data.unknown-ids"):
            train_bundle(bundle, data, tmp_path / "update")
        assert not (tmp_path / "update").exists()
    np.savez(data, x=x, y=y)
    train_bundle(bundle, data, tmp_path / "update")


def test_noise_does_not_change_ids() -> None:
    model = set_input_range(Columns(), examples=columns(np.random.default_rng(0), 50))
    with refused("config.augmentation-misfit"):
        split(model, "full", (5,), TrainingConfig(augment=("noise:0.1",)))
