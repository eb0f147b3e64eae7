"""The model with which a device of a federation predicts."""

from pathlib import Path

from device_agent.federation.default_state import default_state
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.state_folder import IDENTITY
from device_agent.formats.manifest import MANIFEST
from profiles.errors import InputError


def newest_model(state: Path | None = None, *, personal: bool = False) -> Path:
    """The folder of the bundle with which a device predicts.

    The device predicts with its current release. If it has no release, it predicts with the newest
    bundle of a round.

    Args:
        state: The device's state folder (default: the folder of this user).
        personal: Whether the bundle is for the device's personal model. This model fits only the
            bundle with which it was trained.

    Raises:
        InputError: The device has not joined, or has no bundle yet.
    """
    folder = DeviceState(state or default_state())
    folder.member()
    released = None if personal else folder.releases.current()
    if released is not None:
        return released
    if not (folder.bundle / MANIFEST).is_file():
        raise InputError(
            "This device has not received a model yet. It gets one in its first round: see "
            "`edgetailor-agent status`. Or give a bundle's folder.",
            code="state.no-model",
            path=str(folder.folder),
        )
    return folder.bundle


def refuse_state_folder(folder: Path) -> None:
    """Raise InputError if `folder`, given as a bundle, is the state folder of a device."""
    if (folder / IDENTITY).is_file():
        raise InputError(
            "{path} is the state folder of a device, not a bundle. Give this folder with --state, "
            "without BUNDLE: edgetailor-agent predict --state {path} --data FILE.",
            code="state.no-bundle",
            path=str(folder),
        )


def personal_model(state: Path | None = None) -> Path:
    """The file of the device's personal model. Raises InputError if there is none."""
    folder = DeviceState(state or default_state())
    if not folder.personal_file.is_file():
        raise InputError(
            "This device has no personal model. Devices get one when they train a cp or pfedme "
            "submodel.",
            code="state.no-personal-model-yet",
            path=str(folder.folder),
        )
    return folder.personal_file
