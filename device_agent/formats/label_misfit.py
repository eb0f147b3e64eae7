"""Whether samples from pictures or CSV files have the labels that a model takes."""

from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Dtype
from device_agent.formats.preprocessing import Preprocessing, misfit


def misfit_of_labels(
    preprocessing: Preprocessing, labels: LabelRule, sample_shape: tuple[int, ...], dtype: Dtype
) -> str | None:
    """Why files do not fit a model with these samples and labels; None if they do."""
    if len(labels.parts) > 1 or labels.independent:
        return "its loss takes several labels of a sample, which only arrays can hold"
    own = labels.as_read
    return misfit(
        preprocessing,
        sample_shape,
        dtype,
        None if own.dtype == "float32" else own.classes,
        own.shape,
        regression=own.dtype == "float32",
    )
