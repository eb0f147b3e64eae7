"""Which submodel a device that enrols gets, where its kind leaves that to a plan."""

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from device_agent.formats.protocol import NOTHING_FITS
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError, NothingFitsError
from toolkit.aggregation.federation import Federation
from toolkit.coordinator.federation_config import CoordinatorConfig, DeviceKind
from toolkit.coordinator.refusals import conflict
from toolkit.planning.candidate_specs import specs
from toolkit.planning.plan import decide, looked_at
from toolkit.planning.plan_display import as_key, check_fits
from toolkit.planning.submodel_workloads import Impossible, Known, Workloads


@dataclass(frozen=True)
class Planner:
    """What every submodel of the federation's model has a device do."""

    known: tuple[Known, ...]
    impossible: tuple[Impossible, ...] = ()

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        """The strongest submodel within the budgets of `kind` on `device`.

        Raises RefusalError (409) where none is, saying what would be needed, and where the profile
        does not say enough.
        """
        if not (kind.memory or device.memory_bytes or device.memory_available_bytes):
            raise conflict(
                "memory-unknown",
                f"How much memory {device.name} has could not be measured there: set `memory` of "
                f"the kind {kind.name!r} in the coordinator's configuration.",
            )
        try:
            today = datetime.datetime.now(datetime.UTC).date()
            planned = decide(device, self.known, self.impossible, kind.budgets, today)
            check_fits(planned, as_key)
        except NothingFitsError as error:
            raise conflict(
                NOTHING_FITS,
                f"{error} What a device of kind {kind.name!r} may take is in the federation's "
                "file: ask whoever runs the coordinator.",
            ) from None
        except InputError as error:
            raise conflict("unusable-profile", str(error)) from None
        assert planned.plan.chosen is not None
        return planned.plan.chosen.submodel


def planner(
    config: CoordinatorConfig, model: Federation, say: Callable[[str], None]
) -> Planner | None:
    """Look at every submodel of `model`, if a kind of device asks for that.

    Takes seconds for each that was not looked at before; `say` hears of those.
    """
    if not any(kind.planned for kind in config.devices):
        return None
    workloads = Workloads(model.module, config.input_shape, config.training)
    names = specs(model.module, config.input_shape, config.training.batch_size)
    known, impossible = looked_at(workloads, names)
    return Planner(tuple(known), impossible)
