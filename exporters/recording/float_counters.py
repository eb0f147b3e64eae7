"""Integer buffers with which a model's own code counts, such as steps, become float32.

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
    """Make float32 of each integer buffer with which code of `model` counts, in place.

    Returns:
        The same model.
    """
    anywhere = set[str]()
    by_kind = dict[type, set[str]]()
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if not kind.__module__.startswith(("torch.", "builtins")):
            by_kind[kind], others = counted_names(kind)
            anywhere |= others
    for module in model.modules():
        own = set[str]().union(*(by_kind.get(kind, ()) for kind in type(module).__mro__))
        for name, value in module._buffers.items():
            counts = name in own | anywhere and name != BATCHES
            if counts and value is not None and value.dtype in INTEGERS:
                module._buffers[name] = value.to(torch.float32)
    return model


def counted_names(kind: type) -> tuple[set[str], set[str]]:
    """The attributes with which methods of the class `kind` count, except `__init__`.

    Code counts with `self.count += 1`, `self.count.add_(1)` or `self.count = self.count + 1`.
    Attributes that are only set, such as ids, do not count.

    Returns:
        The attributes of the module itself, and those of other modules, as in
        `self.teacher.count += 1`.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, as in an interactive session
        return set(), set()
    own, others = set[str](), set[str]()
    methods = [m for m in getattr(tree, "body", []) if getattr(m, "name", "") != "__init__"]
    for node in (node for method in methods for node in ast.walk(method)):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign):
            read = {ast.dump(part) for part in ast.walk(node.value)}
            targets = [t for t in node.targets if ast.dump(t).replace("Store", "Load") in read]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr in ("add_", "sub_") else []
        for target in map(attribute_of, targets):
            if isinstance(target, ast.Attribute):
                is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
                (own if is_own else others).add(target.attr)
    return own, others


def attribute_of(target: ast.AST) -> ast.AST:
    """The attribute that `target` writes, as `self.count` in `self.count.data[0]`."""
    while isinstance(target, ast.Subscript) or (
        isinstance(target, ast.Attribute) and target.attr == "data"
    ):
        target = target.value
    return target
