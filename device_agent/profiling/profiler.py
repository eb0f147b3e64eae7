"""What a bundle costs on this device: time and memory of each of its signatures.

Each is measured in a fresh child process (measure.py), so that none sees another's memory.
"""

import logging
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from device_agent.formats.bundle import Bundle, open_bundle, structure, training_of
from device_agent.profiling.measure_messages import Measurement, Request, Task, tasks
from device_agent.profiling.profile_text import label
from device_agent.runtime.runtime_choice import arena, describe, versions
from device_agent.system import sensors
from device_agent.training.memory_estimate import concurrent_peak_bytes
from profiles.documents.bundle_profile import (
    RUNS,
    UNSTABLE_SPREAD,
    WARM_UP,
    Method,
    Phase,
    Profile,
    Sustained,
    Validity,
    this_machine,
    unstable,
)
from profiles.documents.timing_statistics import clock, duration, now
from profiles.errors import BundleError, UnstableError

LOOK_EVERY_S = 0.5
"""How often the sensors are read while a child runs."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


def profile_bundle(
    folder: Path,
    threads: int = 0,
    *,
    runs: int = RUNS,
    sustained_s: float = 0.0,
    sysfs: Path = sensors.SYS,
) -> Profile:
    """Measure the bundle in `folder` with `threads` threads (0: one for each core).

    Samples are random: the time does not depend on them. `sustained_s` adds training steps without
    a pause for so many seconds. Raises BundleError where the bundle cannot be read or run.
    """
    bundle = open_bundle(folder)
    before = sensors.conditions(sysfs)
    children = Children(bundle, threads, runs, sysfs)
    phases = tuple(children.measure(task) for task in tasks(bundle))
    sustained = children.sustain(sustained_s) if sustained_s else None
    about = bundle.manifest
    return Profile(
        submodel=about.submodel,
        structure=structure(about),
        machine=this_machine(describe(about.runtime)),
        versions=versions(),
        method=Method(
            source="profile",
            clock=clock(),
            warm_up_runs=WARM_UP,
            runs=runs,
            threads=threads,
            arena=arena(about.runtime),
        ),
        measured_at=now(),
        batch_size=training_of(bundle).batch_size,
        phases=phases,
        before=before,
        after=sensors.conditions(sysfs),
        validity=Validity(invalid=tuple(children.throttled), unstable=unstable(phases)),
        sustained=sustained,
    )


@dataclass
class Children:
    """Starts the child processes, one after another, and watches the sensors meanwhile.

    `throttled` collects what slowed the processor down, and during what.
    """

    bundle: Bundle
    threads: int
    runs: int
    sysfs: Path
    throttled: list[str] = field(default_factory=list)

    def measure(self, task: Task) -> Phase:
        """Time and memory of `task`."""
        name = " + ".join(task.signatures)
        log.info("Measuring %s", name)
        found = self._child(task, Measurement)
        return Phase(
            name=name,
            role=task.role,
            steady=duration(found.seconds),
            first_s=found.first_s,
            cold_start_s=found.cold_start_s,
            memory=found.memory,
            predicted_bytes=concurrent_peak_bytes(self.bundle.manifest, task.signatures),
        )

    def sustain(self, lasting_s: float) -> Sustained:
        """The training's steps for `lasting_s` seconds."""
        log.info("Training for %.0f s without a pause", lasting_s)
        task = next(task for task in tasks(self.bundle) if task.role == "train")
        return self._child(task, Sustained, lasting_s)

    def _child(self, task: Task, answer: type[Answer], sustained_s: float = 0.0) -> Answer:
        """What a child of its own finds. Raises BundleError where it fails."""
        before = sensors.throttle(self.sysfs)
        request = Request(
            folder=str(self.bundle.folder),
            task=task,
            threads=self.threads,
            runs=self.runs,
            sustained_s=sustained_s,
            sysfs=str(self.sysfs),
            started_s=time.monotonic(),
        )
        told = msgspec.json.encode(request).decode()
        command = [sys.executable, "-m", "device_agent.profiling.measure_process", told]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                while True:
                    try:
                        found, complaint = child.communicate(timeout=LOOK_EVERY_S)
                        break
                    except subprocess.TimeoutExpired:
                        self._look(task, before)
            finally:
                child.kill()
        self._look(task, before)
        if child.returncode != 0:
            raise self._failed(task, child.returncode, complaint)
        return msgspec.json.decode(found, type=answer)

    def _look(self, task: Task, before: sensors.Throttle | None) -> None:
        """Note what slows the processor down now, or has since `before`."""
        now = sensors.throttle(self.sysfs)
        if before is None or now is None:
            return
        for reason in now.new_since(before):
            line = f"{reason} during {' + '.join(task.signatures)}"
            if line not in self.throttled:
                self.throttled.append(line)

    def _failed(self, task: Task, code: int, complaint: bytes) -> BundleError:
        last = complaint.decode(errors="replace").strip().split("\n")[-1]
        if code == -signal.SIGKILL:
            last = "the system killed the process, which most often means: out of memory."
        return BundleError(
            f"{self.bundle.folder} could not be measured ({' + '.join(task.signatures)}): {last}"
        )


def require_stable(profile: Profile) -> None:
    """Raise UnstableError where throttling set in or a phase's times vary too much."""
    if reasons := profile.validity.invalid:
        raise UnstableError(
            f"The figures are not those of full speed: {'; '.join(reasons)}. Let the device cool, "
            "look at its power supply, and measure again."
        )
    if unsure := [label(p) for p in profile.phases if p.name in profile.validity.unstable]:
        raise UnstableError(
            f"The times of {', '.join(unsure)} vary by more than {UNSTABLE_SPREAD:.0%} from p10 to "
            "p90: end what else runs on this device, or measure longer with --runs."
        )
