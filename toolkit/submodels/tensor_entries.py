"""Entries of the tensor table for parameters and buffers of the global model."""

from collections.abc import Iterable

from device_agent.formats.manifest import Role, TensorEntry
from exporters.recording.captured import Captured
from toolkit.submodels.hyperparameters import TrainingConfig


def statistics_role(training: TrainingConfig) -> Role:
    """Role of running statistics: `buffer` if devices update them, else `frozen`."""
    return "buffer" if training.batch_norm == "global" else "frozen"


def dense_tensor_entries(
    captured: Captured, names: Iterable[str], role: Role
) -> tuple[TensorEntry, ...]:
    """One entry with `role` for each parameter or buffer in `names`."""
    return tuple(
        TensorEntry(
            name=name, role=role, dtype="float32", shape=captured.shape(name), stands_for=name
        )
        for name in names
    )
