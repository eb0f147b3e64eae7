"""The library's front door to the families."""

from torch import nn

from toolkit.families import family_named
from toolkit.submodels.spec import Spec, parse_spec
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.training_config import TrainingConfig


def split(
    model: nn.Module,
    spec: str | Spec,
    sample_shape: tuple[int, ...],
    training: TrainingConfig | None = None,
) -> Submodel:
    """Cut `model`, which takes samples of `sample_shape`, as `spec` says.

    Raises SpecError where the spec is malformed or asks for what the model cannot give, ModelError
    where the model cannot be recorded.
    """
    parsed = parse_spec(spec) if isinstance(spec, str) else spec
    family = family_named(parsed.family)
    return family.split(model, sample_shape, parsed, training or TrainingConfig())
