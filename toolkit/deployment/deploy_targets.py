"""Writes the inference bundles of several targets, from one trained model."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from profiles.errors import EdgeTailorError
from toolkit.deployment.deploy import Deployed, deploy_to
from toolkit.deployment.targets import Target
from toolkit.deployment.trained_model import TrainedModel
from toolkit.exporting.tiers import TierLog

logger = logging.getLogger(__name__)

DEPLOY_VERSION = 1


@dataclass(frozen=True)
class Outcome:
    """The bundle of one target, or the error that prevented it."""

    target: Target
    deployed: Deployed | None = None
    error: EdgeTailorError | None = None


def deploy_targets(trained: TrainedModel, targets: Sequence[Target]) -> list[Outcome]:
    """Write a bundle for each of `targets`. If one bundle fails, the others are still written.

    Raises DataError if the held-out data do not fit the model. Then nothing is written.
    """
    trained.evaluation  # noqa: B018
    outcomes = []
    for target in targets:
        log = TierLog(logger, {"tier": target.name})
        try:
            outcomes.append(Outcome(target, deploy_to(trained, target, log.info)))
        except EdgeTailorError as error:
            log.info("failed")
            outcomes.append(Outcome(target, error=error))
    return outcomes


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """The highest exit code of all errors; 0 if every bundle was written."""
    return max((outcome.error.exit_code for outcome in outcomes if outcome.error), default=0)


def as_json(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The document that `deploy --json` prints."""
    return {"version": DEPLOY_VERSION, "bundles": [_as_json(outcome) for outcome in outcomes]}


def _as_json(outcome: Outcome) -> dict[str, object]:
    document: dict[str, object] = {"name": outcome.target.name, "out": str(outcome.target.out)}
    if outcome.deployed is not None:
        document["card"] = msgspec.to_builtins(outcome.deployed.card)
    if outcome.error is not None:
        error = outcome.error
        document |= {"error": str(error), "code": error.code, "exit_code": error.exit_code}
    return document
