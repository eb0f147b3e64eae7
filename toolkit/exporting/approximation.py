"""How much of the global model a submodel's factors hold when they leave the server."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.submodel import Submodel, shapes_of


@dataclass(frozen=True)
class Fit:
    """What the factors hold: 1 - ||W - composed factors|| / ||W||, Frobenius norms.

    Of all factorized weights together, and of `tensor`, which they hold the least of.
    """

    all: float
    least: float
    tensor: str

    def __str__(self) -> str:
        """One line for a person."""
        return f"fit of the factors {self.all:.2f}, least {self.least:.2f} for {self.tensor!r}"


def fit(submodel: Submodel, values: Mapping[str, Tensor], weights: GlobalModel) -> Fit | None:
    """The fit of the factors among `values`, cut from `weights`; None where nothing is factorized.

    A weight of zeros is held whatever its factors are.
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
        norms[name] = max(float(weights.tensors[name].norm()), 1e-30)
    worst = max(lost, key=lambda name: lost[name] / norms[name])
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    together = sum(part**2 for part in lost.values()) ** 0.5
    return Fit(1 - together / total, 1 - lost[worst] / norms[worst], worst)
