"""What a plan says about the runtimes of a device whose owner has measured bundles."""

import datetime

from msgspec.structs import replace

from made_calibration import DEVICE
from made_profiles import MACHINE, full, sliced
from profiles.cost_model.submodel_choice import Budgets
from profiles.documents.bundle_profile import Profile, Validity
from profiles.documents.device_profile import DeviceProfile
from toolkit.planning.plan import decide

TODAY = datetime.date.fromisoformat(DEVICE.date)


def with_litert(profile: Profile) -> Profile:
    return replace(profile, machine=replace(MACHINE, runtime="ai-edge-litert 2.1.0"))


def notes(*trainings: Profile) -> list[str]:
    device: DeviceProfile = replace(DEVICE, trainings=trainings, memory_bytes=10**9)
    planned = decide(device, [], (), Budgets(memory=10**9), TODAY)
    return [note for note in planned.notes if note.startswith("measured on the device")]


def test_the_faster_runtime_is_named_with_its_memory() -> None:
    """A batch of `full` takes 0.4 s with one runtime and 0.3 s with the other."""
    assert notes(full(), with_litert(full(0.75)), sliced()) == [
        "measured on the device, perhaps with another model: a batch of full takes 300.00 ms and "
        "105.0 MB with ai-edge-litert 2.1.0, 400.00 ms and 120.0 MB with onnxruntime 1.31.1; "
        "`edgetailor export --format` chooses the runtime"
    ]


def test_only_comparable_measurements_are_compared() -> None:
    other = with_litert(full(0.75))
    assert notes(full(), replace(other, batch_size=8)) == []
    assert notes(full(), replace(other, structure="2" * 64)) == []
    assert notes(full(), replace(other, validity=Validity(invalid=("throttled",)))) == []
    assert notes(full(0.0), with_litert(full(0.0))) == []


def test_a_calibration_alone_says_nothing_about_runtimes() -> None:
    planned = decide(DEVICE, [], (), Budgets(memory=10**9), TODAY)
    assert not any("measured on the device" in note for note in planned.notes)
