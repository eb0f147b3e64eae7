"""Cutting a model by any family."""

from torch import nn

from toolkit.families import check_spec, family_named
from toolkit.submodels.class_rows import mark_class_rows
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import Submodel


def split(
    model: nn.Module,
    spec: str | Spec,
    sample_shape: tuple[int, ...],
    training: TrainingConfig | None = None,
) -> Submodel:
    """Cut a model into the submodel that a spec describes.

    Args:
        model: The global model.
        spec: The submodel spec, for example `low-rank:0.25`.
        sample_shape: Shape of one sample, without the batch, for example `(3, 32, 32)`.
        training: How devices train; the defaults of `TrainingConfig` if None.

    Returns:
        The submodel. Pass it to `export` to get a bundle.

    Raises:
        SpecError: If the spec is wrong, or asks for something that the model cannot give.
        ModelError: If the model cannot be recorded.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> submodel = split(mnist_dnn(), "low-rank:0.5,keep=0", (1, 28, 28))
        >>> submodel.counts.params
        45310
    """
    parsed = check_spec(spec)
    family = family_named(parsed.family)
    return mark_class_rows(family.split(model, sample_shape, parsed, training or TrainingConfig()))
