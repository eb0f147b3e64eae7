"""`depth`: the submodel is the same model with fewer blocks, written by hand."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import eager
import oracles
from device_agent.formats.atomic_files import write_folder
from device_agent.formats.update import read_update
from edgetailor import Federation, TrainingConfig, split
from exporters.recording.capture import capture
from models_for_tests import CLASSES, INPUT_SHAPE, staged_cnn
from oracles import Device, Plan
from parameters import some_long
from refusals import refused
from toolkit.families.depth import stages_of
from toolkit.models import resnet20
from toolkit.submodels.global_model import from_model
from trainings import train_bundle, training_config

PLAN = Plan(batch_size=8, epochs=2, rate=0.05, momentum=0.9, weight_decay=0.01)


class Layer(nn.Module):
    """A layer as those of transformers' older models: more arguments, and a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor]:
        return (x + scale * torch.tanh(self.inner(x)) * mask,)


class Layered(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(5) for _ in range(layers))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        for layer in self.layers:
            (x,) = layer(x, mask, scale=0.5)
        return self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], nn.Module], tuple[int, ...]]] = {
    # Half of 2 and of 3 blocks, rounded up.
    "stages": (staged_cnn, "0.5", lambda: staged_cnn(1, 2), INPUT_SHAPE),
    "least": (staged_cnn, "0.1", lambda: staged_cnn(1, 1), INPUT_SHAPE),
    "layers": (lambda: Layered(4), "0.75", lambda: Layered(3), (5,)),
}


@pytest.mark.parametrize("name", some_long(CASES, "least"))
def test_prediction_and_step_are_those_of_the_shorter_model(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    build, ratio, shorter, shape = CASES[name]
    model, twin = build(), shorter().double()
    submodel = split(model, f"depth:{ratio}", shape, TrainingConfig(momentum=0.0))
    state = eager.first_state(submodel, submodel.cut(from_model(model)))
    twin.load_state_dict({n: state[n] for n in twin.state_dict() if n in state}, strict=False)
    assert {e.name for e in submodel.program.tensors if e.role == "parameter"} == {
        n for n, _ in twin.named_parameters()
    }
    x = torch.randn(6, *shape, dtype=torch.float64)
    y = torch.randint(CLASSES, (6,))
    came = eager.call(submodel, "predict", state, x=x)["output"]
    torch.testing.assert_close(came, twin.eval()(x), rtol=1e-10, atol=1e-10)
    new = eager.call(submodel, "train", state, x=x, y=y, rate=0.1)
    oracles.cross_entropy(twin.train()(x), y).backward()
    for name_, value in twin.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(new[name_], value.detach() - 0.1 * value.grad)


def test_a_round_beside_the_whole_model(seed: int, tmp_path: Path) -> None:
    training = training_config(PLAN)
    federation = Federation("models_for_tests:staged_cnn", INPUT_SHAPE, training, seed=seed)
    old, updates, files = oracles.state_of(federation.module), [], []
    fleet = (("depth:0.5", staged_cnn(1, 2)), ("depth:0.1", staged_cnn(1, 1)))
    for number, (spec, twin) in enumerate(fleet):
        draw = np.random.default_rng([seed, number])
        x = draw.normal(number, 1, (20, *INPUT_SHAPE)).astype(np.float32)
        device = Device(x, draw.integers(CLASSES, size=20), seed=number)
        twin.load_state_dict({n: old[n].float() for n in oracles.state_of(twin)}, strict=False)
        updates.append((oracles.train_full(twin, device, PLAN), 20.0))
        bundle = tmp_path / f"bundle-{number}"
        write_folder(bundle, federation.bundle(spec))
        files.append(tmp_path / f"update-{number}")
        train_bundle(bundle, (x, device.y), files[-1], threads=1, seed=number)
    federation.fold(map(read_update, files))
    expected = oracles.mean(updates, old)
    for name, value in expected.items():
        came = federation.model.tensors[name].double()
        moved = float((value - old[name]).norm())
        assert float((came - value).norm()) <= 1e-3 * moved + 1e-6 * float(value.norm()), name
        assert (moved == 0) == name.startswith(("blocks.b", "blocks.e")), name


def test_stages_of_a_residual_network() -> None:
    model = resnet20()
    stages = stages_of(model, capture(model, (3, 32, 32)))
    assert [list(stage) for stage in stages] == [
        [f"blocks.{number}" for number in range(first, first + 3)] for first in (0, 3, 6)
    ]


def test_a_sequence_of_stages_is_no_stage() -> None:
    """Both containers change the shape, so that their blocks are what can be left out."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)),
        nn.Linear(6, CLASSES),
    )
    stages = stages_of(model, capture(model, (5,)))
    assert [list(stage) for stage in stages] == [["0.0", "0.1"], ["1.0", "1.1", "1.2"]]


def shared() -> nn.Module:
    """The second block has a layer of the first one."""
    model = Layered(2)
    model.layers[1].inner = model.layers[0].inner
    return model


def called_twice() -> nn.Module:
    layer, head = nn.Linear(5, 5), nn.Linear(5, CLASSES)
    return nn.Sequential(OrderedDict(a=layer, b=layer, bend=nn.Tanh(), c=head))


@pytest.mark.parametrize("build", [lambda: nn.Linear(5, CLASSES), shared, called_twice])
def test_a_model_without_stages_is_refused(build: Callable[[], nn.Module]) -> None:
    with refused("spec.nothing-smaller", spec="depth:0.5") as caught:
        split(build(), "depth:0.5", (5,))
    assert "highest_ratio" not in caught.value.values


def test_a_ratio_that_leaves_out_nothing_is_refused_with_the_largest_that_does() -> None:
    with refused("spec.nothing-smaller", spec="depth:0.9", highest_ratio=0.6666):
        split(Layered(3), "depth:0.9", (5,))
    assert split(Layered(3), "depth:0.6666", (5,)).counts == split(Layered(2), "full", (5,)).counts
    full, all_blocks = (split(Layered(4), spec, (5,)).counts for spec in ("full", "depth:1"))
    assert full == all_blocks


class Counting(nn.Module):
    """Reads an attribute of its last block, which a module in its place does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x) / self.layers[1].in_features)


def test_a_model_that_needs_its_last_block_is_refused() -> None:
    with refused("spec.layers-not-replaceable", spec="depth:0.5", layers=["layers.1"]):
        split(Counting(), "depth:0.5", (5,))
