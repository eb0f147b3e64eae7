"""Integer buffers that a model's own code changes, such as counts of steps, become float32.

Devices send and the server averages float32 tensors. float32 holds integers up to 2^24 exactly.
"""

import ast
import inspect
import textwrap

import torch
from torch import nn

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BATCHES = "num_batches_tracked"
"""The counter of batch norms, which only counts: recordings leave it out."""


def with_float_counters(model: nn.Module) -> nn.Module:
    """Make float32 of each integer buffer of `model` that code of its classes writes, in place.

    Returns:
        The same model.

    Examples:
        >>> class Steps(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("count", torch.tensor(0))
        ...     def forward(self, x):
        ...         self.count += 1
        ...         return x
        >>> with_float_counters(Steps()).count
        tensor(0.)
    """
    kinds = {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if not kind.__module__.startswith(("torch.", "builtins"))
    }
    written = {name for kind in kinds for name in written_names(kind)} - {BATCHES}
    for module in model.modules():
        for name, value in module._buffers.items():
            if name in written and value is not None and value.dtype in INTEGERS:
                module._buffers[name] = value.to(torch.float32)
    return model


def written_names(kind: type) -> set[str]:
    """The attributes into which methods of the class `kind` write, except `__init__`."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, as in an interactive session
        return set()
    methods = [m for m in getattr(tree, "body", []) if getattr(m, "name", "") != "__init__"]
    found = set()
    for node in (node for method in methods for node in ast.walk(method)):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method.endswith("_") and not method.endswith("__"):
                targets = [node.func.value]
        found |= {name for target in targets for name in (attribute_of(target),) if name}
    return found


def attribute_of(target: ast.AST) -> str:
    """The name of the attribute that `target` writes, as `count` in `self.count[0]`; or empty."""
    while isinstance(target, ast.Subscript) or (
        isinstance(target, ast.Attribute) and target.attr == "data"
    ):
        target = target.value
    return target.attr if isinstance(target, ast.Attribute) else ""
