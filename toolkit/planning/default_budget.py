"""The memory budget of a device for which none is given: a share of its memory."""

from profiles.cost_model.submodel_choice import Budgets
from profiles.documents.device_profile import DeviceProfile
from profiles.errors import InputError

SHARE_OF_AVAILABLE = 0.8
"""The default budget, as a share of the memory that was available."""
SHARE_OF_TOTAL = 0.5
"""The default budget as a share of all memory, if the available memory is not known."""


def with_memory(device: DeviceProfile, budgets: Budgets) -> tuple[Budgets, list[str]]:
    """Fill in a missing budget for memory; returns a note on it. Raises InputError."""
    if budgets.memory is not None:
        return budgets, []
    available, whole = device.memory_available_bytes, device.memory_bytes
    if available is not None:
        memory, of = SHARE_OF_AVAILABLE * available, "the memory that was available"
    elif whole is not None:
        memory, of = SHARE_OF_TOTAL * whole, "all memory; the available memory is not known"
    else:
        raise InputError(
            "The profile {device!r} does not say how much memory the device has: give a budget, "
            "for example --memory 256MB.",
            code="plan.unknown-memory",
            device=device.name,
        )
    share = SHARE_OF_AVAILABLE if available is not None else SHARE_OF_TOTAL
    note = f"memory budget: {share:.0%} of {of}; change it with --memory"
    return Budgets(memory=memory, step=budgets.step, traffic=budgets.traffic), [note]
