"""A profile measured during a round's training, without an extra run."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from device_agent.formats.bundle import Bundle, structure, training_of
from device_agent.runtime.runtime_choice import runtime_of, versions
from device_agent.system import process_memory, sensors
from device_agent.system.energy import EnergyMeter
from device_agent.training.memory_estimate import concurrent_peak_bytes
from profiles.documents.bundle_profile import (
    Memory,
    Method,
    Phase,
    Profile,
    Validity,
    this_machine,
    unstable,
)
from profiles.documents.timing_statistics import clock, duration, now
from profiles.text_formatting import NOT_MEASURABLE, format_duration

log = logging.getLogger(__name__)


class RoundProfile:
    """Measures a training from the moment it is created until `finish`.

    The peak memory is the peak of the whole agent process during this time. The idle memory is the
    memory of the process at the start.
    """

    def __init__(self, sysfs: Path = sensors.SYS) -> None:
        """Start measuring. `sysfs` is the folder with the device's sensors."""
        self._sysfs = sysfs
        self._before, self._throttle = sensors.conditions(sysfs), sensors.throttle(sysfs)
        self._begun, self._energy = time.perf_counter(), EnergyMeter(sysfs)
        self._resettable = process_memory.reset_peak()
        self._idle = process_memory.pages()

    def finish(self, bundle: Bundle, threads: int, seconds: Sequence[float]) -> Profile | None:
        """Create the profile of the training, and log its time and energy.

        Args:
            bundle: The bundle that was trained.
            threads: Threads of the runtime; 0 for one per core.
            seconds: Durations of the training batches. The first batch includes the runtime's
                warm-up, so its duration is reported separately. The median includes the first batch
                only if there is no other batch.

        Returns:
            The profile; None if this process trained no batch.
        """
        if not seconds:
            return None
        took, used = format_duration(time.perf_counter() - self._begun), self._energy.used()
        log.info("The training took %s; energy: %s.", took, used or NOT_MEASURABLE)
        # Each signature once, in the order in which they run.
        steps = tuple(dict.fromkeys(step.signature for step in training_of(bundle).steps))
        counted = seconds[1:] or seconds
        about = bundle.manifest
        runtime = runtime_of(about.runtime)
        phase = Phase(
            name=" + ".join(steps),
            role="train",
            steady=duration(counted),
            first_s=seconds[0],
            memory=Memory(
                idle=self._idle,
                peak_bytes=process_memory.peak_bytes() if self._resettable else None,
                held=process_memory.pages(),
            ),
            predicted_bytes=concurrent_peak_bytes(about, steps),
        )
        return Profile(
            submodel=about.submodel,
            structure=structure(about),
            machine=this_machine(runtime.description()),
            versions=versions(),
            method=Method(
                source="training",
                clock=clock(),
                warm_up_runs=len(seconds) - len(counted),
                runs=len(counted),
                threads=threads,
                arena=runtime.arena(),
            ),
            measured_at=now(),
            batch_size=training_of(bundle).batch_size,
            phases=(phase,),
            before=self._before,
            after=sensors.conditions(self._sysfs),
            validity=Validity(invalid=self._throttled(), unstable=unstable([phase])),
            energy=used,
        )

    def _throttled(self) -> tuple[str, ...]:
        after = sensors.throttle(self._sysfs)
        if after is None or self._throttle is None:
            return ()
        return tuple(f"{reason} during the round" for reason in after.new_since(self._throttle))
