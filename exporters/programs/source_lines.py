"""Where in the user's own source something comes from: for messages, where it is known."""

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from device_agent.formats.atomic_files import shown
from exporters.programs.recorded_graph import writes_in_place

FRAME = re.compile(r'File "(.+?)", line (\d+)')
OTHERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
        Path(sysconfig.get_paths()["stdlib"]),
    )
)
"""Folders of code that is not the user's; what is installed into the last one may be."""
LIBRARIES = ("fft_", "linalg_")
"""Of ATen: their functions turn into others of the same library when they are traced."""


def of_error(error: BaseException) -> str:
    """Where the user's code was when `error` was raised, as ` (net.py, line 3: ...)`; or empty."""
    frames = traceback.extract_tb(error.__traceback__)
    return bracketed(innermost((frame.filename, frame.lineno or 0) for frame in frames))


def of_node(node: Node) -> str:
    """Where the user's code called the operator `node`, with its module; or empty."""
    return bracketed(module_of(node), line_of(node))


def line_of(node: Node) -> str:
    """The line of the user's code that called the operator `node`, with its file; or empty."""
    found = FRAME.findall(node.meta.get("stack_trace") or "")
    return innermost((file, int(line)) for file, line in found)


def of_operator(source: GraphModule | None, operator: str) -> str:
    """Where the user's code calls what an ATen `operator` of a traced step belongs to; or empty.

    `source` is the model as it was recorded. A gradient's operator, like avg_pool2d_backward, is
    found under the name of what it is the gradient of.
    """
    name = stem(operator)
    if name.startswith("as_strided"):
        return of_write(source)
    nodes = [
        (stem(node.target._schema.name), node)
        for node in (source.graph.nodes if source is not None else ())
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    alike = [(recorded, node) for recorded, node in nodes if related(recorded, name)]
    if not alike:
        return ""
    return of_node(max(alike, key=lambda pair: (pair[0] == name, len(pair[0])))[1])


def of_write(source: GraphModule | None) -> str:
    """Where the user's code first writes into a part of a tensor; or empty.

    The gradient of that is strided, whatever the part was.
    """
    for node in source.graph.nodes if source is not None else ():
        written = node.args[0] if writes_in_place(node) else None
        if isinstance(written, Node) and is_view(written) and not writes_in_place(written):
            return of_node(node)
    return ""


def is_view(node: Node) -> bool:
    """Whether `node` is a part or another shape of its input, in the same memory."""
    target = node.target
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(value.alias_info is not None for value in returns)


def first_line(error: Exception) -> str:
    """What `error` says first, without a full stop; its kind where it says nothing."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def related(recorded: str, forward: str) -> bool:
    """Whether the operator `recorded` may turn into `forward` when it is traced.

    Either may say more: conv3d becomes convolution, max_pool2d max_pool2d_with_indices.
    """
    begins = "conv" if forward == "convolution" else forward
    both = any(recorded.startswith(name) and forward.startswith(name) for name in LIBRARIES)
    return recorded.startswith(begins) or forward.startswith(recorded) or both


def stem(operator: str) -> str:
    """An operator's name without what only tells its variants apart."""
    name = operator.removeprefix("aten::").strip("_").removesuffix("_backward")
    return name.removeprefix("special_").removeprefix("bessel_")


def module_of(node: Node) -> str:
    """`module 'blocks.1'`, the innermost, or nothing."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][0] if stack else ""
    return f"module {name!r}" if name else ""


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """The last of `frames` (file, line) that is the user's."""
    own = [(file, line) for file, line in frames if is_users(file)]
    if not own:
        return ""
    file, line = own[-1]
    return f"{shown(Path(file))}, line {line}: {linecache.getline(file, line).strip()}"


def bracketed(*places: str) -> str:
    """Those of `places` that are known, to follow what they are the place of."""
    known = [place for place in places if place]
    return f" ({', '.join(known)})" if known else ""


def is_users(file: str) -> bool:
    """Whether `file` is neither torch's, nor Python's, nor the exporters'."""
    installed = "site-packages" in file and not file.startswith(OTHERS[:2])
    return installed or not file.startswith(("<", *OTHERS))
