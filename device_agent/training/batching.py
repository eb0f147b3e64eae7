"""Chooses samples by index: for validation, and for each batch."""

import logging

import numpy as np

from device_agent.data.array_files import row_slices
from device_agent.data.data_checks import MIN_SAMPLES
from device_agent.training.training_options import TrainingOptions
from profiles.errors import DataError
from profiles.text_formatting import counted

log = logging.getLogger(__name__)


def held_out(samples: int, share: float) -> np.ndarray:
    """Choose the samples for validation.

    The choice depends only on the arguments. So a restarted training and later rounds hold out the
    same samples.

    Args:
        samples: Number of samples.
        share: Share of the samples to hold out, from 0 to 1.

    Returns:
        Indices of the held-out samples, ascending.

    Raises:
        DataError: Too few samples remain for training or for validation.
    """
    count = round(samples * share)
    if share and (count < 1 or samples - count < MIN_SAMPLES):
        raise DataError(
            "With a validation share of {share:g}, {trained} of {counted} remain for training and "
            "{held_out} for validation. Training needs at least {least}, validation at least 1.",
            code="data.too-few-to-validate",
            samples=samples,
            share=share,
            counted=counted(samples, "sample"),
            trained=samples - count,
            held_out=count,
            least=MIN_SAMPLES,
        )
    return np.sort(np.random.default_rng(samples).permutation(samples)[:count])


def held_out_for(samples: int, options: TrainingOptions) -> np.ndarray:
    """Choose the samples on which a training with `options` does not train, see `held_out`.

    A device with too few samples for a federated evaluation trains on all its samples instead.

    Raises:
        DataError: The owner asks for a validation, but there are too few samples.
    """
    try:
        return held_out(samples, options.held_out)
    except DataError as error:
        if options.validation:
            raise
        log.warning("%s So this device does not evaluate models for the federation.", error)
        return np.empty(0, np.int64)


def batches(samples: int, size: int, order: np.random.Generator | None) -> list[np.ndarray]:
    """Split `samples` samples into batches.

    If a single sample remains at the end, it joins the last batch, because batch normalisation
    cannot train on one sample.

    Args:
        samples: Number of samples.
        size: Samples in a batch. The last batch may be smaller, or larger by one sample.
        order: Generator that shuffles the samples. If it is None, the samples keep their order.

    Returns:
        Arrays of sample indices. Each index is in exactly one array.
    """
    indices = np.arange(samples) if order is None else order.permutation(samples)
    starts = list(range(0, samples, size))
    if len(starts) > 1 and samples - starts[-1] == 1:
        starts.pop()
    # Without samples there is no batch: `zip` ends at once.
    return [indices[a:b] for a, b in zip(starts, [*starts[1:], samples], strict=False)]


def classes_in(y: np.ndarray, samples: np.ndarray, classes: int) -> np.ndarray:
    """Find the classes that occur among some samples.

    Args:
        y: Labels of all samples, shape (n,).
        samples: Indices of the samples to look at.
        classes: Number of classes.

    Returns:
        A float32 array (classes,): 1 for a class that occurs, 0 for all other classes.
    """
    occurs = np.zeros(classes, bool)
    for rows in row_slices(samples):
        occurs |= np.isin(np.arange(classes), y[samples[rows]])
    return occurs.astype(np.float32)


ROUND_SEEDS = 100003
"""Distance between the seeds of two devices, so that their rounds have different seeds."""


def round_seed(seed: int, round_: int) -> int:
    """The seed for the round `round_` (from 1) of a device that has `seed`.

    Each round has a different order of the samples, and different devices have different seeds.
    """
    return seed * ROUND_SEEDS + round_
