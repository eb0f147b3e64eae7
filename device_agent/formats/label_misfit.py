"""Checks whether samples from pictures or CSV files have the labels that a model takes."""

from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Dtype
from device_agent.formats.packing import array_name
from device_agent.formats.preprocessing import Preprocessing, misfit


def misfit_of_labels(
    preprocessing: Preprocessing, labels: LabelRule, sample_shape: tuple[int, ...], dtype: Dtype
) -> str | None:
    """Explain why files do not fit a model with these samples and labels; None if files fit."""
    if labels.independent:
        return "its loss takes several labels of a sample, which only arrays can contain"
    if any(part.name for part in labels.parts):
        names = ", ".join(array_name("y", part) for part in labels.parts)
        return f"its loss takes labels by name, which only arrays can have: {names}"
    own = labels.as_read
    return misfit(
        preprocessing,
        sample_shape,
        dtype,
        None if own.dtype == "float32" else own.classes,
        own.shape,
        regression=own.dtype == "float32",
    )
