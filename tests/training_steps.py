"""The training step of a model, and random inputs for it."""

from typing import Any

import numpy as np
from torch import nn

from edgetailor import TrainingConfig, split
from exporters.programs.program import ProgramSignature

CLASSES = 3
"""Labels are below this number."""


def train_step(
    model: nn.Module, shape: tuple[int, ...], spec: str = "full", **training: Any
) -> ProgramSignature:
    program = split(model, spec, shape, TrainingConfig(**training)).program
    return next(s for s in program.signatures if s.name == "train")


def drawn(
    signature: ProgramSignature, batch: int, draw: np.random.Generator
) -> dict[str, np.ndarray]:
    """Inputs by name: numbers above zero, as some of an optimizer's state has to be."""
    feeds: dict[str, np.ndarray] = {}
    for port in signature.inputs:
        shape = [batch if size is None else size for size in port.shape]
        if port.kind in ("labels", "seed"):
            feeds[port.name] = draw.integers(CLASSES, size=shape)
        elif port.kind == "scalar":
            feeds[port.name] = np.asarray(0.1, np.float32)
        else:
            feeds[port.name] = np.asarray(np.abs(draw.normal(0, 0.3, shape)), port.dtype)
    return feeds
