"""Models with several inputs, against the same model called with each input by itself."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracles
from device_agent.formats.update import read_update
from edgetailor import TrainingConfig, export, join_inputs, split
from oracles import Device, Plan
from parameters import some_long
from refusals import refused
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

WORDS, LENGTH, CLASSES = 11, 6, 4
PLAN = Plan(batch_size=5, epochs=2, rate=0.5, momentum=0.9, weight_decay=0.0)
TRAINING = TrainingConfig(PLAN.batch_size, PLAN.epochs, PLAN.rate, PLAN.momentum)
SHAPES = {"attention_mask": (LENGTH,), "input_ids": (LENGTH,)}


class Reader(nn.Module):
    """The mean of the words that a mask keeps, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5)
        self.hidden = nn.Linear(5, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position: int = 0
    ) -> dict[str, Tensor]:
        kept = attention_mask.to(self.head.weight.dtype)[:, :, None]
        codes = self.embedding(input_ids.view(-1))  # needs contiguous ids
        embedded = torch.tanh(self.hidden(codes.view(*input_ids.shape, 5)))
        mean = (embedded * kept).sum(1) / kept.sum(1).clamp(min=1)
        return {"hidden": mean, "logits": self.head(mean)}


def data(seed: int, samples: int = 13) -> tuple[Tensor, Tensor, np.ndarray]:
    """Words, a mask with one word or more, and classes."""
    draw = np.random.default_rng(seed)
    words = draw.integers(WORDS, size=(samples, LENGTH))
    mask = np.arange(LENGTH) < draw.integers(1, LENGTH + 1, size=(samples, 1))
    return (
        torch.from_numpy(words),
        torch.from_numpy(mask.astype(np.int64)),
        draw.integers(CLASSES, size=samples),
    )


def test_a_copy_calls_its_own_layers(seed: int) -> None:
    torch.manual_seed(seed)
    plain = Reader()
    joined = join_inputs(copy.deepcopy(plain), **SHAPES)
    assert isinstance(joined, Reader)
    assert list(joined.state_dict()) == list(plain.state_dict())
    words, mask, _ = data(seed)
    twin = copy.deepcopy(joined)
    for module in (plain, twin):
        with torch.no_grad():
            module.head.weight.mul_(3)
    came = twin(torch.cat([mask, words], 1))
    expected = plain(words, mask)
    torch.testing.assert_close(came, expected)


@pytest.mark.parametrize("spec", some_long(["full", "slice:hidden"], "full"))
@pytest.mark.parametrize("format", some_long(["onnx", "tflite"], "tflite"))
def test_a_device_trains_as_pytorch(spec: str, format: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    plain = Reader()
    words, mask, classes = data(seed)
    x = torch.cat([mask, words], 1).numpy()
    joined = join_inputs(copy.deepcopy(plain), **SHAPES)
    submodel = split(joined, spec, (2 * LENGTH,), TRAINING)
    export(submodel, from_model(joined), tmp_path / "bundle", format=format)  # type: ignore[arg-type]
    local = Device(x, classes, seed % 1000)
    train_bundle(tmp_path / "bundle", (x, classes), tmp_path / "update", threads=1, seed=local.seed)
    _, came = read_update(tmp_path / "update")

    if spec != "full":
        plain.embedding.requires_grad_(False)
    trained = [p for p in plain.double().parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, PLAN.rate, PLAN.momentum)
    for y, indices in local.visits(PLAN):
        oracles.descend(
            optimizer, oracles.cross_entropy(plain(words[indices], mask[indices])["logits"], y)
        )
    changed = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert set(came) == changed
    for name in changed:
        value = plain.state_dict()[name]
        error = float((torch.from_numpy(came[name]) - value).norm() / value.norm())
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("shapes", "values"),
    [
        ({}, {"takes": ["input_ids", "attention_mask", "position"]}),
        ({"input_ids": (3,), "atention_mask": (3,)}, {"name": "atention_mask"}),
        ({"attention_mask": (3,)}, {"missing": ["input_ids"]}),
    ],
)
def test_inputs_that_the_model_does_not_have(
    shapes: dict[str, tuple[int, ...]], values: dict[str, object]
) -> None:
    with refused("model.inputs", **values):
        join_inputs(Reader(), **shapes)


@pytest.mark.parametrize("shape", [(LENGTH,), (2 * LENGTH - 1,), (2 * LENGTH + 1,), (2, LENGTH)])
def test_samples_of_another_length(shape: tuple[int, ...]) -> None:
    model = join_inputs(Reader(), **SHAPES)
    with refused("model.inputs", needs=2 * LENGTH, came=list(shape)):
        split(model, "full", shape)
    with refused("model.inputs", needs=2 * LENGTH):
        model(torch.zeros(3, *shape, dtype=torch.int64))
