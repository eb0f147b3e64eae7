"""Export several submodels of one model, each for a tier of devices."""

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profiles.errors import EdgeTailorError
from toolkit.exporting.model_export import (
    EXPORT_VERSION,
    Exported,
    Request,
    as_json,
    export_from,
    load_origin,
    save_weights,
)
from toolkit.exporting.output_places import check_places
from toolkit.toml_files import Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierResult:
    """The bundle of one tier, or the error of its export."""

    tier: Tier
    exported: Exported | None = None
    error: EdgeTailorError | None = None


def export_tiers(request: Request, tiers: Sequence[Tier]) -> list[TierResult]:
    """Export each tier to a folder in `request.out` that has the tier's name.

    If the export of one tier fails, the other tiers are still exported.

    Args:
        request: The model and the options; `spec` and `out` are replaced for each tier.
        tiers: The submodels and the names of their folders.

    Returns:
        A bundle or an error for each tier, in the order of `tiers`.

    Raises:
        InputError: An output folder or the weights cannot be used. Nothing is written.
        ModelError: The model cannot be loaded. Nothing is written.
    """
    requests = [replace(request, spec=t.submodel, out=request.out / t.name) for t in tiers]
    # Check all folders before the first export: an export takes seconds to minutes.
    for own in requests:
        check_places(own.out, own.save_weights, own.force)
    origin = load_origin(request)
    results = []
    for tier, own in zip(tiers, requests, strict=True):
        log = TierLog(logger, {"tier": tier.name})
        try:
            results.append(TierResult(tier, export_from(origin, own, log)))
        except EdgeTailorError as error:
            log.info("failed")
            results.append(TierResult(tier, error=error))
    save_weights(origin, request)
    return results


class TierLog(logging.LoggerAdapter[logging.Logger]):
    """Prefixes every message with the name of its tier."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """See LoggerAdapter."""
        return f"{(self.extra or {})['tier']}: {msg}", kwargs


def exit_code(results: Sequence[TierResult]) -> int:
    """The highest exit code of all errors; 0 if no tier failed."""
    return max((result.error.exit_code for result in results if result.error), default=0)


def tiers_as_json(results: Sequence[TierResult]) -> dict[str, object]:
    """The document that `export --json` prints for several bundles."""
    return {"version": EXPORT_VERSION, "bundles": [_as_json(result) for result in results]}


def _as_json(result: TierResult) -> dict[str, object]:
    document: dict[str, object] = {"name": result.tier.name, "submodel": result.tier.submodel}
    if result.exported is not None:
        document |= {k: v for k, v in as_json(result.exported).items() if k != "version"}
    if result.error is not None:
        error = result.error
        document |= {"error": str(error), "code": error.code, "exit_code": error.exit_code}
    return document
