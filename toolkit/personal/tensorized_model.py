"""A model's weights as CP factors, beside the personal model that a device keeps (TDPFed).

Names in a device's state: `personal:NAME` is the personal twin of the global parameter NAME,
`NAME#2` the factor of its third mode.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from exporters.programs.captured import Captured
from exporters.programs.program import Tensors
from toolkit.factorization.decompose_weights import compose, products_by_mode
from toolkit.submodels.tensor_entries import dense_tensor_entries


def personal(name: str) -> str:
    """State name of the personal twin of the global parameter `name`."""
    return f"personal:{name}"


def factor_name(name: str, mode: int) -> str:
    """State name of the factor of mode `mode` (from 0) of the global parameter `name`."""
    return f"{name}#{mode}"


class Tensorized:
    """The parameters of a model: those in `ranks` as factors, the others as they are."""

    def __init__(self, captured: Captured, ranks: Mapping[str, int]) -> None:
        self.names = list(captured.parameters)
        self.ranks = dict(ranks)
        self.factors = tuple(
            TensorEntry(
                name=factor_name(name, mode),
                role="parameter",
                dtype="float32",
                shape=(size, rank),
                stands_for=name,
                factor=str(mode),
            )
            for name, rank in self.ranks.items()
            for mode, size in enumerate(captured.shape(name))
        )
        dense = [name for name in self.names if name not in self.ranks]
        self.dense = dense_tensor_entries(captured, dense, "parameter")
        self.personal = tuple(
            TensorEntry(
                name=personal(name),
                role="personal",
                dtype="float32",
                shape=captured.shape(name),
                stored=False,
            )
            for name in self.names
        )
        self.modes = {name: len(captured.shape(name)) for name in self.ranks}

    @property
    def uploaded(self) -> tuple[TensorEntry, ...]:
        """Factors and dense parameters: the local model."""
        return (*self.factors, *self.dense)

    def factors_of(self, tensors: Tensors, name: str) -> list[Tensor]:
        """The factors (I_n, R) of the parameter `name`, by mode."""
        return [tensors[factor_name(name, mode)] for mode in range(self.modes[name])]

    def composed(self, tensors: Tensors) -> dict[str, Tensor]:
        """[[A]] of every parameter, by the global parameter's name."""
        return {
            name: compose(self.factors_of(tensors, name)) if name in self.ranks else tensors[name]
            for name in self.names
        }

    def values(self, tensors: Tensors) -> dict[str, Tensor]:
        """Composed weights under their own names, and factors as `cp_layers.py` calls them."""
        factors = {
            f"{name.removesuffix('weight')}factors.{mode}": tensors[factor_name(name, mode)]
            for name in self.ranks
            for mode in range(self.modes[name])
        }
        return {**self.composed(tensors), **factors}

    def gaps(self, tensors: Tensors) -> dict[str, Tensor]:
        """[[A]] - theta of every parameter, by the global parameter's name."""
        centres = self.composed(tensors)
        return {name: centre - tensors[personal(name)] for name, centre in centres.items()}

    def gradients(
        self, tensors: Tensors, gaps: Mapping[str, Tensor], penalty: float
    ) -> dict[str, Tensor]:
        """Of penalty / 2 * ||theta - [[A]]||^2, for every uploaded tensor, by its state name.

        `gaps` are those of the same `tensors`.
        """
        found = {}
        for name, gap in gaps.items():
            if name in self.ranks:
                factors = self.factors_of(tensors, name)
                for mode, gradient in enumerate(factor_gradients(gap, factors)):
                    found[factor_name(name, mode)] = penalty * gradient
            else:
                found[name] = penalty * gap
        return found


def distance(gaps: Mapping[str, Tensor]) -> Tensor:
    """||theta - [[A]]||^2 over all parameters."""
    return torch.stack([gap.square().sum() for gap in gaps.values()]).sum()


def factor_gradients(gap: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """Gradients of 1/2 ||[[A]] - theta||^2 (TDPFed eq. 25 of the appendix, lambda apart).

    A_n V_n - theta_(n) K_n with K_n the Khatri-Rao product of the other factors, and A_n V_n =
    [[A]]_(n) K_n: the difference, `gap`, is taken first, where little is lost to rounding.
    gap (I_1, ..., I_N), A_n (I_n, R).
    """
    return list(products_by_mode(gap, factors))
