"""Replaces functions inside torch whose results the exporters do not need."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from itertools import dropwhile
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import torch.fx
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.proxy import TracerBase

from exporters.programs.source_lines import is_users
from exporters.recurrence.replacements import LOCK

LAZY: Any = getattr(torch.fx, "_lazy_graph_module", SimpleNamespace())
LazyGraphModule: type[GraphModule] = getattr(LAZY, "_LazyGraphModule", GraphModule)
"""Generates the Python code of its graph when it runs, because many graphs are only read."""
TRACING: dict[str, Any] = {
    name: True
    for name in ("_disable_torch_fn_metadata_mode",)
    if name in signature(proxy_tensor.make_fx).parameters
}
"""Options of `make_fx` that leave out which torch function each operator came from."""


@contextmanager
def replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes inside the context. Each attribute is given by owner, name and new value.

    Attributes that do not exist are skipped, so that other versions of torch work as usual.
    """
    with LOCK:
        known = [(owner, name, new) for owner, name, new in attributes if name in vars(owner)]
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in known]
        try:
            for owner, name, new in known:
                setattr(owner, name, new)
            yield
        finally:
            for owner, name, old in before:
                setattr(owner, name, old)


WITHOUT_LAYOUTS = (proxy_tensor, "_extract_tensor_metadata", lambda value: None)


def users_lines(_: Any, frames: StackSummary) -> StackSummary:
    """The frames of the user's code in the model. Torch itself stores only frames of `forward`."""
    inside = dropwhile(lambda frame: frame.name != "forward", frames)
    return StackSummary.from_list([frame for frame in inside if is_users(frame.filename)])


def lines_of_users() -> AbstractContextManager[None]:
    """Let nodes store the user's lines in every function, not only in `forward`."""
    return replaced([(TracerBase, "_filter_traceback_frames", users_lines)])


def without_layouts() -> AbstractContextManager[None]:
    """Let torch trace without recording the memory layout of each value.

    The layout is also known from the node's `val`. If sizes depend on the batch, recording the
    layout takes a fifth of the tracing time.
    """
    return replaced([WITHOUT_LAYOUTS])


def lean_tracing() -> AbstractContextManager[None]:
    """Like `without_layouts`. Each traced graph also becomes a `LazyGraphModule`."""
    return replaced([WITHOUT_LAYOUTS, (LAZY, "_use_lazy_graph_module_flag", True)])
