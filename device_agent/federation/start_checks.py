"""Checks before `run` makes its first request, and before `install-service` writes files."""

import device_agent.training.bundle_training  # noqa: F401 - the idle agent has the runtime loaded
from device_agent.data.local_data import check_source
from device_agent.federation.default_state import default_state
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.run_options import RunOptions
from device_agent.training.memory_limits import Usage, ceilings, check_idle


def check_start(options: RunOptions, *, data: bool = True) -> tuple[Identity, Usage]:
    """Check that this device has joined and can follow `options`.

    Args:
        options: The options of `run`.
        data: Whether to check the data as well.

    Returns:
        The device's identity, and the memory of this process before its first training.

    Raises:
        InputError: The device has not joined, or this machine cannot enforce a limit.
        DataError: No bundle could be trained on these data.
        LimitError: Even without a training, the agent uses `max_memory` or more.
    """
    identity = DeviceState(options.state or default_state()).member()
    options.limits.check()
    if data:
        check_source(options.data, labels=identity.labels)
    # Measure before the first training: after it the process keeps the runtime's memory.
    idle = Usage.now()
    check_idle(ceilings(options.training.max_memory, idle))
    return identity, idle
