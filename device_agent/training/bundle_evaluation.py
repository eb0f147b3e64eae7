"""Judging a bundle on this device: what it predicts before, or without, any training."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import open_bundle, training_of
from device_agent.formats.update import Evaluation
from device_agent.training.bundle_training import local_data
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions


def evaluate_bundle(
    folder: str | Path,
    data: str,
    *,
    threads: int = 0,
    personal: Mapping[str, np.ndarray] | None = None,
) -> Evaluation:
    """Run the signature `evaluate` of the bundle in `folder` over the local `data`.

    Activations are recorded first where the schedule says so. A personal model is judged where the
    bundle has one, that in `personal` or else as it begins. Raises BundleError or DataError.
    """
    bundle = open_bundle(Path(folder))
    local = local_data(bundle, data)
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainingOptions(threads=threads)
        run = ScheduleRun(bundle, local, Path(scratch), options, dict(personal or {}))
        run.prepare()
        return run.judge(training_of(bundle), np.arange(len(local)))
