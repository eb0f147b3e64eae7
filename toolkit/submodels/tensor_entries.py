"""Tensor table entries for the global model's own parameters and buffers."""

from collections.abc import Iterable

from device_agent.formats.manifest import Role, TensorEntry
from exporters.programs.captured import Captured
from toolkit.submodels.training_config import TrainingConfig


def statistics_role(training: TrainingConfig) -> Role:
    """What a device does with running statistics: track and send them, or only hold them."""
    return "buffer" if training.batch_norm == "global" else "frozen"


def dense_entries(captured: Captured, names: Iterable[str], role: Role) -> tuple[TensorEntry, ...]:
    """One entry for each of `names` (parameters or buffers of the model) in `role`."""
    return tuple(
        TensorEntry(
            name=name, role=role, dtype="float32", shape=captured.shape(name), stands_for=name
        )
        for name in names
    )
