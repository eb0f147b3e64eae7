"""Where in the user's source an operator of a traced step comes from."""

import re
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = str(Path(torch.__file__).parent)


def place(source: GraphModule | None, operator: str) -> str:
    """` (model.py:12, module 'blocks.1')` for an ATen `operator`, as far as `source` tells.

    `source` is the model as it was recorded. A gradient's operator, like avg_pool2d_backward, is
    found under the name of what it is the gradient of.
    """
    if source is None:
        return ""
    nodes = [node for node in source.graph.nodes if node.op == "call_function"]
    alike = [node for node in nodes if related(name_of(node), stem(operator))]
    if not alike:
        return ""
    node = max(alike, key=lambda node: (name_of(node) == stem(operator), len(name_of(node))))
    found = [part for part in (line_of(node), module_of(node)) if part]
    return f" ({', '.join(found)})" if found else ""


def name_of(node: Node) -> str:
    """The stem of what `node` calls, which is aten.avg_pool2d.default or the like."""
    return stem(str(node.target).removeprefix("aten.").split(".")[0])


def related(name: str, forward: str) -> bool:
    """Whether the recorded operator `name` may turn into `forward` when it is traced.

    Either may say more: conv3d becomes convolution, max_pool2d max_pool2d_with_indices.
    """
    names = ("conv", forward) if forward == "convolution" else (forward, forward)
    return name.startswith(names[0]) or names[1].startswith(name)


def stem(name: str) -> str:
    """An operator's name without what only tells its variants apart."""
    return name.removeprefix("aten::").strip("_").removesuffix("_backward")


def line_of(node: Node) -> str:
    """`file.py:12`, the innermost line outside of torch, or nothing."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(path, line) for path, line in frames if not path.startswith(TORCH)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def module_of(node: Node) -> str:
    """`module 'blocks.1'`, the innermost, or nothing."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][0] if stack else ""
    return f"module {name!r}" if name else ""
