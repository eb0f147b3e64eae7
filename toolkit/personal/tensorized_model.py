"""The local model with CP factors, and the personal model that a device keeps (TDPFed).

Names in the state of a device: `personal:NAME` is the personal copy of the global parameter NAME,
and `NAME#2` is the factor of its third mode.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import Tensors
from exporters.recording.captured import Captured
from toolkit.factorization.cp_decomposition import compose, products_by_mode
from toolkit.submodels.submodel import dense_tensor_entries


def personal_name(name: str) -> str:
    """State name of the personal copy of the global parameter `name`."""
    return f"personal:{name}"


def factor_name(name: str, mode: int) -> str:
    """State name of the factor of mode `mode` (from 0) of the global parameter `name`."""
    return f"{name}#{mode}"


class Tensorized:
    """The parameters of a local model, some of them as CP factors.

    Attributes:
        names: Names of all parameters of the global model.
        ranks: CP rank by the name of each parameter that is factorized.
        factors: Entries of the factors.
        dense: Entries of the other parameters.
        personal: Entries of the personal model.
        modes: Number of modes by the name of each parameter that is factorized.
    """

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
                name=personal_name(name),
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
        """Entries of the local model: factors and dense parameters."""
        return (*self.factors, *self.dense)

    def factors_of(self, tensors: Tensors, name: str) -> list[Tensor]:
        """The factors (I_n, R) of the parameter `name`, by mode."""
        return [tensors[factor_name(name, mode)] for mode in range(self.modes[name])]

    def composed(self, tensors: Tensors) -> dict[str, Tensor]:
        """The composed tensor [[A]] of every parameter, by the global parameter's name."""
        return {
            name: compose(self.factors_of(tensors, name)) if name in self.ranks else tensors[name]
            for name in self.names
        }

    def values(self, tensors: Tensors) -> dict[str, Tensor]:
        """Composed weights by their names, and factors by their names in `cp_layers.py`."""
        factors = {
            f"{name.removesuffix('weight')}factors.{mode}": tensors[factor_name(name, mode)]
            for name in self.ranks
            for mode in range(self.modes[name])
        }
        return {**self.composed(tensors), **factors}

    def gaps(self, tensors: Tensors) -> dict[str, Tensor]:
        """The difference [[A]] - theta of every parameter, by the global parameter's name."""
        centres = self.composed(tensors)
        return {name: centre - tensors[personal_name(name)] for name, centre in centres.items()}

    def gradients(
        self, tensors: Tensors, gaps: Mapping[str, Tensor], penalty: float | Tensor
    ) -> dict[str, Tensor]:
        """Gradients of penalty / 2 * ||theta - [[A]]||^2 with respect to the uploaded tensors.

        Args:
            tensors: The state of the device.
            gaps: `gaps(tensors)`.
            penalty: The factor lambda of the penalty.

        Returns:
            The gradient of each uploaded tensor by its state name.
        """
        by_name = {}
        for name, gap in gaps.items():
            if name in self.ranks:
                factors = self.factors_of(tensors, name)
                for mode, gradient in enumerate(factor_gradients(gap, factors)):
                    by_name[factor_name(name, mode)] = penalty * gradient
            else:
                by_name[name] = penalty * gap
        return by_name


def distance(gaps: Mapping[str, Tensor]) -> Tensor:
    """The squared distance ||theta - [[A]]||^2, summed over all parameters."""
    return torch.stack([gap.square().sum() for gap in gaps.values()]).sum()


def factor_gradients(gap: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """Gradients of 1/2 ||[[A]] - theta||^2 (TDPFed eq. 25 of the appendix, without lambda).

    The paper's gradient of A_n is A_n V_n - theta_(n) K_n, with K_n the Khatri-Rao product of the
    other factors. Because A_n V_n = [[A]]_(n) K_n, the gradient equals gap_(n) K_n. Taking the
    difference first loses less to rounding.

    Args:
        gap: [[A]] - theta (I_1, ..., I_N).
        factors: A_n (I_n, R).
    """
    return list(products_by_mode(gap, factors))
