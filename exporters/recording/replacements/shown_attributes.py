"""Attributes of modules that the model's code sees in another form than they are kept in."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def show(module: nn.Module, forms: Mapping[str, Callable[[nn.Module], Any]]) -> None:
    """Let `module.NAME` be `forms[NAME](module)`, also where a parameter has this name.

    The module gets a class of its own: Python looks for an attribute in the class first, and a
    module is asked for its parameters and buffers last.
    """
    kind = type(module)
    shown = {name: property(form) for name, form in forms.items()}
    place = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**shown, **place})
