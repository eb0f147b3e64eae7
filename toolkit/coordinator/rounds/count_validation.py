"""Checks the counts with which a device judges a model, when the counts arrive."""

import math
from collections.abc import Sequence

from device_agent.formats.evaluation_counts import EvaluationCounts, EvaluationRequest, check_counts
from device_agent.formats.label_rule import LabelRule, label_rule
from device_agent.formats.manifest import ABSOLUTE, CORRECT, EVALUATE, LOSS, Manifest
from profiles.errors import UpdateError


def check_evaluation(
    given: Sequence[EvaluationCounts],
    manifest: Manifest,
    request: EvaluationRequest | None,
    origin: str,
) -> None:
    """Raise UpdateError unless `given` can be counts of this bundle, all on the same samples.

    Args:
        given: Counts of models on the samples that one device keeps apart.
        manifest: The manifest of the bundle that the device evaluated.
        request: The evaluation that the federation asks for.
        origin: The device, for messages.
    """
    by_class = any(counts.classes is not None for counts in given)
    if request is None or (by_class and not request.by_class):
        raise UpdateError(
            "{origin} sends counts {what}, but this federation does not ask for them. Set {key} "
            "in [evaluation], or use an agent of the coordinator's version.",
            code="update.unasked-evaluation",
            origin=origin,
            what="of an evaluation" if request is None else "by class",
            key="`share`" if request is None else "`by_class`",
        )
    for counts in given:
        check_counts(counts, origin, signed=_signed(manifest))
        problem = _misfit(counts, manifest)
        if problem is None and (counts.samples, counts.counted) != (
            given[0].samples,
            given[0].counted,
        ):
            problem = "its two models were evaluated on different samples"
        if problem is not None:
            raise UpdateError(
                "{origin} reports counts that do not fit its bundle: {problem}. Train the bundle "
                "again.",
                code="update.unfitting-evaluation",
                origin=origin,
                problem=problem,
            )


def _misfit(counts: EvaluationCounts, manifest: Manifest) -> str | None:
    """Why `counts` cannot come from a bundle with this manifest; None if they can."""
    signature = manifest.signatures.get(EVALUATE)
    if signature is None:
        return "the bundle cannot evaluate"
    counts_correct = any(port.name == CORRECT for port in signature.outputs)
    if (counts.correct is not None) != counts_correct:
        return "a classification must count correct predictions, and a regression must not"
    if counts.absolute_sum is not None and not any(p.name == ABSOLUTE for p in signature.outputs):
        return "absolute errors are counted only for a regression"
    outputs = {port.name for port in signature.outputs}
    if set(counts.metrics or {}) != outputs - {LOSS, CORRECT, ABSOLUTE}:
        return "its metrics are not those of the bundle's loss"
    labels = label_rule(manifest)
    most = counts.samples * math.prod(labels.shape or ())
    if counts.counted > most:
        return f"{counts.counted:,} labels, but {counts.samples:,} samples have at most {most:,}"
    classes = (LabelRule(manifest.classes).highest or 0) + 1
    if counts.classes is not None and len(counts.classes) != classes:
        return f"counts of {len(counts.classes)} classes, but the model has {classes}"
    return None


def _signed(manifest: Manifest) -> bool:
    """Whether the loss of a bundle may be below zero, as with a user's own loss."""
    return bool(label_rule(manifest).parts)
