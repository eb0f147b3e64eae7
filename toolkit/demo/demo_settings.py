"""The settings of the demo: model, training, fleet and data split."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.submodels.hyperparameters import TrainingConfig

MODEL = "toolkit.models:digits_cnn"
INPUT_SHAPE = (1, 8, 8)
TRAINING = TrainingConfig(
    batch_size=16, epochs=6, learning_rate=0.03, momentum=0.9, round_decay=0.85
)
FLEET = (
    DeviceKind(name="desktop", submodel="full", count=3),
    DeviceKind(name="tablet", submodel="cp:2.0", count=1),
    DeviceKind(name="phone", submodel="low-rank:0.5", count=2),
    DeviceKind(name="board", submodel="slice:units.2", count=2),
)
LARGER_MODEL = "toolkit.models:vgg8"
LARGER_NAME = "VGG8 on 32 x 32 images"
LARGER_SHAPE = (3, 32, 32)
LARGER_BATCH = 128
"""At this batch size activations need more memory than weights, as in most trainings."""
LARGER_SPECS = ("full", "cp:2.0", "low-rank:0.5", "slice:convs.2")
"""Submodels of the larger model, from the fleet's families. Only their memory is measured."""
THREADS = 1
"""Threads of each training: the demo has more processes than most machines have cores."""
HELD_OUT = 0.2
"""Share of the digits that no device gets. Models are evaluated on them."""
EVALUATION_SHARE = 0.1
"""Share of its samples that each device keeps apart, to judge the models that it gets."""
PREDICTED = 10
"""How many held-out digits each device predicts at the end."""
ALPHA = 0.5
"""Dirichlet concentration of the split; the smaller, the fewer classes a device gets."""


@dataclass(frozen=True)
class Member:
    """One device of the fleet."""

    name: str
    kind: DeviceKind


def fleet(all_full: bool) -> tuple[DeviceKind, ...]:
    """The kinds of device; with `all_full` each gets the full model."""
    if all_full:
        return tuple(kind.model_copy(update={"submodel": "full"}) for kind in FLEET)
    return FLEET


def members(kinds: Sequence[DeviceKind]) -> list[Member]:
    """All devices of the fleet, named desktop-1, desktop-2, tablet-1 and so on."""
    return [
        Member(f"{kind.name}-{number}", kind)
        for kind in kinds
        for number in range(1, (kind.places or 0) + 1)
    ]
