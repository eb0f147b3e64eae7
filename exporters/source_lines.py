"""Where in the user's own source something comes from: for messages, where it is known."""

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from device_agent.files import shown

FRAME = re.compile(r'File "(.+?)", line (\d+)')
OTHERS = tuple(
    f"{folder}/"
    for folder in (
        Path(torch.__file__).parent,
        Path(__file__).parent,
        Path(sysconfig.get_paths()["stdlib"]),
    )
)
"""Folders of code that is not the user's; what is installed into the last one may be."""


def of_error(error: BaseException) -> str:
    """Where the user's code was when `error` was raised, as ` (net.py, line 3: ...)`; or empty."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost((frame.filename, frame.lineno or 0) for frame in frames)


def of_node(node: Node) -> str:
    """Where the user's code called the operator `node`; or empty."""
    found = FRAME.findall(node.meta.get("stack_trace") or "")
    return innermost((file, int(line)) for file, line in found)


def of_operator(graph: GraphModule | None, operator: str) -> str:
    """Where the user's code calls what the derived `operator` (aten::..._backward) belongs to.

    `graph` is the recorded model; the longest name of an operator in it that `operator` begins with
    is taken for it. Empty where there is none.
    """
    named = [
        (node.target._schema.name, node)
        for node in (graph.graph.nodes if graph is not None else ())
        if isinstance(node.target, torch._ops.OpOverload)
    ]
    fitting = [(name, node) for name, node in named if operator.startswith(name)]
    return of_node(max(fitting, key=lambda pair: len(pair[0]))[1]) if fitting else ""


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """The last of `frames` (file, line) that is the user's."""
    own = [(file, line) for file, line in frames if is_users(file)]
    if not own:
        return ""
    file, line = own[-1]
    return f" ({shown(Path(file))}, line {line}: {linecache.getline(file, line).strip()})"


def is_users(file: str) -> bool:
    """Whether `file` is neither torch's, nor Python's, nor the exporters'."""
    installed = "site-packages" in file and not file.startswith(OTHERS[:2])
    return installed or not file.startswith(("<", *OTHERS))
