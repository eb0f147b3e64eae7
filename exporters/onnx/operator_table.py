"""torch.onnx's table of operators, built once in a process.

torch.onnx builds it again for every graph: it parses the source of all of its translations, which
takes a second of processor time, a third of lowering a small signature.
"""

import copy
from functools import cache
from typing import Any


@cache
def build_once() -> None:
    """Let torch.onnx copy its first table instead of building others.

    The table is private to torch. A version of torch that has none keeps its own way.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        build = ONNXRegistry.from_torchlib
    except (ImportError, AttributeError):
        return
    built = cache(build)

    def copied(*arguments: Any, **options: Any) -> Any:
        table = copy.copy(built(*arguments, **options))
        # An export adds its own translations to its table.
        table.functions = {operator: [*forms] for operator, forms in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]
