"""torch.onnx's table of operators, built once in a process.

torch.onnx builds it again for every graph: it parses the source of all of its translations, which
takes a second of processor time, more than lowering a small signature.
"""

import copy
from functools import cache
from typing import Any

from torch._decomp import decomposition_table

from exporters.decompositions import table
from exporters.decompositions.decomposition import Decomposition

OPSET = 18
"""The opset of torch.onnx's own translations; others would need a conversion."""


@cache
def operators() -> dict[Any, list[Any]]:
    """What torch.onnx translates, by name; from now on torch.onnx copies this table.

    The table is private to torch. A version of torch that has none keeps its own way.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        build = cache(ONNXRegistry.from_torchlib)
        known: dict[Any, list[Any]] = build(OPSET).functions
    except (ImportError, AttributeError):
        return {}

    def copied(opset_version: int = OPSET) -> Any:
        registry = copy.copy(build(opset_version))
        # An export adds its own translations to its table.
        registry.functions = {name: [*forms] for name, forms in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]
    return known


@cache
def missing_translations() -> dict[Any, Decomposition]:
    """PyTorch's decompositions of operators that neither torch.onnx nor our table knows."""
    translated, ours = operators(), table()
    return {
        operator: form
        for operator, form in decomposition_table.items()
        if operator not in ours and operator.name() not in translated  # type: ignore[no-untyped-call]
    }
