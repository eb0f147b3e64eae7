"""Judging a bundle on this device: what it predicts before, or without, any training."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.bundle import open_bundle
from device_agent.data import batches
from device_agent.profiler import training_of
from device_agent.training import LOSS, ScheduleRun, local_data, quiet
from profiles.errors import BundleError

EVALUATE = "evaluate"
CORRECT = "correct"


@dataclass(frozen=True)
class BundleEvaluation:
    """Mean `loss` over `samples` samples, and how many of them are `correct`.

    That is None for a regression.
    """

    samples: int
    loss: float
    correct: int | None


def evaluate_bundle(
    folder: str | Path,
    data: str,
    *,
    threads: int = 0,
    personal: Mapping[str, np.ndarray] | None = None,
) -> BundleEvaluation:
    """Run the signature `evaluate` of the bundle in `folder` over the local `data`.

    Activations are recorded first where the schedule says so. A personal model is judged where the
    bundle has one, that in `personal` or else as it begins. Raises BundleError or DataError.
    """
    bundle = open_bundle(Path(folder))
    signature = bundle.manifest.signatures.get(EVALUATE)
    if signature is None:
        raise BundleError(f"{folder} has no signature {EVALUATE!r}: export it again.")
    local = local_data(bundle, data)
    instruction = training_of(bundle)
    loss, correct = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        run = ScheduleRun(bundle, local, Path(scratch), threads, 0, dict(personal or {}), quiet)
        run.prepare()
        session = run.open(EVALUATE)
        for indices in batches(len(local), instruction.batch_size, None):
            results = session.run(run.feeds(signature, instruction.source, indices, {}))
            loss += float(results[LOSS]) * len(indices)
            correct += int(results.get(CORRECT, 0))
    counted = any(port.name == CORRECT for port in signature.outputs)
    return BundleEvaluation(len(local), loss / len(local), correct if counted else None)
