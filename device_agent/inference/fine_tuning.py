"""Fine-tunes a release on this device, and compares the result with the release."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import load_file, save

from device_agent.data.data_source import Data
from device_agent.formats.atomic_files import fingerprint, write_folder
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest
from device_agent.formats.manifest import MANIFEST, WEIGHTS, encode
from device_agent.formats.update import read_update
from device_agent.inference.predictor import Predictor
from device_agent.inference.release_trial import (
    FEWEST,
    SHARE,
    counts_of,
    model_scores,
    trial_data,
    trial_samples,
    unusable,
)
from device_agent.inference.scores import Scores
from device_agent.training.training_options import TrainingOptions
from profiles.errors import BundleError
from profiles.text_formatting import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FineTuned:
    """The scores of a release and of its fine-tuned form, on samples that the training leaves out.

    Attributes:
        bundle: The folder of the bundle with the fine-tuned model; None if the fine-tuned model is
            not better.
        released: Counts of the release.
        tuned: Counts of the fine-tuned model.
    """

    bundle: Path | None = None
    released: EvaluationCounts | None = None
    tuned: EvaluationCounts | None = None


def fine_tune(
    train: Callable[..., object],
    data: Data,
    options: TrainingOptions,
    training: Path,
    released: Path,
    scratch: Path,
    asked: EvaluationRequest | None,
    on_batch: Callable[[], None],
) -> FineTuned:
    """Train the released model on the samples of this device, and compare both models.

    The comparison uses samples that this training leaves out: the samples for federated evaluation,
    or a tenth of all samples if there is no such evaluation. The fine-tuned model is better if it
    predicts more samples correctly. If both models predict equally many samples correctly, or if
    there is no accuracy, the model with the lower loss is better. If the process is killed, the
    next call continues the training.

    Args:
        train: Trains a bundle, like `train_bundle`.
        data: The local data.
        options: Threads, seed and memory limit.
        training: The training bundle that starts from the released model.
        released: The inference bundle of the release.
        scratch: A folder for the training. The caller removes it.
        asked: The evaluation that the federation asks for.
        on_batch: Called before each batch.

    Raises:
        BundleError: A bundle cannot be used.
        LimitError: The training needs more memory than the limits of this process allow.
        DataError: The local data do not fit the bundle.
        UpdateError: The training diverged.
    """
    bundle = open_bundle(training)
    if any(entry.role == "personal" for entry in bundle.manifest.tensors):
        raise BundleError(
            "{path} has a personal model, so it cannot be used to fine-tune a release.",
            code="release.personal-model",
            path=str(training),
        )
    request = asked or EvaluationRequest(share=SHARE)
    scratch.mkdir(parents=True, exist_ok=True)
    present = Predictor(released, threads=options.threads, max_memory=options.max_memory)
    meaning = present.meaning
    if meaning == "outputs":
        log.info("The release is not fine-tuned: only its loss knows what its outputs mean.")
        return FineTuned()
    local = trial_data(present.bundle.manifest, data, scratch)
    samples = trial_samples(len(local), request)
    if len(samples) < FEWEST:
        log.info(
            "The release is not fine-tuned: %s, too few to compare the models.",
            counted(len(samples), "sample"),
        )
        return FineTuned()
    before = model_scores(present, local, samples, meaning)
    del present  # one model is in memory at a time
    update = scratch / "update"
    apart = replace(options, evaluation=replace(request, by_class=False))
    train(training, data, update, apart, on_batch=on_batch, force=True)
    _, tensors = read_update(update)
    folder = scratch / "bundle"
    write_folder(folder, with_tensors(bundle, tensors), force=True)
    tuned = Predictor(folder, threads=options.threads, max_memory=options.max_memory)
    after = model_scores(tuned, local, samples, meaning)
    chosen = folder if is_better(after, before) else None
    return FineTuned(chosen, counts_of(before), counts_of(after))


def is_better(after: Scores, before: Scores) -> bool:
    """Whether the fine-tuned model is better than the release, on the same samples."""
    if unusable(after) is not None:
        return False
    if after.correct is None or before.correct is None:
        return bool(after.loss.sum() < before.loss.sum())
    more = int(after.correct.sum()) - int(before.correct.sum())
    return more > 0 or (more == 0 and bool(after.loss.sum() < before.loss.sum()))


def with_tensors(bundle: Bundle, tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The files of `bundle`, with `tensors` instead of the bundle's own tensors."""
    weights = load_file(bundle.folder / WEIGHTS)
    data = save({**weights, **tensors})
    files = {p.name: p.read_bytes() for p in bundle.folder.iterdir() if p.name != MANIFEST}
    entries = bundle.manifest.files | {WEIGHTS: fingerprint(data)}
    manifest = msgspec.structs.replace(bundle.manifest, files=entries)
    return {**files, WEIGHTS: data, MANIFEST: encode(manifest)}
