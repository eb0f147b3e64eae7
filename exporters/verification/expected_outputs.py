"""Computes the outputs of a signature in float64 by PyTorch, without the exporters' formulas."""

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from exporters.programs.program import ProgramSignature
from exporters.programs.tracing import autograd_graph, in_double_precision
from exporters.verification.double_precision import reference
from exporters.verification.graph_values import LazyOutputs
from profiles.errors import ExportError

LARGE = 2**25
"""If a training step returns more bytes of state, its outputs are computed one by one. A whole step
in float64 takes ten times the memory of the weights."""


class ExpectedOutputs:
    """Computes the outputs of a signature in float64, by PyTorch's kernels and autograd."""

    def __init__(self, signature: ProgramSignature, order: Sequence[int]) -> None:
        """Take a signature, and the indices of its outputs in the wanted order."""
        self._signature, self._order = signature, order
        self._lazy: LazyOutputs | None = None
        shapes = [port.shape for port in signature.outputs if port.state is not None]
        state = sum(4 * math.prod(size or 1 for size in shape) for shape in shapes)
        if signature.trains and state > LARGE:
            try:
                graph = in_double_precision(autograd_graph(signature))
            except ExportError:  # torch cannot trace its own operators: compute all at once
                return
            self._lazy = LazyOutputs(graph, order)

    def of(self, feeds: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the value of each output for the inputs `feeds`."""
        if self._lazy is not None:
            yield from self._lazy.run([feeds[port.name] for port in self._signature.inputs])
            return
        results = reference(self._signature, feeds)
        for number in self._order:
            yield number, results.pop(self._signature.outputs[number].name)
