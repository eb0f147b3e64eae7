"""Notes in a plan that compare a device's runtimes, from bundles that the device has measured."""

from collections import defaultdict

from msgspec import UNSET

from profiles.documents.bundle_profile import Profile
from profiles.documents.device_profile import DeviceProfile
from profiles.text_formatting import format_bytes, format_seconds


def runtime_notes(device: DeviceProfile) -> list[str]:
    """A line for each submodel that was measured in both formats on the device.

    The device's owner chose which bundles to measure. Usually these bundles are not part of this
    plan, so the line only reports the measurements.
    """
    trainings = () if device.trainings is UNSET else device.trainings
    same = defaultdict[object, list[Profile]](list)
    for profile in trainings:
        # A profile from another person may claim that training takes no time.
        if profile.of_role("train") and not profile.validity.invalid and profile.train.median_s > 0:
            about = (
                profile.submodel, profile.structure, profile.batch_size, profile.method.threads
            )  # fmt: skip
            same[about].append(profile)
    return [line(group) for group in same.values() if len(group) > 1]


def line(group: list[Profile]) -> str:
    """Compare the two fastest profiles in `group`: profiles of one submodel in several runtimes."""
    fast, slow, *_ = sorted(group, key=lambda profile: profile.train.median_s)
    return (
        f"measured on the device, perhaps with another model: a batch of {fast.submodel} takes "
        f"{_figures(fast)}, {_figures(slow)}; `edgetailor export --format` chooses the runtime"
    )


def _figures(profile: Profile) -> str:
    time, memory = format_seconds(profile.train.median_s), format_bytes(profile.peak_bytes)
    return f"{time} and {memory} with {profile.machine.runtime}"
