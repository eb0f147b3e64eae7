"""Finds the decomposition with a wrong formula, if the traced graph is wrong."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from exporters.decompositions import table
from exporters.decompositions.decomposition import Decompositions
from exporters.programs.composite_operators import Composites
from exporters.programs.program import ProgramSignature
from exporters.recurrence.recurrent_layers import RecurrenceLoops
from exporters.verification.double_precision import DoublePrecision, doubled
from exporters.verification.errors import distance

ROUNDING = 1e-12
"""Allowed rounding error of float64 results that cancel to almost zero."""


class DecompositionCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each decomposition and the operator that it replaces, in float64.

    Attributes:
        wrong: The first operator whose decomposition differs, and the names of the signature's
            inputs that the operator reads. None if no decomposition differs.
    """

    def __init__(self, forms: Decompositions, names: Mapping[int, str], tolerance: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrong: tuple[str, list[str]] | None = None
        self._forms, self._names, self._tolerance = {**table(), **forms}, names, tolerance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` in float64, and its decomposition on copies of the same inputs."""
        args, kwargs = tree_map(doubled, (args, kwargs or {}))
        form = self._forms.get(func) if self.wrong is None else None
        copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        with DoublePrecision():  # type: ignore[no-untyped-call]
            results = func(*args, **kwargs)
            instead = NotImplemented if form is None else form(*copies[0], **copies[1])
        if instead is not NotImplemented and not self._alike(instead, results):
            read = [self._names.get(x.data_ptr()) for x in tree_leaves(args) if is_tensor(x)]
            self.wrong = func._schema.name, [name for name in read if name is not None]
        return results

    def _alike(self, actual: object, right: object) -> bool:
        """Whether all tensors of two results agree."""
        pairs = zip(tensors(actual), tensors(right), strict=False)
        distances = [
            distance(first, second) for first, second in pairs if first.shape == second.shape
        ]
        # Gradients scaled by a learning rate are small, so the tolerance has no larger floor.
        return all(far <= self._tolerance * size + ROUNDING for far, size in distances)


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor with elements."""
    return isinstance(value, Tensor) and value.numel() > 0


def tensors(results: object) -> list[Tensor]:
    """The tensors with elements in `results`."""
    return [value for value in tree_leaves(results) if is_tensor(value)]


def wrong_decomposition(
    signature: ProgramSignature,
    forms: Decompositions,
    feeds: Mapping[str, Tensor],
    tolerance: float,
) -> tuple[str, list[str]] | None:
    """Find the first operator of `signature` whose decomposition is wrong.

    Args:
        signature: The function to run.
        forms: The writer's own decompositions.
        feeds: Inputs by name.
        tolerance: Largest error relative to the norm of a result.

    Returns:
        The operator's name, and the names of the inputs that it reads. None if all decompositions
        are correct.
    """
    given = {name: doubled(value) for name, value in feeds.items()}
    names = {value.data_ptr(): name for name, value in given.items()}
    check = DecompositionCheck(forms, names, tolerance)
    ports = [port.name for port in signature.inputs]

    def flat(*values: Tensor) -> list[Tensor]:
        results = signature.function(dict(zip(ports, values, strict=True)))
        return [results[port.name] for port in signature.outputs]

    with check, RecurrenceLoops(), Composites():
        functionalize(flat)(*(given[port] for port in ports))
    return check.wrong
