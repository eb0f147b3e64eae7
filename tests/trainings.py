"""Training and evaluating as tests like to write it: options as keywords, settings from a plan."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from device_agent.data.data_source import Data
from device_agent.formats.bundle import open_bundle, training_of
from device_agent.formats.evaluation_counts import Evaluation, EvaluationRequest
from device_agent.formats.manifest import Initialise, Record
from device_agent.training import bundle_training
from device_agent.training.bundle_training import Trained, local_data
from device_agent.training.form_choice import in_device_form
from device_agent.training.schedule_interpreter import ScheduleRun
from device_agent.training.training_options import TrainingOptions
from edgetailor import TrainingConfig
from oracles import Plan, State


def train_bundle(
    folder: str | Path,
    data: Data,
    out: str | Path,
    *,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    evaluation: EvaluationRequest | None = None,
    **more: Any,
) -> Trained:
    """Train as `bundle_training.train_bundle` does; `more` are its other arguments."""
    options = TrainingOptions(
        threads=threads,
        seed=seed,
        validation=validation,
        max_memory=max_memory,
        evaluation=evaluation,
    )
    return bundle_training.train_bundle(folder, data, out, options, **more)


def personal_state(trained: Trained) -> State:
    """The tensors of a personal model after its training."""
    return {
        name.removeprefix("personal:"): torch.from_numpy(value).double()
        for name, value in trained.personal.items()
    }


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


def evaluate_bundle(folder: str | Path, data: Data, threads: int = 0) -> Evaluation:
    """Evaluate the submodel of a bundle on local data, as a training does after an epoch."""
    bundle = in_device_form(open_bundle(Path(folder)))
    local, options = local_data(bundle, data), TrainingOptions(threads=threads)
    with tempfile.TemporaryDirectory() as scratch:
        run = ScheduleRun(bundle, local, Path(scratch), options, {})
        for instruction in bundle.manifest.schedule:
            if isinstance(instruction, Record):
                run.record(instruction)
            elif isinstance(instruction, Initialise):
                run.initialise(instruction)
        return run.evaluate(training_of(bundle), np.arange(len(local))).means()
