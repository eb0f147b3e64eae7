"""`train_bundle` with its options as keywords, as tests like to write them."""

from pathlib import Path
from typing import Any

from device_agent.data.data_source import Data
from device_agent.training import bundle_training
from device_agent.training.bundle_training import Trained
from device_agent.training.training_options import TrainingOptions


def train_bundle(
    folder: str | Path,
    data: Data,
    out: str | Path,
    *,
    runtime: str | None = None,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    **more: Any,
) -> Trained:
    """Train as `bundle_training.train_bundle` does; `more` are its other arguments."""
    options = TrainingOptions(
        runtime=runtime, threads=threads, seed=seed, validation=validation, max_memory=max_memory
    )
    return bundle_training.train_bundle(folder, data, out, options, **more)
