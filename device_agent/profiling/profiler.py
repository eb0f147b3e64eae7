"""Measures a bundle on this device: time and memory of each of its signatures.

Each signature is measured in a new child process (`measure_process.py`), so that its memory does
not count for the next signature.
"""

import logging
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
from device_agent.runtime.runtime_choice import runtime_of, versions
from device_agent.system import sensors
from device_agent.system.child_processes import failure
from device_agent.system.energy import EnergyMeter
from device_agent.training.form_choice import in_device_form
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

SENSOR_INTERVAL_S = 0.5
"""Time between two readings of the sensors while a child process runs."""

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=msgspec.Struct)


def profile_bundle(
    folder: str | Path,
    threads: int = 0,
    *,
    runs: int = RUNS,
    sustained_s: float = 0.0,
    sysfs: Path = sensors.SYS,
) -> Profile:
    """Measure time and memory of a bundle on this device.

    Use this on the device, with an exported bundle. To predict submodels that were not exported,
    calibrate the device once and use `plan`.

    Each part of a round, such as the training step, is measured in a child process. The start of
    each measurement is logged. The samples are random, because the time does not depend on them.

    Args:
        folder: The bundle.
        threads: Threads of the runtime; 0 for one per core.
        runs: Number of counted runs of each part.
        sustained_s: If it is above 0, also train without a pause for this many seconds.
        sysfs: Folder with the device's sensors.

    Returns:
        The profile, in seconds and bytes. `train` has the time of one batch.

    Raises:
        BundleError: The bundle cannot be read or run, or it has no training.

    Examples:
        >>> import tempfile
        >>> import edgetailor as et
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> submodel = et.split(model, "full", sample_shape=(1, 8, 8))
        >>> bundle = f"{tempfile.mkdtemp()}/bundle"
        >>> _ = et.export(submodel, et.GlobalModel(model.state_dict()), bundle, verify=False)
        >>> measured = et.profile(bundle, threads=1, runs=3)
        >>> measured.submodel, measured.train.median_s > 0
        ('full', True)
    """
    bundle = in_device_form(open_bundle(Path(folder)))
    training_of(bundle)  # an inference bundle has no training to profile
    before, energy = sensors.conditions(sysfs), EnergyMeter(sysfs)
    children = ChildProcesses(bundle, threads, runs, sysfs)
    phases = tuple(children.measure(task) for task in tasks(bundle))
    sustained = children.sustain(sustained_s) if sustained_s else None
    about = bundle.manifest
    runtime = runtime_of(about.runtime)
    return Profile(
        submodel=about.submodel,
        structure=structure(about),
        machine=this_machine(runtime.description()),
        versions=versions(),
        method=Method(
            source="profile",
            clock=clock(),
            warm_up_runs=WARM_UP,
            runs=runs,
            threads=threads,
            arena=runtime.arena(),
        ),
        measured_at=now(),
        batch_size=training_of(bundle).batch_size,
        phases=phases,
        before=before,
        after=sensors.conditions(sysfs),
        validity=Validity(invalid=tuple(children.throttled), unstable=unstable(phases)),
        sustained=sustained,
        energy=energy.used(),
    )


@dataclass
class ChildProcesses:
    """Runs the child processes one after another, and reads the sensors between them.

    Attributes:
        bundle: The bundle to measure.
        threads: Threads of the runtime; 0 for one per core.
        runs: Number of counted runs of each task.
        sysfs: Folder with the device's sensors.
        throttled: The reasons why the processor slowed down, each with its task.
    """

    bundle: Bundle
    threads: int
    runs: int
    sysfs: Path
    throttled: list[str] = field(default_factory=list)

    def measure(self, task: Task) -> Phase:
        """Measure time and memory of `task`."""
        name = " + ".join(task.signatures)
        log.info("Measuring %s", name)
        measured = self._child(task, Measurement)
        return Phase(
            name=name,
            role=task.role,
            steady=duration(measured.seconds),
            first_s=measured.first_s,
            cold_start_s=measured.cold_start_s,
            memory=measured.memory,
            predicted_bytes=concurrent_peak_bytes(self.bundle.manifest, task.signatures),
        )

    def sustain(self, lasting_s: float) -> Sustained:
        """Repeat the training step for `lasting_s` seconds."""
        log.info("Training for %.0f s without a pause", lasting_s)
        task = next(task for task in tasks(self.bundle) if task.role == "train")
        return self._child(task, Sustained, lasting_s)

    def _child(self, task: Task, answer: type[Answer], sustained_s: float = 0.0) -> Answer:
        """Run a child process and return its answer. Raises BundleError if it fails."""
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
        encoded = msgspec.json.encode(request).decode()
        command = [sys.executable, "-m", "device_agent.profiling.measure_process", encoded]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                while True:
                    try:
                        # After a timeout, `communicate` may be called again without losing output.
                        answered, errors = child.communicate(timeout=SENSOR_INTERVAL_S)
                        break
                    except subprocess.TimeoutExpired:
                        self._note_throttling(task, before)
            finally:
                child.kill()
        self._note_throttling(task, before)
        if child.returncode != 0:
            raise self._failure(task, child.returncode, errors)
        return msgspec.json.decode(answered, type=answer)

    def _note_throttling(self, task: Task, before: sensors.Throttle | None) -> None:
        """Add to `throttled` the reasons why the processor is slow now, or was since `before`."""
        now = sensors.throttle(self.sysfs)
        if before is None or now is None:
            return
        for reason in now.new_since(before):
            line = f"{reason} during {' + '.join(task.signatures)}"
            if line not in self.throttled:
                self.throttled.append(line)

    def _failure(self, task: Task, code: int, errors: bytes) -> BundleError:
        """The error for a child process that ended with the status `code`."""
        reason = failure(code, errors)
        return BundleError(
            "{path}: {together} could not be measured: {reason}",
            code="measurement.failed",
            path=str(self.bundle.folder),
            signatures=list(task.signatures),
            reason=reason,
            together=" + ".join(task.signatures),
        )


def require_stable(profile: Profile) -> None:
    """Check that a measurement is reliable.

    Args:
        profile: The profile to check.

    Raises:
        UnstableError: The device was throttled, or the times of a phase vary too much.
    """
    if reasons := profile.validity.invalid:
        raise UnstableError(
            "The device was slowed down while it was measured: {explanation}. Let it cool, check "
            "its power supply, and measure again.",
            code="measurement.throttled",
            reasons=list(reasons),
            explanation="; ".join(reasons),
        )
    if varying := [label(p) for p in profile.phases if p.name in profile.validity.unstable]:
        raise UnstableError(
            "The times of {phases} vary too much: p10 and p90 differ by more than {spread:.0%} of "
            "the median. Stop the other programs on this device, or measure longer with --runs.",
            code="measurement.unstable",
            phases=varying,
            spread=UNSTABLE_SPREAD,
        )
