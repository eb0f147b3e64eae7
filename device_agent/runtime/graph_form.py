"""The form of a bundle's graphs that this device runs, found out by tiny runs."""

from functools import cache

from device_agent.formats.graph_forms import WINOGRAD, blocked_form
from device_agent.runtime.blocked_probe import block_size
from device_agent.runtime.winograd_probe import multiplies_faster


@cache
def device_form() -> str | None:
    """The name of the form; None if this device runs the graphs as they are."""
    block = block_size()
    if block is not None:
        return blocked_form(block)
    return WINOGRAD if multiplies_faster() else None
