"""A loss of the user's own gets everything that a model returns, as the model returns it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import edgetailor as et
from exporters.objectives.objective import objective_of
from exporters.recording.capture import capture
from refusals import refused
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig

STEPS, WIDTH = 3, 5


@dataclass
class Returned:
    logits: Tensor
    state: Tensor
    attentions: Tensor | None = None


class Net(nn.Module):
    def __init__(self, returned: Callable[["Net", Tensor], Any]) -> None:
        super().__init__()
        self.first, self.returned = nn.Linear(6, WIDTH), returned
        self.recurrent = nn.GRU(WIDTH, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.returned(self, self.first(x).tanh())


@et.loss(et.numbers(WIDTH))
def steps_first(steps: Tensor, y: Tensor) -> Tensor:
    return sum((functional.mse_loss(step, y) * n for n, step in enumerate(steps)), torch.zeros(()))


@et.loss(et.numbers(WIDTH))
def rows(rows: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(rows.view(-1, STEPS, WIDTH)[:, 1], y)


@et.loss(et.numbers(WIDTH))
def mixed_rows(rows: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(rows.view(STEPS, -1, WIDTH)[1], y)


@et.loss(et.numbers(WIDTH))
def state(outputs: Any, y: Tensor) -> Tensor:
    steps, state = outputs
    return functional.mse_loss(steps[:, 0], y) + state[1].square().mean()


@et.loss(et.numbers(WIDTH))
def places(outputs: Any, y: Tensor) -> Tensor:
    steps, places, positive = outputs
    chosen = steps.gather(2, places.unsqueeze(2)).sum((1, 2))
    return chosen + (steps * ~positive).sum((1, 2)) * y.mean(1)


@et.loss(et.numbers(WIDTH))
def fields(outputs: Any, y: Tensor) -> Tensor:
    assert outputs.attentions is None
    return functional.mse_loss(outputs.logits, y) - outputs.state.sin().mean()


@et.loss(et.numbers(WIDTH))
def first(outputs: Any, y: Tensor) -> Tensor:
    steps, _ = outputs
    return functional.mse_loss(steps[:, 0], y)


@et.loss(et.numbers(WIDTH))
def both(outputs: Any, y: Tensor) -> Tensor:
    return first(outputs, y) + outputs[1].mean()


def similarities(h: Tensor) -> Tensor:
    return h.flatten(1) @ h.flatten(1).T


FORMS: dict[str, Callable[[Net, Tensor], Any]] = {
    "steps_first": lambda _, h: h.transpose(0, 1),
    "rows": lambda _, h: h.reshape(-1, WIDTH),
    "mixed_rows": lambda _, h: h.transpose(0, 1).reshape(-1, WIDTH),
    "state": lambda net, h: (h, net.recurrent(h)[1]),
    "places": lambda _, h: (h, h.argmax(2), h > 0),
    "fields": lambda net, h: Returned(h.mean(1), net.recurrent(h)[1]),
    "first": lambda _, h: (h, similarities(h)),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_gradient_is_pytorchs(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = Net(FORMS[name]), torch.randn(4, STEPS, 6), torch.rand(4, WIDTH)
    captured = capture(model, (STEPS, 6), own_loss=True)
    goal = objective_of(f"{__name__}:{name}", captured)
    own = globals()[name](model(x), y).mean()
    expected = torch.autograd.grad(own, [model.first.weight])
    value = goal.loss(captured.training(x), y)
    came = torch.autograd.grad(value, [captured.training.get_parameter("first.weight")])
    torch.testing.assert_close((value, came), (own, expected))


def test_products_of_samples_are_refused_if_the_loss_reads_them() -> None:
    with refused("loss.unusable-output", output="1") as caught:
        split(Net(FORMS["first"]), "full", (STEPS, 6), TrainingConfig(loss=f"{__name__}:both"))
    assert "several of its axes depend on the number of samples" in str(caught.value)


def test_rows_of_a_built_in_loss_belong_to_one_sample(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Net(FORMS["rows"]), torch.randn(4, STEPS, 6)
    captured = capture(model, (STEPS, 6))
    assert captured.output_shape == (STEPS, WIDTH)
    torch.testing.assert_close(captured.inference(x), model(x).view(4, STEPS, WIDTH))
    split(model, "full", (STEPS, 6))
    model.returned = FORMS["mixed_rows"]
    with refused("model.wrong-output", count=STEPS):
        capture(model, (STEPS, 6))
    # What the message proposes.
    model.returned = lambda _, h: FORMS["mixed_rows"](_, h).view(STEPS, -1, WIDTH).transpose(0, 1)
    assert capture(model, (STEPS, 6)).output_shape == (STEPS, WIDTH)


@et.loss(et.classes(2))
def own(output: Tensor, y: Tensor) -> Tensor:
    return output


@et.loss(et.classes(2))
def contrast(vectors: Any, y: Tensor) -> Tensor:
    logits = vectors[0] @ vectors[1].T
    return functional.cross_entropy(logits, torch.arange(logits.shape[0]))


def test_a_model_that_returns_its_loss(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Net(lambda _, h: h.square().mean()), torch.randn(4, STEPS, 6)
    captured = capture(model, (STEPS, 6), own_loss=True)
    goal = objective_of(f"{__name__}:own", captured)
    value = goal.loss(captured.training(x), torch.zeros(4, 1))
    torch.testing.assert_close(value, model(x))
    with refused("model.wrong-output", "--loss module:function"):
        split(model, "full", (STEPS, 6))


def test_products_of_samples_belong_into_the_loss() -> None:
    def both(_: Net, h: Tensor) -> Any:
        a, b = h[:, 0], h[:, 1]
        return a @ b.T, b @ a.T

    loss = TrainingConfig(loss=f"{__name__}:contrast")
    for returned in (both, lambda net, h: both(net, h)[0]):
        with refused("model.wrong-output", "Return the vectors of each sample"):
            split(Net(returned), "full", (STEPS, 6), loss)
    split(Net(lambda _, h: (h[:, 0], h[:, 1])), "full", (STEPS, 6), loss)  # as it proposes
