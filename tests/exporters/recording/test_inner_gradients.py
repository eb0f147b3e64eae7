"""Models that compute gradients themselves, compared with themselves in float64."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn import functional

from exporters.recording.capture import capture
from one_step import check_one_step
from refusals import refused
from toolkit.model_evaluation import evaluate

Compute = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, compute: Compute, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers) if layers else nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Softplus()
        )  # fmt: skip
        self.head, self.compute = nn.Linear(6, 3), compute

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.compute(self, x))
        return out


def force(model: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return -torch.autograd.grad(model.net(x).sum(), x, create_graph=True)[0]


def imported(model: Net, x: Tensor) -> Tensor:
    """Under the name that the user's file gave the function."""
    x = x.requires_grad_(True)
    y = model.net(x)
    (found,) = grad(y, [x], grad_outputs=[torch.ones_like(y) * 0.5], create_graph=True)
    return found * y.sum(1, keepdim=True)


def second(model: Net, x: Tensor) -> Tensor:
    first, rest = x[:, :2].clone().requires_grad_(True), x[:, 2:]
    u = model.net(torch.cat([first, rest], 1))
    (du,) = torch.autograd.grad(u.sum(), first, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), first, create_graph=True, retain_graph=True)
    return torch.cat([du, ddu, u[:, :2]], 1)


def penalty(model: Net, x: Tensor) -> Tensor:
    mixed = (torch.lerp(x, x.flip(1), 0.3)).requires_grad_(True)
    (found,) = torch.autograd.grad(model.net(mixed).sum(), mixed, create_graph=True)
    return x * (found.norm(2, dim=1, keepdim=True) - 1) ** 2


def without_graph(model: Net, x: Tensor) -> Tensor:
    """A saliency map: no gradient flows through it."""
    x = x.clone().requires_grad_(True)
    y = model.net(x)
    return torch.autograd.grad(y.sum(), x, retain_graph=True)[0] * y.mean(1, keepdim=True)


def several(model: Net, x: Tensor) -> Tensor:
    """One input depends on the other; a part is detached, and another is not used."""
    a = (x * 1.5).requires_grad_(True)
    b = functional.softmax(a, 1) * 2
    unused = x.clone().requires_grad_(True)
    parts = model.net(b + a.detach()).split([2, 3], 1)
    found = torch.autograd.grad(
        [parts[0].sum(), (parts[1] ** 2).sum()], [a, b, unused], create_graph=True,
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return found[0] + 2 * found[1] + found[2]


def by_jacobian(model: Net, x: Tensor) -> Tensor:
    return torch.autograd.functional.vjp(lambda z: model.net(z).sum(), x, create_graph=True)[1]


class Pictures(nn.Module):
    """A critic with its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.LeakyReLU(0.2), nn.InstanceNorm2d(3, affine=True),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x + 0.1 * x.flip(3)).requires_grad_(True)
        (found,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
        out: Tensor = self.net(x) + found.flatten(1).norm(dim=1, keepdim=True)
        return out


def wide(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output for `x`, and the gradients of the parameters of a sum of it, in float64."""
    y = model.double()(x.double())
    y.mul(torch.arange(y.numel()).view_as(y)).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compute", [force, imported, penalty, without_graph, several, by_jacobian])
def test_the_recording_computes_what_autograd_computes(compute: Compute, seed: int) -> None:
    torch.manual_seed(seed)
    check(Net(compute), torch.randn(4, 6))


def test_gradients_of_gradients(seed: int) -> None:
    """Without a layer norm, whose third derivative is wrong in PyTorch 2.13."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.SiLU()
    check(Net(second, *layers), torch.randn(4, 6))


def test_a_gradient_penalty_of_pictures(seed: int) -> None:
    torch.manual_seed(seed)
    check(Pictures(), torch.randn(4, 1, 6, 6))


def check(model: nn.Module, x: Tensor) -> None:
    captured = capture(model, tuple(x.shape[1:]))
    expected, gradients = wide(deepcopy(model), x)
    for graph in (captured.training, captured.inference):
        tensors = {n: v.detach().clone().requires_grad_() for n, v in captured.tensors.items()}
        y: Any = functional_call(graph, tensors, (x,))
        y = y[0] if isinstance(y, tuple) else y
        y.mul(torch.arange(y.numel()).view_as(y)).sum().backward()
        close(y, expected)
        for name, gradient in gradients.items():
            close(tensors[name].grad, gradient)


def close(value: Tensor | None, expected: Tensor) -> None:
    assert value is not None
    assert (value - expected).norm() <= 1e-4 * expected.norm() + 1e-6


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8)])
def test_what_changes_from_call_to_call_is_not_differentiated(layer: nn.Module) -> None:
    model = Net(force, nn.Linear(6, 8), layer, nn.Tanh())
    with refused("model.inner-gradient", "test_inner_gradients.py, line"):
        capture(model, (6,))


def backward(model: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    model.net(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_backward_in_a_model_is_refused_with_its_line() -> None:
    with refused("model.inner-gradient", "test_inner_gradients.py, line"):
        capture(Net(backward), (6,))


@pytest.mark.parametrize("format", ["onnx", "tflite"])
def test_one_step(format: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    check_one_step(Net(second, nn.Linear(6, 8), nn.Tanh()), (6,), None, format, tmp_path)


def test_the_server_evaluates_such_a_model(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = Net(force).eval(), torch.randn(7, 6), torch.arange(7) % 3
    expected = functional.cross_entropy(model(x).double(), y)
    found = evaluate(model, x.numpy(), y.numpy())
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
