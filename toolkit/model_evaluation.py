"""Judging a model: accuracy and mean loss on samples that no device trained on."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from device_agent.formats.manifest import Dtype, labels_of
from device_agent.training.local_data import load_data
from exporters.programs.losses import Objective, objective
from profiles.errors import InputError, ModelError
from toolkit.submodels.model_loading import load_model
from toolkit.submodels.training_config import Loss, TrainingConfig

EVALUATION_VERSION = 1
PIECE = 256
"""Samples in memory at a time."""


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on `samples` samples: `accuracy` from 0 to 1, mean loss.

    A regression has no accuracy.
    """

    samples: int
    accuracy: float | None
    loss: float


def evaluate(
    module: nn.Module, x: np.ndarray, y: np.ndarray, origin: str, loss: Loss = "cross-entropy"
) -> Evaluation:
    """Judge `module` as it is on samples `x` (n, *shape) and labels `y` by the loss called `loss`.

    Labels are classes (n,) int64, of a regression (n, outputs) float32. Raises ModelError where the
    model cannot take the samples or the loss does not fit it, InputError naming `origin` for labels
    that do not fit its output.
    """
    module.eval()
    total, right = 0.0, 0
    for start in range(0, len(y), PIECE):
        target = torch.from_numpy(y[start : start + PIECE])
        output = _output(module, torch.from_numpy(x[start : start + PIECE])).double()
        aim = objective(loss, output.shape[1])
        _check_labels(y, output.shape[1], aim, origin)
        total += float(aim.loss(output, target)) * len(target)
        right += int(aim.correct(output, target)) if aim.correct else 0
    return Evaluation(len(y), right / len(y) if aim.correct else None, total / len(y))


def take_statistics(module: nn.Module, x: np.ndarray) -> None:
    """Set the running statistics of all batch norms to those of the samples `x` (n, *shape).

    The mean over pieces of the samples, each layer normalising by the piece as in training.
    """
    norms = [m for m in module.eval().modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # PyTorch's sign for a plain mean
        norm.train()
    for piece in np.array_split(x, -(-len(x) // PIECE)):
        _output(module, torch.from_numpy(piece))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    module.eval()


def evaluate_file(
    model: str,
    weights_file: str | Path,
    sample_shape: tuple[int, ...],
    data: str,
    loss: Loss = "cross-entropy",
) -> Evaluation:
    """Judge the model reference `model` with the weights of `weights_file` on `data` (data.py).

    `loss` is what it was trained on. Raises ModelError, DataError or InputError for what cannot be
    used.
    """
    module = load_model(model, weights_file)
    outputs, dtype = _takes(module.eval(), sample_shape)
    labels = TrainingConfig(loss=loss).labels
    local = load_data(data, sample_shape, outputs, dtype, least=1, labels=labels)
    return evaluate(module, np.array(local.x), np.array(local.y), data, loss)


def as_json(found: Evaluation) -> dict[str, object]:
    """The document that `evaluate --json` prints."""
    return {"version": EVALUATION_VERSION, **asdict(found)}


def _check_labels(y: np.ndarray, outputs: int, aim: Objective, origin: str) -> None:
    """Raise InputError where labels do not fit a model of `outputs` outputs."""
    if aim.correct is None:
        if y.shape[1:] != (outputs,):
            raise InputError(
                f"{origin} has labels of shape {y.shape}; the model's output is (n, {outputs})."
            )
        return
    low, high, top = y.min(), y.max(), labels_of(outputs) - 1
    if low < 0 or high > top:
        raise InputError(
            f"{origin} has labels from {low} to {high}; the model's classes are 0 to {top}."
        )


def _takes(module: nn.Module, sample_shape: tuple[int, ...]) -> tuple[int, Dtype]:
    """Outputs of `module`, and the type of samples that it takes."""
    zeros = torch.zeros(1, *sample_shape)
    try:
        return _output(module, zeros).shape[1], "float32"
    except ModelError:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules()):
            raise
    return _output(module, zeros.long()).shape[1], "int64"


def _output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            output = module(x)
    except Exception as error:  # the user's code may raise anything
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"The model cannot take samples of shape {tuple(x.shape[1:])}: {reason}"
        ) from error
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        raise ModelError("The model must return one tensor of shape (batch, classes).")
    return output
