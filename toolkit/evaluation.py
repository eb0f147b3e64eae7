"""Judging a model: accuracy and mean cross-entropy on samples that no device trained on."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from device_agent.data import load_data
from device_agent.manifest import Dtype, labels_of
from exporters.signatures import loss_of
from profiles.errors import InputError, ModelError
from toolkit.loading import load_model

EVALUATION_VERSION = 1
PIECE = 256
"""Samples in memory at a time."""


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on `samples` samples: `accuracy` from 0 to 1, mean cross-entropy."""

    samples: int
    accuracy: float
    loss: float


def evaluate(module: nn.Module, x: np.ndarray, y: np.ndarray, origin: str) -> Evaluation:
    """Judge `module` as it is on samples `x` (n, *shape) and labels `y` (n,) int64.

    Raises ModelError where it cannot take the samples, InputError naming `origin` for labels that
    it has no class for.
    """
    module.eval()
    loss, right, low, high = 0.0, 0, y.min(), y.max()
    for start in range(0, len(y), PIECE):
        target = torch.from_numpy(y[start : start + PIECE])
        logits = _logits(module, torch.from_numpy(x[start : start + PIECE]))
        top = labels_of(logits.shape[1]) - 1
        if low < 0 or high > top:
            raise InputError(
                f"{origin} has labels from {low} to {high}; the model's classes are 0 to {top}."
            )
        loss += float(loss_of(logits.double(), target)) * len(target)
        # A single output is a logit: above 0 it says 1.
        chosen = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
        right += int((chosen == target).sum())
    return Evaluation(len(y), right / len(y), loss / len(y))


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
        _logits(module, torch.from_numpy(piece))
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    module.eval()


def evaluate_file(
    model: str, weights_file: str | Path, sample_shape: tuple[int, ...], data: str
) -> Evaluation:
    """Judge the model reference `model` with the weights of `weights_file` on `data` (data.py).

    Raises ModelError, DataError or InputError for what cannot be used.
    """
    module = load_model(model, weights_file)
    classes, dtype = _takes(module.eval(), sample_shape)
    local = load_data(data, sample_shape, classes, dtype, least=1)
    return evaluate(module, local.x, local.y, data)


def as_json(found: Evaluation) -> dict[str, object]:
    """The document that `evaluate --json` prints."""
    return {"version": EVALUATION_VERSION, **asdict(found)}


def _takes(module: nn.Module, sample_shape: tuple[int, ...]) -> tuple[int, Dtype]:
    """Outputs of `module`, and the type of samples that it takes."""
    zeros = torch.zeros(1, *sample_shape)
    try:
        return _logits(module, zeros).shape[1], "float32"
    except ModelError:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in module.modules()):
            raise
    return _logits(module, zeros.long()).shape[1], "int64"


def _logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            logits = module(x)
    except Exception as error:  # the user's code may raise anything
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"The model cannot take samples of shape {tuple(x.shape[1:])}: {reason}"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        raise ModelError("The model must return one tensor of shape (batch, classes).")
    return logits
