"""A training step and predictions of an exported model, compared with PyTorch in float64."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from device_agent.inference.predictor import Predictor
from edgetailor import TrainingConfig, export, split
from exporters.export import Format
from exporters.recording.shared_tensors import twin_of
from parameters import needs_litert
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

SAMPLES, RATE, CLASSES = 8, 0.1, 3


class _FloatIsDouble(TorchFunctionMode):
    """`x.float()`, which a model may call, leaves float64 as it is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*args, **(kwargs or {}))


def check_one_step(
    model: nn.Module, shape: tuple[int, ...], tokens: int | None, format: Format, folder: Path
) -> None:
    """Export `model` to `folder`, then predict and train on random samples of `shape`.

    Samples are ids below `tokens`, unless this is None. `model` returns scores of CLASSES classes.
    """
    needs_litert(format)
    batch = (SAMPLES, *shape)
    x = torch.randn(batch) if tokens is None else torch.randint(tokens, batch)
    y = torch.randint(CLASSES, (SAMPLES,))
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, learning_rate=RATE)
    bundle, data = folder / "bundle", folder / "data.npz"
    export(split(model, "full", shape, config), from_model(model), bundle, format=format)
    np.savez(data, x=x.numpy(), y=y.numpy())

    right = twin_of(model).double()
    before = {n: p.detach().clone() for n, p in right.named_parameters()}
    torch.set_default_dtype(torch.float64)  # constants of `forward` too
    try:
        wide = x.double() if tokens is None else x
        with _FloatIsDouble():
            functional.cross_entropy(right(wide), y).backward()
            output = twin_of(model).double().eval()(wide)
    finally:
        torch.set_default_dtype(torch.float32)
    predicted = Predictor(bundle).predict(x.numpy())
    assert np.abs(predicted - output.softmax(1).detach().numpy()).max() < 1e-5

    check_training(folder, right, before)


def check_training(folder: Path, right: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Train `bundle` in `folder` on its `data.npz`, by one step on all samples.

    `right` is the model in float64 with the gradients of these samples, and `before` has its
    parameters from the start.
    """
    train_bundle(folder / "bundle", folder / "data.npz", folder / "update")
    (file,) = (folder / "update").glob("*.safetensors")
    trained = load_file(file)
    for parameter, value in right.named_parameters():
        gradient = torch.zeros_like(value) if value.grad is None else value.grad
        # `forward` may change a parameter before it uses it.
        change = (before[parameter] - value.detach() + RATE * gradient).numpy()
        actual = before[parameter].numpy() - trained[parameter]
        # float32 rounds the weight that the change is taken from.
        rounding = 2**-24 * np.linalg.norm(before[parameter].numpy())
        assert np.linalg.norm(actual - change) <= 1e-5 * np.linalg.norm(change) + 2 * rounding
