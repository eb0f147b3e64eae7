"""What a bundle costs on this device: time of the forward pass and of a training step, and memory.

Each is measured in a fresh child process, so that neither sees the other's memory.
"""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from device_agent.bundle import Bundle, open_bundle
from device_agent.manifest import Train
from device_agent.runtime import describe
from profiles.errors import BundleError
from profiles.profile import Duration, Profile, this_machine

RUNS = 20
WARM_UP = 3

What = Literal["forward", "train"]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process found: seconds of every counted run, and its memory in bytes."""

    seconds: list[float]
    idle_bytes: int | None
    peak_bytes: int | None


def profile_bundle(folder: Path, threads: int = 0) -> Profile:
    """Measure the bundle in `folder` with `threads` threads (0: one for each core).

    Samples are random: the time does not depend on them. Raises BundleError where the bundle
    cannot be read or run.
    """
    bundle = open_bundle(folder)
    forward = measure_in_child(folder, "forward", threads)
    train = measure_in_child(folder, "train", threads)
    above = None
    if train.peak_bytes is not None and train.idle_bytes is not None:
        above = train.peak_bytes - train.idle_bytes
    return Profile(
        submodel=bundle.manifest.submodel,
        machine=this_machine(describe(bundle.manifest.runtime)),
        threads=threads,
        batch_size=training_of(bundle).batch_size,
        forward=duration(forward.seconds),
        train=duration(train.seconds),
        peak_bytes=train.peak_bytes,
        peak_above_idle_bytes=above,
    )


def training_of(bundle: Bundle) -> Train:
    """The training instruction of the bundle's schedule."""
    for instruction in bundle.manifest.schedule:
        if isinstance(instruction, Train):
            return instruction
    raise BundleError(f"The schedule of {bundle.folder} trains nothing.")


def measure_in_child(folder: Path, what: What, threads: int) -> Measurement:
    """Run `device_agent.measure` in a process of its own. Raises BundleError where it fails."""
    command = [sys.executable, "-m", "device_agent.measure", str(folder), what, str(threads)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise BundleError(f"{folder} could not be measured ({what}): {last}")
    return msgspec.json.decode(done.stdout, type=Measurement)


def duration(seconds: list[float]) -> Duration:
    """Median and spread of measured run times."""
    p10, median, p90 = np.percentile(seconds, [10, 50, 90])
    return Duration(median_s=float(median), p10_s=float(p10), p90_s=float(p90), runs=len(seconds))


def summary(profile: Profile) -> list[str]:
    """The profile as plain text."""
    return [
        f"{profile.submodel}, batch {profile.batch_size}, threads {profile.threads or 'all'}, "
        f"{profile.machine.runtime} on {profile.machine.architecture}",
        f"forward        {spread(profile.forward)}",
        f"training step  {spread(profile.train)}",
        f"backprop       {profile.backprop_s * 1e3:.2f} ms (training step minus forward)",
        f"process peak   {megabytes(profile.peak_bytes)} (resident set, Python and runtime too)",
        f"above idle     {megabytes(profile.peak_above_idle_bytes)} (peak minus the idle process)",
    ]


def spread(found: Duration) -> str:
    """Median and spread in milliseconds."""
    return (
        f"{found.median_s * 1e3:.2f} ms (p10 {found.p10_s * 1e3:.2f}, p90 "
        f"{found.p90_s * 1e3:.2f}, n {found.runs})"
    )


def megabytes(count: int | None) -> str:
    """Bytes for people; what is not known is said so."""
    return "not measurable" if count is None else f"{count / 1e6:.1f} MB"
