"""Evaluating a bundle on this device without training it."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device_agent.data.data_source import Data
from device_agent.formats.bundle import open_bundle, training_of
from device_agent.formats.update import Evaluation
from device_agent.training.bundle_training import local_data
from device_agent.training.form_choice import in_blocked_form
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions


def evaluate_bundle(
    folder: str | Path,
    data: Data,
    *,
    threads: int = 0,
    personal: Mapping[str, np.ndarray] | None = None,
) -> Evaluation:
    """Evaluate the submodel of a bundle on local data.

    If the schedule records activations, they are recorded first.

    Args:
        folder: The bundle.
        data: A file, a folder, `module:callable`, or the arrays x and y.
        threads: Threads of the runtime; 0 for one per core.
        personal: Personal tensors of an earlier round. Without them the bundle's personal model,
            if it has one, starts from its initial state.

    Returns:
        Loss and number of correct predictions.

    Raises:
        BundleError: The bundle cannot be used or has no signature for evaluation.
        DataError: The data do not fit the bundle.
    """
    bundle = in_blocked_form(open_bundle(Path(folder)))
    local = local_data(bundle, data)
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainingOptions(threads=threads)
        run = ScheduleRun(bundle, local, Path(scratch), options, dict(personal or {}))
        run.prepare()
        return run.evaluate(training_of(bundle), np.arange(len(local)))
