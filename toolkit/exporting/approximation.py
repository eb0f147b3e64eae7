"""How well a submodel's factors approximate the global model that they were cut from."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.submodel import Submodel, shapes_of


@dataclass(frozen=True)
class Fit:
    """The fit of factors: 1 - ||W - composed factors|| / ||W||, with Frobenius norms.

    Attributes:
        all: The fit of all factorized weights together.
        least: The lowest fit of a weight.
        tensor: The name of that weight.
    """

    all: float
    least: float
    tensor: str

    def __str__(self) -> str:
        """The fit as one line of text."""
        return f"fit of the factors {self.all:.2f}, least {self.least:.2f} for {self.tensor!r}"


def fit(submodel: Submodel, values: Mapping[str, Tensor], weights: GlobalModel) -> Fit | None:
    """Compare a submodel's factors with the weights that they were cut from.

    Args:
        submodel: The submodel.
        values: Its tensors, cut from `weights`.
        weights: The global model.

    Returns:
        The fit, or None if no weight is factorized. A weight of zeros has the fit 1.
    """
    table = [e for e in submodel.program.tensors if e.factor is not None]
    if not table:
        return None
    family = recovering_family(submodel.spec)
    composed = family.recover(values, table, shapes_of(weights.tensors))
    lost, norms = {}, {}
    for name, value in composed.items():
        dense = value.dense() if isinstance(value, Product) else value
        lost[name] = float((weights.tensors[name] - dense).norm())
        # A weight of zeros has the norm 0: do not divide by it.
        norms[name] = max(float(weights.tensors[name].norm()), 1e-30)
    worst = max(lost, key=lambda name: lost[name] / norms[name])
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    together = sum(part**2 for part in lost.values()) ** 0.5
    return Fit(1 - together / total, 1 - lost[worst] / norms[worst], worst)
