"""Chooses the submodel of a joining device, if the file names no submodel for the device's kind."""

import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass

from device_agent.formats.protocol.fleet import Preparation
from device_agent.formats.protocol.problems import NOTHING_FITS
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError, NothingFitsError
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.refusals import conflict
from toolkit.planning.parallel_workloads import ModelSource, Search
from toolkit.planning.plan import decide
from toolkit.planning.plan_reasons import as_key, check_fits
from toolkit.planning.submodel_workloads import Impossible, Known


@dataclass(frozen=True)
class Planner:
    """Chooses the submodel of a device. It knows the workload of each submodel."""

    known: tuple[Known, ...]
    impossible: tuple[Impossible, ...] = ()

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        """Return the strongest submodel that keeps the budgets of `kind` when `device` trains it.

        Raises RefusalError (409) if no submodel fits, or if the profile lacks a value. If no
        submodel fits, the error says what would be needed.
        """
        if not (kind.memory or device.memory_bytes or device.memory_available_bytes):
            raise conflict(
                "The memory of {device} could not be measured: set `memory` of the kind {kind!r} "
                "in the federation's file.",
                code="join.unknown-memory",
                kind=kind.name,
                device=device.name,
            )
        try:
            today = datetime.datetime.now(datetime.UTC).date()
            planned = decide(device, self.known, self.impossible, kind.budgets, today)
            check_fits(planned, as_key)
        except NothingFitsError as error:
            raise conflict(
                "{reason} The budgets of kind {kind!r} are in the federation's file: ask the "
                "operator of the coordinator.",
                code=NOTHING_FITS,
                kind=kind.name,
                reason=str(error),
            ) from None
        except InputError as error:
            raise conflict(
                "{problem}", code="join.unusable-profile", kind=kind.name, problem=str(error)
            ) from None
        assert planned.plan.chosen is not None
        return planned.plan.chosen.submodel


def make_planner(
    config: CoordinatorConfig,
    progress: Callable[[Preparation], None],
    stopping: threading.Event,
) -> Planner:
    """Create the planner of the `auto` kinds of `config`: compute the workloads of submodels.

    Takes seconds to a minute for each submodel that is not in the cache. Raises StoppedError if
    `stopping` is set before the end.
    """
    source = ModelSource(
        config.model,
        config.input_shape,
        config.training,
        config.weights,
        config.seed,
        config.known_inputs(),
    )
    limit = memory_limit([kind for kind in config.devices if kind.planned])
    known, impossible = Search(source, limit, progress, stopping).run()
    return Planner(tuple(known), impossible)


def memory_limit(kinds: list[DeviceKind]) -> int | None:
    """The most memory in bytes that any device of `kinds` may use; None if a kind has no limit."""
    limits = [kind.memory for kind in kinds]
    return None if None in limits else max(limit for limit in limits if limit is not None)
