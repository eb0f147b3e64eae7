"""What a device's measured bundles say about its runtimes, as notes of a plan."""

from collections import defaultdict

from msgspec import UNSET

from device_agent.runtime.runtime_packages import LITERT
from profiles.documents.bundle_profile import Profile
from profiles.documents.device_profile import DeviceProfile
from profiles.text_formatting import format_bytes, format_seconds


def runtime_notes(device: DeviceProfile) -> list[str]:
    """A line for each bundle that was measured with several runtimes on the device.

    The bundles are whatever its owner has measured, in most cases not those of the plan. So the
    line only says what was measured; the device itself tries the runtimes on its submodel.
    """
    trainings = () if device.trainings is UNSET else device.trainings
    same = defaultdict[object, list[Profile]](list)
    for one in trainings:
        # A file that somebody sent in may state that training takes no time.
        if one.of_role("train") and not one.validity.invalid and one.train.median_s > 0:
            about = (one.submodel, one.structure, one.batch_size, one.method.threads)
            same[about].append(one)
    return [line(group) for group in same.values() if len(group) > 1]


def line(group: list[Profile]) -> str:
    """Compare the fastest of `group`, profiles of one bundle with several runtimes, to the next."""
    fast, slow, *_ = sorted(group, key=lambda one: one.train.median_s)
    # `--runtime` chooses among the runtimes of ONNX bundles only.
    if any(one.machine.runtime.startswith(LITERT) for one in (fast, slow)):
        choice = "`edgetailor export --format` chooses between them"
    else:
        choice = "with `--runtime auto` the agent tries both on its submodel"
    return (
        f"measured on the device, perhaps with another model: a batch of {fast.submodel} takes "
        f"{_figures(fast)}, {_figures(slow)}; {choice}"
    )


def _figures(one: Profile) -> str:
    time, memory = format_seconds(one.train.median_s), format_bytes(one.peak_bytes)
    return f"{time} and {memory} with {one.machine.runtime}"
