"""Models that return more than one tensor: a recording packs the outputs that a loss can take."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from exporters.programs.output_parts import unpack
from exporters.recording.capture import capture
from parameters import half_quick
from refusals import refused
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig


class Scores(NamedTuple):
    logits: Tensor
    hidden: Tensor


class ModelOutput(OrderedDict[str, Any]):
    """As transformers return it."""


class Net(nn.Module):
    def __init__(self, returned: Callable[["Net", Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.recurrent = nn.GRU(5, 4, num_layers=2, batch_first=True)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        return self.returned(self, hidden, self.last(hidden))


SEVERAL: dict[str, tuple[Callable[[Net, Tensor, Tensor], Any], list[str]]] = {
    "dictionary": (lambda _, h, y: {"hidden": h, "logits": y}, ["hidden", "logits"]),
    "tuple": (lambda _, h, y: (y, h), ["0", "1"]),
    "list": (lambda _, h, y: [y, h], ["0", "1"]),
    "named tuple": (lambda _, h, y: Scores(y, h), ["logits", "hidden"]),
    "nested": (lambda _, h, y: (y, {"maps": [h, h * 2]}), ["0", "1.maps.0", "1.maps.1"]),
    "one number": (lambda _, h, y: (y, h.square().mean()), ["0", "1"]),
}


@pytest.mark.parametrize("kind", half_quick(SEVERAL))
def test_several_outputs_are_packed(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    returned, names = SEVERAL[kind]
    model = Net(returned)
    captured = capture(model, (6,))
    assert [part.name for part in captured.outputs.parts] == names
    x = torch.randn(4, 6)
    expected = model(x)
    if isinstance(expected, Scores):
        expected = expected._asdict()
    for graph in (captured.training, captured.inference):
        came = unpack(graph(x), captured.outputs.parts)
        if kind == "one number":
            came, expected = (came[0], came[1].mean()), model(x)
        torch.testing.assert_close(came, tuple(expected) if kind == "list" else expected)


SINGLE: dict[str, tuple[Callable[[Net, Tensor, Tensor], Any], list[str]]] = {
    "transformers": (lambda _, h, y: ModelOutput(hidden=h, logits=y), []),
    "dictionary": (lambda _, h, y: {"scores": y}, []),
    "with a recurrent state": (
        lambda own, h, y: (y, own.recurrent(h[:, None])[1]),
        ["1"],
    ),
    "with classes": (lambda _, h, y: (y, y.argmax(1)), ["1"]),
    "more in training": (lambda own, h, y: (y, h) if own.training else y, ["1"]),
}


@pytest.mark.parametrize("kind", half_quick(SINGLE))
def test_the_only_output_that_a_loss_can_take(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    returned, left_out = SINGLE[kind]
    model = Net(returned)
    captured = capture(model, (6,))
    x = torch.randn(4, 6)
    expected = model.last(model.first(x).tanh())
    torch.testing.assert_close(captured.training(x), expected)
    torch.testing.assert_close(captured.inference(x), expected)
    assert captured.classes == 3
    assert list(captured.outputs.left_out) == left_out
    split(model, "full", (6,))


def test_a_loss_must_say_what_to_do_with_several_outputs() -> None:
    model = Net(lambda _, h, y: {"kind": y, "box": h})
    with refused("model.several-outputs", outputs="kind (batch, 3), box (batch, 5)") as caught:
        split(model, "full", (6,))
    # What the message proposes works.
    for key in ("one", "all"):
        split(model, "full", (6,), TrainingConfig(loss=str(caught.value.values[key])))
    with refused("model.unknown-output", output="age"):
        split(model, "full", (6,), TrainingConfig(loss="age=mse"))


def test_other_outputs_in_training_are_refused() -> None:
    model = Net(lambda own, h, y: (y, h) if own.training else (h, y))
    with refused("model.outputs-by-mode"):
        split(model, "full", (6,))


def test_outputs_with_the_same_key_in_both_modes_are_exported(seed: int) -> None:
    torch.manual_seed(seed)
    model = Net(lambda own, h, y: {"kind": y, "help" if own.training else "best": h, "box": 2 * h})
    captured, x = capture(model, (6,)), torch.randn(4, 6)
    h = model.first(x).tanh()
    for graph in (captured.training, captured.inference):
        kind, box = unpack(graph(x), captured.outputs.parts).values()
        torch.testing.assert_close((kind, box), (model.last(h), 2 * h))
    assert list(captured.outputs.left_out) == ["help", "best"]
    split(model, "full", (6,), TrainingConfig(loss="kind=cross-entropy"))
