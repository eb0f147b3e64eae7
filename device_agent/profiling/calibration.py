"""Calibrates a device: measures how fast single operations are, in about a minute.

No part of a model runs. Child processes take all measurements. When a child process ends, its
memory is free again. The parent process needs little memory during the calibration.
"""

import datetime
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec.structs import replace

from device_agent.system import process_memory
from device_agent.system.child_processes import failure
from profiles.documents.bundle_profile import this_machine
from profiles.documents.calibration_record import Calibration, MemoryOverhead
from profiles.documents.device_profile import FIGURES, DeviceProfile
from profiles.errors import InputError

log = logging.getLogger(__name__)
LENGTH_S = 45.0
"""Time for measuring speed, in seconds."""


def measured_device(name: str, folder: Path, threads: int = 0) -> DeviceProfile:
    """Calibrate this device and describe it; see `calibrate` and `device_profile`."""
    available = available_to_an_agent()
    return device_profile(name, calibrate(threads), folder, available)


def available_to_an_agent() -> int | None:
    """The memory in bytes that will be available to an agent when this process has ended."""
    free, own = process_memory.available_bytes(), process_memory.pages()
    return None if free is None or own is None else free + own.anonymous_bytes


def calibrate(threads: int = 0, length_s: float = LENGTH_S) -> Calibration:
    """Calibrate this device. The start of each stage, and its progress, is logged.

    Args:
        threads: Threads of the runtime; 0 for one per core.
        length_s: Time in seconds for measuring speed. If the device is too slow to time all cases
            in this time, fewer cases are timed. To start processes and to measure memory, the
            calibration needs a few additional seconds, or up to a minute on a slow board.

    Returns:
        The calibration.

    Raises:
        InputError: The device could not be calibrated.
    """
    calibration = measure_speed(threads, length_s)
    log.info("Measuring the memory of the runtime")
    return replace(calibration, memory=measure_memory())


def measure_speed(threads: int, length_s: float) -> Calibration:
    """Run `calibrate_speed_process`, and log the messages that it prints."""
    command = [sys.executable, "-m", "device_agent.profiling.calibrate_speed_process"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [*command, str(threads), str(length_s)], stdout=subprocess.PIPE, stderr=errors
        ) as child,
    ):
        assert child.stdout is not None
        try:
            answer = b"null"
            for line in child.stdout:
                answer = line
                if isinstance(said := msgspec.json.decode(line), str):
                    log.info(said)
            code = child.wait()
        finally:
            child.kill()
        if code != 0:
            errors.seek(0)
            reason = failure(code, errors.read()).rstrip(".")
            raise InputError(
                "This device could not be calibrated: {reason}. If memory ran out, stop other "
                "programs and try again. Otherwise run `edgetailor-agent doctor`.",
                code="calibration.failed",
                reason=reason,
            )
    return msgspec.json.decode(answer, type=Calibration)


def measure_memory() -> MemoryOverhead | None:
    """Measure the memory of the agent and its runtime without tensors, in a fresh process.

    Returns None if the system does not report the memory of a process.
    """
    command = [sys.executable, "-m", "device_agent.profiling.calibrate_memory_process"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        return None
    return msgspec.json.decode(done.stdout, type=MemoryOverhead | None)


def device_profile(
    name: str, calibration: Calibration, folder: Path, available: int | None
) -> DeviceProfile:
    """Create the profile that the planner reads.

    Args:
        name: Name of the device.
        calibration: The device's calibration.
        folder: A folder on the disk that stores bundles. Its free space is recorded.
        available: Memory that is available to an agent, in bytes, measured before the calibration.

    Returns:
        The profile. Figures that the system does not report are None.
    """
    machine = this_machine(calibration.runtime)
    device = DeviceProfile(
        name=name,
        date=datetime.date.today().isoformat(),
        cores=machine.cpu_count,
        memory_bytes=machine.memory_bytes,
        memory_available_bytes=available,
        storage_free_bytes=shutil.disk_usage(folder).free,
        machine=machine,
        calibration=calibration,
    )
    known = [figure for figure in FIGURES if getattr(device, figure) is not None]
    return replace(device, sources=dict.fromkeys(known, "measured on the device"))
