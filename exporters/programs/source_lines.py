"""Finds the line of the user's own source that caused an error or called an operator.

The functions return text for error messages, or an empty string if the line is unknown.
"""

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.fx import GraphModule, Node

from device_agent.formats.atomic_files import shown
from exporters.programs.recorded_graph import writes_in_place

FRAME = re.compile(r'File "(.+?)", line (\d+)')
# The slash at the end prevents a match with a folder whose name only starts in the same way.
OTHERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        Path(np.__file__).parent,
        Path(__file__).parents[1],
        Path(sysconfig.get_paths()["stdlib"]),
    )
)
"""Folders of code that is not the user's: torch, numpy, the exporters and Python itself.

Packages installed below the last folder may be the user's."""
LIBRARIES = ("fft_", "linalg_")
"""Prefixes of ATen libraries in which tracing turns an operator into another of the library."""


def place_of_error(error: BaseException) -> str:
    """The user's line that raised `error`, as ` (net.py, line 3: ...)`. Empty if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    return parenthesized(innermost((frame.filename, frame.lineno or 0) for frame in frames))


def is_raised_by_user(error: BaseException) -> bool:
    """Whether a `raise` or an `assert` in the user's own code raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not is_users(frames[-1].filename):
        return False
    return re.match(r"(raise|assert)\b|.*:\s*raise\b", frames[-1].line or "") is not None


def running_line() -> str:
    """The user's line that is running, without parentheses. Empty if unknown."""
    frames = traceback.extract_stack()
    return innermost((frame.filename, frame.lineno or 0) for frame in frames)


def place_of_node(node: Node) -> str:
    """Module and line of the user's code that called the operator `node`. Empty if unknown."""
    return parenthesized(quoted_module(node), line_of_node(node))


def line_of_node(node: Node) -> str:
    """File and line of the user's code that called the operator `node`. Empty if unknown."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return innermost((file, int(line)) for file, line in frames)


def place_of_operator(source: GraphModule | None, operator: str) -> str:
    """Module and line of the user's code that caused an operator of a traced step.

    If the operator computes a gradient, such as avg_pool2d_backward, this is the call of its
    forward operator.

    Args:
        source: The recorded model, or None if there is none.
        operator: Name of an ATen operator in the traced step.

    Returns:
        Text like ` (module 'head', net.py, line 3: ...)`, or an empty string.
    """
    name = stem(operator)
    if name.startswith("as_strided"):
        return place_of_write(source)
    nodes = [
        (stem(node.target._schema.name), node)
        for node in (source.graph.nodes if source is not None else ())
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    alike = [(recorded, node) for recorded, node in nodes if related(recorded, name)]
    if not alike:
        return ""
    # Prefer the same name, then the longest: max_pool2d_with_indices before max_pool2d.
    return place_of_node(max(alike, key=lambda pair: (pair[0] == name, len(pair[0])))[1])


def place_of_tensor(source: GraphModule | None, name: str) -> str:
    """Module and line of the first operator that reads the parameter or buffer `name`; or empty."""
    for node in source.graph.find_nodes(op="get_attr") if source is not None else ():
        if node.target == name and node.users:
            return place_of_node(next(iter(node.users)))
    return ""


def place_of_type(source: GraphModule | None, dtype: torch.dtype) -> str:
    """Module and line of the first operator whose result has the type `dtype`. Empty if unknown."""
    for node in source.graph.nodes if source is not None else ():
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == dtype:
            return place_of_node(node)
    return ""


def place_of_assignment(model: torch.nn.Module, name: str) -> str:
    """Line of the user's class that assigns a tensor to the attribute `name`. Empty if unknown.

    Args:
        model: The model.
        name: Name of a parameter or buffer, such as `head.weight`. Either the class of the model
            assigns it as `self.head.weight`, or the class of `head` assigns it as `self.weight`.
    """
    *path, attribute = name.split(".")
    for end in range(len(path), -1, -1):
        kind = type(model.get_submodule(".".join(path[:end])))
        assigned = ".".join(["self", *path[end:], attribute])
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind) or ""
        except (OSError, TypeError):
            continue
        found = [
            number
            for number, line in enumerate(lines, first)
            if re.search(rf"(?<![\w.]){re.escape(assigned)}\b[^=(\[]*=(?!=)", line)
        ]
        if found and is_users(file):
            return parenthesized(innermost([(file, found[-1])]))
    return ""


def place_of_write(source: GraphModule | None) -> str:
    """Module and line of the first write into a part of a tensor. Empty if unknown.

    PyTorch expresses the gradient of every such write with as_strided.
    """
    for node in source.graph.nodes if source is not None else ():
        written = node.args[0] if writes_in_place(node) else None
        if isinstance(written, Node) and is_view(written) and not writes_in_place(written):
            return place_of_node(node)
    return ""


def is_view(node: Node) -> bool:
    """Whether the result of `node` shares memory with its input, as for slices and reshapes."""
    target = node.target
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None for value in returns)


def first_line(error: Exception) -> str:
    """Shorten an error message to one line.

    Args:
        error: Any exception.

    Returns:
        The first line of the error's message without a full stop. If the message is empty, the name
        of the error's class.
    """
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def related(recorded: str, forward: str) -> bool:
    """Whether tracing may turn the operator `recorded` into `forward`.

    For example, conv3d becomes convolution, and max_pool2d becomes max_pool2d_with_indices.
    """
    begins = "conv" if forward == "convolution" else forward
    both = any(recorded.startswith(name) and forward.startswith(name) for name in LIBRARIES)
    library = any(forward == name + recorded for name in LIBRARIES)
    return recorded.startswith(begins) or forward.startswith(recorded) or both or library


def stem(operator: str) -> str:
    """Name of an ATen operator without the prefixes and suffixes of its variants."""
    name = operator.removeprefix("aten::").strip("_").removesuffix("_backward")
    return name.removeprefix("special_").removeprefix("bessel_")


def quoted_module(node: Node) -> str:
    """The innermost module of `node`, as `module 'blocks.1'`. Empty if unknown."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][0] if stack else ""
    return f"module {name!r}" if name else ""


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """Text for the last of `frames` (file, line) in the user's code. Empty if there is none."""
    own = [(file, line) for file, line in frames if is_users(file)]
    if not own:
        return ""
    file, line = own[-1]
    return f"{shown(Path(file))}, line {line}: {linecache.getline(file, line).strip()}"


def parenthesized(*places: str) -> str:
    """The known `places` as text in parentheses, with a space in front. Empty if none is known."""
    known = [place for place in places if place]
    return f" ({', '.join(known)})" if known else ""


def called_place() -> str:
    """The user's line that is running, in parentheses. Empty if unknown."""
    return parenthesized(running_line())


def is_users(file: str) -> bool:
    """Whether `file` is not part of torch, numpy, the exporters or Python."""
    # site-packages may lie below the standard library's folder, but counts as the user's code.
    installed = "site-packages" in file and not file.startswith(OTHERS[:3])
    return installed or not file.startswith(("<", *OTHERS))
