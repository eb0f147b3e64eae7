"""Cut a model into a submodel, with the family that the spec names."""

import traceback
from dataclasses import replace
from pathlib import Path

from torch import nn

from device_agent.formats.manifest import Train
from exporters.programs.interrupts import raise_if_interrupted
from exporters.programs.program import with_recomputation
from exporters.programs.source_lines import first_line
from profiles.errors import EdgeTailorError, ModelError, SpecError
from profiles.project_urls import issues_url
from toolkit.families import check_spec, family_named
from toolkit.submodels.class_rows import mark_class_rows
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import recomputed
from toolkit.submodels.submodel import SplitRequest, Submodel

MOST_WORK = {"some": 0.15, "yes": None}
"""Maps a value of the spec option `recompute` to `most_work` of `Recomputation` (`program.py`)."""


def split(
    model: nn.Module,
    spec: str | Spec,
    sample_shape: tuple[int, ...],
    training: TrainingConfig | None = None,
) -> Submodel:
    """Cut a model into the submodel that a spec describes.

    Call it once for each kind of device, because a submodel is used in all rounds.

    Args:
        model: The global model.
        spec: The submodel spec, for example `low-rank:0.25`.
        sample_shape: Shape of one sample, without the batch, for example `(3, 32, 32)`.
        training: How devices train. None means the defaults of `TrainingConfig`.

    Returns:
        The submodel. Pass it to `export` to get a bundle.

    Raises:
        SpecError: If the spec is wrong, or is not possible for this model.
        ModelError: If the model cannot be recorded, or if the family fails because of a mistake in
            EdgeTailor.

    Examples:
        >>> from toolkit.models import mnist_dnn
        >>> submodel = split(mnist_dnn(), "low-rank:0.5,keep=0", (1, 28, 28))
        >>> submodel.counts.params
        45310
    """
    parsed = check_spec(spec)
    family = family_named(parsed.family)
    try:
        submodel = family.split(
            SplitRequest(model, sample_shape, parsed, training or TrainingConfig())
        )
    except (EdgeTailorError, MemoryError):
        raise
    except Exception as error:  # a defect in one family must not stop the work on other families
        raise_if_interrupted(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            "{spec}: the family {family} failed on this model ({error}: {reason}; {file}, line "
            "{line}). This is a mistake in EdgeTailor: please report it at {issues_url} with your "
            "model. Other families may work.",
            code="model.family-failed",
            family=parsed.family,
            error=type(error).__name__,
            spec=str(parsed),
            reason=first_line(error),
            file=Path(frame.filename).name,
            line=frame.lineno,
            issues_url=issues_url(),
        ) from error
    trains = [i for i in submodel.program.schedule if isinstance(i, Train)]
    if training is not None and training.is_private and any(i.privacy is None for i in trains):
        raise SpecError(
            "{spec}: the family {family} cannot be combined with sample_clip. Its training has "
            "several stages or a personal model, which depend on samples without noise. Use full, "
            "width, depth or low-rank.",
            code="spec.not-private",
            spec=str(parsed),
            family=parsed.family,
        )
    word = recomputed(parsed)
    if word in MOST_WORK:
        program = with_recomputation(submodel.program, MOST_WORK[word])
        submodel = replace(submodel, program=program)
    return mark_class_rows(submodel)
