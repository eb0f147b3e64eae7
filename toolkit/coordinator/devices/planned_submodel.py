"""Finds the planned submodel of a new device, with a planner and the device's profile."""

from typing import Any, Protocol

from device_agent.formats.protocol.problems import NEEDS_PROFILE, PREPARING
from profiles.documents.device_profile import DeviceProfile
from toolkit.coordinator.devices.join_validation import check_profile
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.refusals import RefusalError, conflict


class SubmodelPlanner(Protocol):
    """Assigns submodels. `devices.submodel_assignment.Planner` implements it."""

    def submodel(self, kind: DeviceKind, device: DeviceProfile) -> str:
        """The submodel for a device of `kind`. Raises RefusalError if nothing fits it."""


def planned_submodel(
    kind: DeviceKind, sent: dict[str, Any] | None, planner: SubmodelPlanner | None
) -> str:
    """The submodel for a device of `kind` that sent the profile `sent`.

    Raises RefusalError: 409 without a profile or if nothing fits, 422 for a malformed profile, 503
    while the planner is being made.
    """
    # Checked before the planner, so that the device can measure until the planner is ready.
    if sent is None:
        raise conflict(
            "The coordinator chooses the submodel of a device of kind {kind!r} by its profile. "
            "Send `profile`, the output of `edgetailor-agent calibrate --json`.",
            code=NEEDS_PROFILE,
            kind=kind.name,
        )
    profile = check_profile(sent)
    if planner is None:
        raise RefusalError(
            "The coordinator is still computing submodels for devices of kind {kind!r}. This "
            "takes minutes the first time. Ask again soon.",
            status=503,
            code=PREPARING,
            kind=kind.name,
        )
    return planner.submodel(kind, profile)
