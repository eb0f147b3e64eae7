"""The submodel of a new device whose kind is planned for: it needs a profile and a planner."""

from typing import Any, Protocol

from device_agent.formats.protocol import NEEDS_PROFILE, PREPARING
from profiles.documents.device_profile import DeviceProfile
from toolkit.coordinator.devices.join_validation import check_profile
from toolkit.coordinator.federation_config import DeviceKind
from toolkit.coordinator.refusals import RefusalError, conflict


class SubmodelPlanner(Protocol):
    """Assigns submodels; `devices.submodel_assignment.Planner` is one."""

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        """The submodel for a device of `kind`. Raises RefusalError if nothing fits it."""


def planned_submodel(
    kind: DeviceKind, sent: dict[str, Any] | None, planner: SubmodelPlanner | None
) -> str:
    """The submodel for a device of `kind` that sent the profile `sent`.

    Raises RefusalError: 409 without a profile or if nothing fits, 422 for a malformed profile, 503
    while the planner is being made.
    """
    # Before the check of the planner: the device can measure while the planner is made.
    if sent is None:
        raise conflict(
            "The coordinator plans for devices of kind {kind!r}: send `profile`, the output of "
            "`edgetailor-agent calibrate --json`.",
            code=NEEDS_PROFILE,
            kind=kind.name,
        )
    profile = check_profile(sent)
    if planner is None:
        raise RefusalError(
            "The coordinator still looks at the submodels for devices of kind {kind!r}. This "
            "takes minutes the first time. Ask again soon.",
            status=503,
            code=PREPARING,
            kind=kind.name,
        )
    return planner.submodel(kind, profile)
