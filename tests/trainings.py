"""Training as tests like to write it: options as keywords, and settings from an oracle's plan."""

from pathlib import Path
from typing import Any

from device_agent.data.data_source import Data
from device_agent.training import bundle_training
from device_agent.training.bundle_training import Trained
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig
from oracles import Plan


def train_bundle(
    folder: str | Path,
    data: Data,
    out: str | Path,
    *,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    **more: Any,
) -> Trained:
    """Train as `bundle_training.train_bundle` does; `more` are its other arguments."""
    options = TrainingOptions(
        threads=threads, seed=seed, validation=validation, max_memory=max_memory
    )
    return bundle_training.train_bundle(folder, data, out, options, **more)


def training_config(plan: Plan, **more: Any) -> TrainingConfig:
    """The product's settings for what the oracle trains by `plan`; `more` are further ones."""
    return TrainingConfig(
        batch_size=plan.batch_size,
        epochs=plan.epochs,
        learning_rate=plan.rate,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        **more,
    )
