"""Compares a release with the model that a device has, on the device's own samples."""

import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import UNSET

from device_agent.data.data_source import Data
from device_agent.data.local_data import LocalData, load_data
from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest
from device_agent.formats.label_rule import LabelRule, class_axis
from device_agent.formats.manifest import PREDICT, Manifest, Output
from device_agent.formats.packing import sample_parts
from device_agent.inference.predictor import CHUNK, Predictor
from device_agent.inference.scores import Scores, scores_of
from device_agent.system.process_memory import ran_out
from device_agent.training.batching import held_out
from device_agent.training.training_options import TrainingOptions
from profiles.errors import BundleError, DataError, LimitError
from profiles.text_formatting import counted

log = logging.getLogger(__name__)
SHARE = 0.1
"""Share of the samples in a trial, if the federation does not evaluate on devices."""
ACCURACY_MARGIN = 0.02
"""A release may have this much less accuracy."""
LOSS_MARGIN = 0.02
"""A release may have this much more loss, as a share of the loss of the present model."""
CHANCE = 0.05
"""A release counts as worse only if chance gives such a difference with less than this
probability."""
FLIPS = 2000
FEWEST = 5
"""With fewer samples, chance explains every difference, so there is no trial."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        reason: Why the release is not taken; None if it is taken.
        before: Counts of the present model; None if there is no present model.
        after: Counts of the release; None if there were no samples.

    If the predictions of a model are not finite, its counts are also None, because a report cannot
    contain such counts.
    """

    reason: str | None = None
    before: EvaluationCounts | None = None
    after: EvaluationCounts | None = None


def try_release(
    data: Data,
    options: TrainingOptions,
    offered: Path,
    present: Path | None,
    asked: EvaluationRequest | None,
) -> TrialResult:
    """Compare the release in `offered` with the present model on samples of this device.

    If the federation evaluates on devices, the trial uses the samples on which the device never
    trains. Otherwise the trial uses a tenth of the device's samples.

    Args:
        data: The local data.
        options: Threads and memory limit.
        offered: The bundle of the release.
        present: The bundle with which the device predicts now; None if there is no such bundle.
        asked: The evaluation that the federation asks for.

    Raises:
        BundleError: The release cannot be used.
        LimitError: The release needs more memory than the limits of this process allow.
        DataError: The local data do not fit the release.
    """
    predictor = Predictor(offered, threads=options.threads, max_memory=options.max_memory)
    manifest, meaning = predictor.bundle.manifest, predictor.meaning
    if manifest.output is UNSET:
        raise BundleError(
            "{path} is not an inference bundle, so it cannot be released.",
            code="release.no-inference-bundle",
            path=str(offered),
        )
    scratch = Path(tempfile.mkdtemp(dir=offered.parent, prefix=".trial."))
    try:
        if meaning == "outputs":
            log.info(
                "The release is taken without a comparison: only its loss knows what its outputs "
                "mean."
            )
            return TrialResult()
        local = trial_data(manifest, data, scratch)
        samples = trial_samples(len(local), asked)
        after, before = model_scores(predictor, local, samples, meaning), None
        del predictor  # one model is in memory at a time
        if present is not None:
            before = _scores_of_present(present, local, samples, options, meaning)
    except (MemoryError, OSError) as error:
        if ran_out(error) is None:
            raise
        raise LimitError(
            "Memory ran out in the trial of the release. Allow more memory.",
            code="release.out-of-memory",
        ) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if len(samples) < FEWEST:
        log.info(
            "The release is taken without a comparison: %s, too few to compare the models.",
            counted(len(samples), "sample"),
        )
    reason = unusable(after)
    if reason is None and before is not None and len(samples) >= FEWEST:
        reason = worse(before, after)
    return TrialResult(reason, counts_of(before), counts_of(after))


def labels_of(manifest: Manifest) -> LabelRule:
    """The labels for an inference bundle, which has no port for labels."""
    (output,) = manifest.signatures[PREDICT].outputs
    sizes = [0 if size is None else size for size in output.shape]
    if manifest.output == "numbers":
        return LabelRule(None, tuple(sizes[1:]), "float32")
    if manifest.output == "independent":
        return LabelRule(1, tuple(sizes[1:]), independent=True)
    if manifest.output == "ctc":
        return LabelRule(manifest.classes, None, sequence=True)
    if len(sizes) > 1:  # a single logit may have no axis for its class
        del sizes[class_axis(len(sizes))]
    return LabelRule(manifest.classes, tuple(sizes[1:]))


def trial_data(manifest: Manifest, data: Data, scratch: Path) -> LocalData:
    """The local data for the inference bundle with `manifest`."""
    return load_data(
        data,
        manifest.sample_shape,
        labels_of(manifest),
        manifest.sample_dtype,
        manifest.sample_limit,
        unpack_to=scratch,
        preprocessing=manifest.preprocessing,
        parts=sample_parts(manifest),
    )


def trial_samples(number: int, asked: EvaluationRequest | None) -> np.ndarray:
    """The samples of the trial. Empty if the device has too few samples."""
    try:
        return held_out(number, SHARE if asked is None else asked.share)
    except DataError:
        return np.empty(0, np.int64)


def model_scores(
    predictor: Predictor, local: LocalData, samples: np.ndarray, meaning: Output
) -> Scores:
    """The scores of a model on `samples` (indices)."""
    parts = []
    for start in range(0, len(samples), CHUNK):
        part = samples[start : start + CHUNK]
        predicted = predictor.predict_packed(local.samples(part))
        parts.append(scores_of(meaning, predicted, local.labels(part)))
    return Scores.joined(parts)


def _scores_of_present(
    present: Path, local: LocalData, samples: np.ndarray, options: TrainingOptions, meaning: Output
) -> Scores | None:
    """The scores of the present model; None if it cannot be used, so that any release is better."""
    try:
        predictor = Predictor(present, threads=options.threads, max_memory=options.max_memory)
        return model_scores(predictor, local, samples, meaning)
    except (BundleError, LimitError) as error:
        log.warning("The present model cannot be compared: %s", error)
        return None


def counts_of(scores: Scores | None) -> EvaluationCounts | None:
    """The counts for a report; None if there are no scores, or if the counts are not finite."""
    usable = scores is not None and len(scores.loss) and unusable(scores) is None
    return scores.counts() if scores is not None and usable else None


def unusable(scores: Scores) -> str | None:
    """The reason why the model with these scores cannot be used; None if it can be used."""
    finite = np.isfinite(scores.loss).all()
    return None if finite else "its predictions are not finite numbers"


def worse(before: Scores, after: Scores) -> str | None:
    """The reason why `after` is worse than `before`; None if it is not worse.

    Both are scores of the same samples. The release is worse if its accuracy is lower by more than
    ACCURACY_MARGIN. Without an accuracy, it is worse if its mean loss is higher by more than
    LOSS_MARGIN. In both cases, the difference must be larger than chance explains. Otherwise a few
    samples could decide that a good release is refused.
    """
    if (reason := unusable(after)) is not None:
        return reason
    if not np.isfinite(before.loss).all():
        return None
    labels = max(int(before.counted.sum()), 1)
    if before.correct is not None and after.correct is not None:
        lost = (before.correct - after.correct).astype(np.float64)
        figures = [f"{right.sum() / labels:.1%}" for right in (before.correct, after.correct)]
        if lost.sum() / labels > ACCURACY_MARGIN and _chance(lost) < CHANCE:
            return f"accuracy {figures[1]} on {len(lost)} own samples; present model: {figures[0]}"
        return None
    lost = after.loss - before.loss
    if lost.sum() > LOSS_MARGIN * before.loss.sum() and _chance(lost) < CHANCE:
        figures = [f"{score.loss.sum() / labels:.4g}" for score in (before, after)]
        return f"loss {figures[1]} on {len(lost)} own samples; present model: {figures[0]}"
    return None


def _chance(lost: np.ndarray) -> float:
    """The p-value of a paired randomisation test: how probable a loss like `lost` is by chance.

    If the models are equally good, each sample's difference could as well have the other sign. The
    result is the probability that the sum of such differences is at least the sum of `lost`.
    """
    lost = lost[lost != 0]
    signs = np.random.default_rng(0)
    more = sum(
        float(signs.choice((-1.0, 1.0), len(lost)) @ lost) >= lost.sum() * (1 - 1e-9)
        for _ in range(FLIPS)
    )
    return float(more + 1) / (FLIPS + 1)
