"""Chooses the submodel with which the devices of a kind predict. Needs no torch."""

from dataclasses import dataclass, replace

from toolkit.families import check_spec
from toolkit.submodels.spec import Spec

WHOLE = "full"
REDUCING = ("low-rank", "width", "depth")
"""Families whose submodel predicts alone, from weights of the global model."""
PERSONAL = ("cp", "pfedme")


@dataclass(frozen=True)
class PredictingSubmodel:
    """A submodel to predict with, and the reason.

    Attributes:
        spec: The submodel.
        reason: Why the devices get it, as a clause.
        staged: The slice that the devices train; None if they do not train a slice. If the devices
            have too little memory for the whole graph, the stages of the slice predict one after
            another.
    """

    spec: str
    reason: str
    staged: str | None = None


def predicting_submodel(trained: str) -> PredictingSubmodel:
    """The submodel with which devices predict if they train the submodel `trained`.

    Raises SpecError if the spec is wrong.

    Examples:
        >>> predicting_submodel("slice:0.42").spec
        'full'
    """
    spec = check_spec(trained)
    if spec.family in REDUCING:
        return PredictingSubmodel(
            str(spec), f"the global model, reduced to the devices' {spec.family} submodel"
        )
    if spec.family in PERSONAL:
        return PredictingSubmodel(
            WHOLE, "the whole global model, because the personal ones never leave their devices"
        )
    if spec.family == "slice":
        return PredictingSubmodel(
            WHOLE,
            "the whole model, because a slice predicts with its frozen layers, too",
            staged=str(unrounded(spec)),
        )
    return PredictingSubmodel(WHOLE, "the whole model, as the devices train it")


def unrounded(spec: Spec) -> Spec:
    """The slice `spec` without `recording` and `frozen`, which save space only in training."""
    kept = {name: value for name, value in spec.options.items() if name == "skip"}
    return replace(spec, options=kept)


PLANNED = PredictingSubmodel(
    WHOLE, "the whole model, because a plan chooses only what each device trains"
)
"""The choice for kinds whose submodels are planned."""
