"""Tasks with losses that are the users' own, or sums of losses, and the same in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

import own_losses

SAMPLES = 60
Arrays = dict[str, np.ndarray]
Labels = Any


class Task:
    """A model, the loss that the product gets, and the same loss in plain PyTorch."""

    def __init__(
        self,
        model: str,
        loss: str,
        plain: Callable[[Any, Labels], Tensor],
        data: Callable[[np.random.Generator], Arrays],
        toml: str = "",
        metrics: Callable[[Any, Labels], dict[str, Tensor]] = lambda outputs, labels: {},
    ) -> None:
        self.model, self.loss, self.plain, self.data = model, loss, plain, data
        self.toml, self.metrics = toml or f'"{loss}"', metrics

    def build(self) -> nn.Module:
        model: nn.Module = getattr(own_losses, self.model)()
        return model


def learnable(draw: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and two numbers of each that a model can learn."""
    x = draw.standard_normal((SAMPLES, *shape), dtype=np.float32)
    return x, np.tanh(x.reshape(SAMPLES, -1)[:, :2])


def boxes(draw: np.random.Generator) -> Arrays:
    x, known = learnable(draw, 6)
    kind = np.digitize(known[:, 0], (-0.4, 0.4))
    return {"x": x, "y_kind": kind, "y_box": np.repeat(known, 2, 1).astype(np.float32)}


def pairs(draw: np.random.Generator) -> Arrays:
    whole = boxes(draw)
    return {"x": whole["x"], "y_0": whole["y_kind"], "y_1": whole["y_box"][:, :1]}


def points(draw: np.random.Generator) -> Arrays:
    x, _ = learnable(draw, 2, 4, 4)
    return {"x": x, "y": np.digitize(x[:, 0], (-0.4, 0.4))}


def twins(draw: np.random.Generator) -> Arrays:
    x, _ = learnable(draw, 3, 6)
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]
    return {"x": x, "y": draw.random(SAMPLES, dtype=np.float32)}


def series(draw: np.random.Generator) -> Arrays:
    x, _ = learnable(draw, 8)
    return {"x": x, "y": (x[:, :4] * 0.5).astype(np.float32)}


def words(draw: np.random.Generator) -> Arrays:
    x, _ = learnable(draw, 8, 3)
    labels = draw.integers(1, 4, (SAMPLES, 3)) * (
        np.arange(3) < draw.integers(4, size=(SAMPLES, 1))
    )
    return {"x": x, "y": labels}


def unlabelled(draw: np.random.Generator) -> Arrays:
    x, known = learnable(draw, 6)
    return {"x": np.concatenate([known, -known, x[:, :2] * 0.1], 1)}


def heads(outputs: Any, labels: Labels) -> Tensor:
    kind = functional.cross_entropy(outputs[0], labels["0"], label_smoothing=0.1)
    return kind + 0.5 * functional.huber_loss(outputs[1], labels["1"], delta=0.5)


def metrics_of_heads(outputs: Any, labels: Labels) -> dict[str, Tensor]:
    return {
        "output_0_loss": functional.cross_entropy(outputs[0], labels["0"], label_smoothing=0.1),
        "output_0_accuracy": (outputs[0].argmax(1) == labels["0"]).double(),
        "output_1_loss": functional.huber_loss(outputs[1], labels["1"], delta=0.5),
        "output_1_mae": (outputs[1] - labels["1"]).abs(),
    }


def soft_dice(output: Tensor, labels: Tensor) -> Tensor:
    p, g = output.softmax(1), functional.one_hot(labels, own_losses.CLASSES).movedim(3, 1)
    overlap, sizes = (p * g).sum((2, 3)), p.sum((2, 3)) + g.sum((2, 3))
    return 1 - ((2 * overlap + 1) / (sizes + 1)).mean()


TASKS = {
    "detection": Task(
        "Boxes",
        "own_losses:detection",
        lambda o, y: own_losses.detection(o, y)[0].mean(),
        boxes,
        metrics=lambda o, y: own_losses.detection(o, y)[1],
    ),
    "views": Task(
        "Boxes", "own_losses:of_views", lambda o, y: own_losses.of_views(o, y).mean(), boxes
    ),
    "segmentation": Task("Points", "dice", soft_dice, points),
    "multi-task": Task(
        "Pair",
        "0=cross-entropy,smoothing=0.1 + 1=huber,delta=0.5,weight=0.5",
        heads,
        pairs,
        '[{output = "0", loss = "cross-entropy,smoothing=0.1"}, '
        '{output = "1", loss = "huber,delta=0.5", weight = 0.5}]',
        metrics_of_heads,
    ),
    "triplet": Task(
        "Twins", "own_losses:triplet", lambda o, y: own_losses.triplet(o, y).mean(), twins
    ),
    "no labels": Task(
        "Coder",
        "own_losses:restored",
        lambda o, y: own_losses.restored(o, y).mean(),
        unlabelled,
    ),
    "speech": Task("Speech", "own_losses:spoken", own_losses.spoken, words),
    "quantiles": Task("Forecast", "own_losses:pinball", own_losses.pinball, series),
}
