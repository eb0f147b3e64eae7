"""Finds out, with tiny runs, which form of a bundle's graphs this device runs."""

from functools import cache

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.winograd_probe import multiplies_faster


@cache
def device_form() -> str | None:
    """The name of the form that this device runs; None means the unchanged graphs."""
    block = block_size()
    if block is not None:
        return blocked_form(block)
    return WINOGRAD if multiplies_faster() else None
