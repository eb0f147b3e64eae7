"""Models with several inputs, of floats and ids, against the same models called by themselves."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from device_agent.formats.bundle import open_bundle
from device_agent.training.random_run import synthetic
from edgetailor import Predictor, TrainingConfig, export, inspect, pack_inputs, split
from exporters.recording.inputs.packed_inputs import parts_of_model
from one_step import RATE, SAMPLES, check_training
from parameters import needs_litert, quarter_quick, some_long, some_quick
from refusals import refused
from toolkit.submodels.global_model import from_model


class Towers(nn.Module):
    """A recommender with a tower for users and one for items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 6), nn.Embedding(50, 6)
        self.bias, self.last = nn.Parameter(torch.randn(50)), nn.Linear(7, 3)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        both = torch.tanh(self.users(user)) * torch.tanh(self.items(item))
        return self.last(torch.cat([both, self.bias[item][:, None]], 1))


class WideAndDeep(nn.Module):
    """Numbers and categories of a table, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.deep = nn.Embedding(5, 4), nn.Linear(14, 8)
        self.wide, self.last = nn.Linear(2, 3), nn.Linear(8, 3)

    def forward(self, row: dict[str, Tensor]) -> Tensor:
        codes = self.kinds(row["categories"]).flatten(1)
        deep = torch.tanh(self.deep(torch.cat([codes, row["numbers"]], 1)))
        return self.last(deep) + self.wide(row["numbers"])


class TextAndFeatures(nn.Module):
    """The mean of the words that a mask keeps, and features of the document.

    It joins the batch with the words by `view`, which needs contiguous inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.last = nn.Embedding(20, 5), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor, mask: Tensor, features: Tensor, scale: float = 1.0) -> Tensor:
        kept = mask.unsqueeze(-1)
        codes = self.words(words.view(-1)).view(*words.shape, 5)
        mean = (codes * kept).sum(1) / kept.sum(1).clamp(min=1)
        features = features.view(-1).view_as(features)
        return self.last(torch.tanh(self.hidden(torch.cat([mean, scale * features], 1))))


class PictureAndCamera(nn.Module):
    """A picture, and which camera took it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cameras = nn.Conv2d(1, 4, 3), nn.Embedding(7, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, image: Tensor, camera: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(image)).mean((2, 3)) + self.cameras(camera))


Draw = np.random.Generator
Arrays = Callable[[Draw, int], dict[str, np.ndarray]]
MODELS: dict[str, tuple[type[nn.Module], dict[str, Sequence[int | str]], Arrays]] = {
    "towers": (
        Towers,
        {"user": ("int64",), "item": ("int64",)},
        lambda d, n: {"user": d.integers(30, size=n), "item": d.integers(50, size=n)},
    ),
    "wide and deep": (
        WideAndDeep,
        {"numbers": (2,), "categories": ("int64", 3)},
        lambda d, n: {"numbers": normal(d, n, 2), "categories": d.integers(5, size=(n, 3))},
    ),
    "text and features": (
        TextAndFeatures,
        {"words": ("int64", 6), "mask": (6,), "features": (3,)},
        lambda d, n: {
            "words": d.integers(20, size=(n, 6)),
            "mask": (d.random((n, 6)) < 0.7).astype(np.float32),
            "features": normal(d, n, 3),
        },
    ),
    "picture and camera": (
        PictureAndCamera,
        {"image": (1, 6, 6), "camera": ("int64",)},
        lambda d, n: {"image": normal(d, n, 1, 6, 6), "camera": d.integers(7, size=n)},
    ),
}
ROWS = [(name, format) for name in MODELS for format in ("onnx", "tflite")]
QUICK = [("towers", "onnx"), ("wide and deep", "tflite"), ("picture and camera", "onnx")]


def normal(draw: Draw, *shape: int) -> np.ndarray:
    return draw.normal(size=shape).astype(np.float32)


def called(model: nn.Module, arrays: dict[str, np.ndarray]) -> Tensor:
    """The output of the model itself in float64."""
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given = {name: v.double() if v.is_floating_point() else v for name, v in given.items()}
    output = model(given) if isinstance(model, WideAndDeep) else model(**given)
    assert isinstance(output, Tensor)
    return output


@pytest.mark.parametrize(("name", "format"), quarter_quick(some_quick(ROWS, *QUICK)))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    needs_litert(format)
    build, inputs, drawn = MODELS[name]
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    arrays, y = drawn(draw, SAMPLES), draw.integers(3, size=SAMPLES)
    model = build()
    right = copy.deepcopy(model).double()
    before = {n: p.detach().clone() for n, p in right.named_parameters()}
    output = called(right, arrays)
    functional.cross_entropy(output, torch.from_numpy(y)).backward()

    pack_inputs(model, **inputs)
    assert list(model.state_dict()) == list(right.state_dict())
    size = sum(array[0].size for array in arrays.values())
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, learning_rate=RATE)
    bundle, data = tmp_path / "bundle", tmp_path / "data.npz"
    export(split(model, "full", (size,), config), from_model(model), bundle, format=format)
    np.savez(data, y=y, **{f"x_{key}": value for key, value in arrays.items()})
    check_training(tmp_path, right, before)
    predicted = Predictor(bundle).predict(arrays)
    assert np.abs(predicted - output.softmax(1).detach().numpy()).max() < 1e-5
    # A device profiles and compares its runtimes with ids that the tables have.
    random = torch.from_numpy(synthetic(open_bundle(bundle), 200).x)
    with torch.no_grad():
        assert model(random).isfinite().all()


SPECS = ("low-rank:0.5,keep=0", "width:0.5", "cp:2.0", "slice:last")


# test_tables.py has a narrower model of ids.
@pytest.mark.parametrize("spec", some_long(SPECS, *SPECS[:3]))
def test_every_family_takes_them(spec: str, tmp_path: Path) -> None:
    model = pack_inputs(WideAndDeep(), numbers=(2,), categories=("int64", 3))
    bundle = export(split(model, spec, (5,)), from_model(model), tmp_path / "bundle")
    assert bundle.verdict is not None
    assert bundle.verdict.passed


def test_ids_of_the_data_must_be_in_the_tables(tmp_path: Path) -> None:
    model = pack_inputs(Towers(), user=("int64",), item=("int64",))
    bundle = export(
        split(model, "full", (2,)), from_model(model), tmp_path / "bundle", verify=False
    )
    pairs = {"user": np.array([1, 30]), "item": np.array([1, 2])}
    with refused("data.number-out-of-range", array="x_user", highest=29):
        Predictor(bundle.out).predict(pairs)


def test_a_model_with_several_inputs_is_refused_with_the_remedy() -> None:
    with refused("model.inputs", "--input NAME:SHAPE", takes=["user", "item"]):
        inspect(Towers(), (2,), ["full"], 8)
    with refused("model.inputs", missing=["item"]):
        pack_inputs(Towers(), user=("int64",))
    with refused("model.inputs", name="users"):
        pack_inputs(Towers(), users=("int64",), item=("int64",))
    packed = pack_inputs(Towers(), user=("int64",), item=("int64",))
    with refused("model.inputs", needs=2):
        inspect(packed, (3,), ["full"], 8)


def test_types_of_a_model_with_computed_weights_are_found() -> None:
    """`copy.deepcopy` cannot copy a model whose weight norm has computed its weight."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = nn.Embedding(5, 4)
            with pytest.warns(FutureWarning):
                self.layer = nn.utils.weight_norm(nn.Linear(4, 3))

        def forward(self, numbers: Tensor, kind: Tensor) -> Tensor:
            y: Tensor = self.layer(numbers + self.kinds(kind))
            return y

    packed = parts_of_model(pack_inputs(Normed(), numbers=(4,), kind=()))
    assert [part.dtype for part in packed] == ["float32", "int64"]
