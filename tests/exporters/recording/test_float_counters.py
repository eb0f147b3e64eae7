"""Integer buffers that a model changes are kept, trained with and sent as float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgetailor import TrainingConfig, export, read_update, split
from exporters.recording.float_counters import with_float_counters
from toolkit.submodels.global_model import from_file, from_model
from trainings import train_bundle

STEPS, BATCH = 3, 8


class Warm(nn.Module):
    """Its output depends on the number of steps so far."""

    def __init__(self, way: str = "add", dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.layer, self.norm, self.way = nn.Linear(4, 3), nn.BatchNorm1d(4), way
        self.register_buffer("steps", torch.tensor([5], dtype=dtype))
        self.register_buffer("order", torch.tensor([1, 0, 3, 2]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.way == "add":
            self.steps += 1
        elif self.training and self.way == "method":
            self.steps.add_(1)
        elif self.training and self.way == "assign":
            self.steps = self.steps + 1
        elif self.training and self.way == "element":
            self.steps[0] += 1
        elif self.training and self.way == "data":
            self.steps.data += 1
        share = (self.steps / 10).clamp(max=1)
        y: Tensor = self.layer(self.norm(x)[:, self.order]) * share
        return y


@pytest.mark.parametrize("way", ["add", "method", "assign", "element", "data"])
def test_a_count_is_trained_and_sent(way: str, seed: int, tmp_path: Path) -> None:
    x = np.random.default_rng(seed).standard_normal((STEPS * BATCH, 4), dtype=np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(STEPS * BATCH) % 3)
    torch.manual_seed(seed)
    model = with_float_counters(Warm(way))
    submodel = split(model, "full", (4,), TrainingConfig(batch_size=BATCH))
    export(submodel, from_model(model), tmp_path / "bundle")  # compares a step with PyTorch's
    train_bundle(tmp_path / "bundle", str(tmp_path / "data.npz"), tmp_path / "update", threads=1)
    _, tensors = read_update(tmp_path / "update")
    np.testing.assert_array_equal(tensors["steps"], [5.0 + STEPS])


def test_what_is_only_set_stays_an_index() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor([1, 0]))
            self.inner = Warm()

        def choose(self, ids: Tensor) -> None:
            self.steps = ids
            self.steps.copy_(ids)
            self.inner.order.fill_(0)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.norm.num_batches_tracked += 1
            y: Tensor = self.inner(x)
            return y[:, self.steps]

    types = {n: v.dtype for n, v in with_float_counters(Chosen()).named_buffers()}
    assert types.pop("inner.steps") == torch.float32
    assert {n for n, dtype in types.items() if dtype == torch.int64} == {
        "steps",
        "inner.order",
        "inner.norm.num_batches_tracked",
    }


def test_a_module_may_count_in_another() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Warm("outside")

        def forward(self, x: Tensor) -> Tensor:
            self.inner.steps += 1
            y: Tensor = self.inner(x)
            return y

    assert with_float_counters(Outer()).inner.steps.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_only_what_code_writes_becomes_float(dtype: torch.dtype) -> None:
    model = with_float_counters(Warm(dtype=dtype))
    types = {name: value.dtype for name, value in model.named_buffers()}
    assert types["steps"] == torch.float32
    assert types["order"] == types["norm.num_batches_tracked"] == torch.int64


def test_weights_saved_from_the_users_own_model_fit(tmp_path: Path) -> None:
    own, file = Warm(), tmp_path / "own.safetensors"
    own.steps.fill_(12)
    file.write_bytes(from_model(own).save())
    model = with_float_counters(Warm())
    from_file(file).load_into(model)
    assert model.steps.dtype == torch.float32
    assert model.steps.item() == 12
    own.load_state_dict(model.state_dict())
    assert own.steps.dtype == torch.int64
    assert own.steps.item() == 12


def test_a_class_without_source_stays_as_it_is() -> None:
    space: dict[str, type] = {}
    exec(
        "class Unknown(__import__('torch').nn.Module):\n"
        "    def forward(self, x):\n        self.steps += 1\n        return x\n",
        space,
    )
    model = space["Unknown"]()
    model.register_buffer("steps", torch.tensor(0))
    assert with_float_counters(model).steps.dtype == torch.int64
