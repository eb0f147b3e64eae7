"""Trials of runtimes: which trains a bundle fastest on this device, and whether they agree.

The bundle's own runtime and each other installed one that takes its graphs train a few batches.
With `--runtime auto` the times that they take decide, together with the number of batches of the
training: a runtime that needs long to start is no gain in a short one. In any case another runtime
is used only if its first losses are those of the bundle's own.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from device_agent.formats.bundle import Bundle, training_of
from device_agent.runtime.runtime_choice import alternatives, describe
from device_agent.system.process_memory import available_bytes
from device_agent.training.batching import batches
from device_agent.training.memory_estimate import batch_of
from device_agent.training.memory_fit import check_fits, fits
from device_agent.training.memory_limits import DATA, SPACE, Ceiling, Usage
from device_agent.training.runtime_option import has_forms, with_runtime
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.remembered_trials import Trials, key_of
from device_agent.training.trials.runtime_trial import Request, Trial, in_child
from profiles.errors import BundleError, DoesNotFitError
from profiles.text_formatting import format_seconds

log = logging.getLogger(__name__)
Measure = Callable[[Request], Trial]

LEAST_GAIN = 0.05
"""Another runtime takes more memory than the bundle's own, so it has to be faster by this share."""
CLOSE_LOSS, CLOSE_CHANGE = 1e-3, 0.05
"""How far losses of two runtimes may differ: by this share of the loss, and of its change since the
first step. A pre-activation within rounding of zero may take another gradient."""
CLOSE_STEP, SMALLEST_STEP = 0.01, 0.01
"""How far the changes of a tensor in the first step may differ: by this share of its change. A
change below the other share of all changes counts as that large, because the gradient may be zero
but for rounding. Flipped masks of ReLUs made differences of 0.003."""
ROUNDINGS = 10
"""Changes may also differ by this many times what a nudge of all weights makes of them: Adam
divides a gradient by its own size, also one that is only rounding."""
NUDGED = " nudged"


@dataclass(frozen=True)
class Work:
    """What a training runs: how often its sessions start, batches to record, batches to train."""

    starts: int
    recorded: int
    trained: int

    def seconds(self, trial: Trial) -> float:
        """The time that a training takes by a trial, in seconds."""
        steps = self.recorded * trial.record_s + self.trained * trial.train_s
        return self.starts * trial.start_s + steps


def work_of(bundle: Bundle, samples: int, held_out: int) -> Work:
    """What training `bundle` on `samples` samples runs, `held_out` of them for validation.

    A validation closes the sessions. The last batch of an epoch may be of another size, for which a
    runtime may compile its graph again.
    """
    training = training_of(bundle)
    sizes = [len(one) for one in batches(samples - held_out, training.batch_size, None)]
    trained = min(training.epochs * len(sizes), training.batches or math.inf)
    return Work(
        starts=len(set(sizes)) * (math.ceil(trained / len(sizes)) if held_out else 1),
        recorded=len(batches(samples, batch_of(bundle.manifest), None)),
        trained=int(trained),
    )


def with_fastest_runtime(
    bundle: Bundle,
    work: Work,
    options: TrainingOptions,
    limits: list[Ceiling],
    idle: Usage,
    file: Path,
    *,
    wait: Callable[[], object] = lambda: None,
    measure: Measure = in_child,
) -> Bundle:
    """`bundle` with the runtime that trains it fastest here.

    A runtime is passed over, with its reason in the log, if it refuses the bundle, if the memory
    that it is predicted to need exceeds a limit, or if its losses differ from those of the bundle's
    own runtime. A trial runs beside the agent, so both have to fit.

    Args:
        bundle: The bundle as it was opened, which fits.
        work: What the training runs.
        options: Threads, validation and memory limit of the training.
        limits: The memory limits of this process, as `ceilings` finds them.
        idle: Memory of this process before its first training.
        file: Where trials are remembered.
        wait: Called before each trial, which starts when it returns.
        measure: Makes a trial; the default does it in a process of its own.
    """
    own, validating = bundle.manifest.runtime, options.validation > 0
    trials = trials_of(bundle, options, idle, file, wait, measure)
    fitting_here = partial(fits, validating=validating, limits=limits)
    limits = limits or [half_of_memory(idle)]
    seconds: dict[str, float] = {}
    for name in alternatives(own):
        new = name not in trials
        try:
            other = with_runtime(bundle, name)
            fitting = beside(limits, idle) if new else limits
            check_fits(other.manifest, validating, fitting)
        except (BundleError, DoesNotFitError) as error:
            log.info("%s is passed over: %s", describe(name), error)
            continue
        theirs = trials.of(name)
        ours = trials.of(own) if theirs.refused is None else theirs
        against = theirs.refused or objection(ours, theirs, partial(trials.of, own + NUDGED))
        if against is not None:
            log.info("%s is passed over: %s", describe(name), against)
            continue
        if new and gains(work.seconds(theirs), work.seconds(ours)):
            # Another program may have slowed the first trial down.
            ours = trials.repeat(own)
        seconds |= {own: work.seconds(ours), name: work.seconds(theirs)}
    fastest = min(seconds, key=seconds.__getitem__, default=own)
    if seconds and not gains(seconds[fastest], seconds[own]):
        fastest = own
    times = [f"{format_seconds(took)} with {describe(name)}" for name, took in seconds.items()]
    why = f"; this training takes about {', '.join(times)}" if times else ""
    log.info("Runtime: %s%s", describe(fastest), why)
    return with_runtime(bundle, fastest, fitting_here)


def check_agrees(
    bundle: Bundle,
    chosen: str,
    options: TrainingOptions,
    idle: Usage,
    file: Path,
    *,
    wait: Callable[[], object] = lambda: None,
    measure: Measure = in_child,
) -> None:
    """Raise BundleError if the runtime `chosen` computes other losses than the bundle's own.

    OpenVINO 2026.4 computes wrong gradients for some graphs, without an error. A trial that cannot
    be made, because memory is short, proves nothing. Arguments as of `with_fastest_runtime`.
    """
    trials = trials_of(bundle, options, idle, file, wait, measure)
    own = bundle.manifest.runtime
    ours, theirs = trials.of(own), trials.of(chosen)
    if ours.refused is None and theirs.refused is None:
        against = objection(ours, theirs, partial(trials.of, own + NUDGED))
        if against is not None:
            raise BundleError(
                "{library} computes other numbers for {submodel} than {expected}: {reason}. Train "
                "without --runtime.",
                code="bundle.other-results",
                runtime=chosen,
                library=describe(chosen),
                submodel=bundle.manifest.submodel,
                expected=describe(own),
                reason=against,
            )


def trials_of(
    bundle: Bundle,
    options: TrainingOptions,
    idle: Usage,
    file: Path,
    wait: Callable[[], object],
    measure: Measure,
) -> Trials:
    """The trials of `bundle`; arguments as of `with_fastest_runtime`."""

    def make(name: str) -> Trial:
        wait()
        runtime = name.removesuffix(NUDGED)
        weights = "" if name == runtime else " with slightly other weights"
        log.info("Trying %s on this bundle%s", describe(runtime), weights)
        limit = options.max_memory
        return measure(
            Request(
                folder=str(bundle.folder),
                runtime=runtime,
                nudged=name != runtime,
                plain=not has_forms(bundle),
                threads=options.threads,
                max_memory=None if limit is None else limit - idle.resident,
            )
        )

    return Trials(file, key_of(bundle, options), make)


def gains(other_s: float, own_s: float) -> bool:
    """Whether another runtime's time is enough of a gain over that of the bundle's own."""
    return other_s < (1 - LEAST_GAIN) * own_s


def half_of_memory(idle: Usage) -> Ceiling:
    """The limit where there is no other: half of what is available to this process.

    The other half is left to the other programs of the device.
    """
    held = max(0, Usage.now().resident - idle.resident)
    half = ((available_bytes() or 0) + held) // 2
    return Ceiling("half of the available memory", idle.resident + half, idle.resident)


def beside(limits: Sequence[Ceiling], idle: Usage) -> list[Ceiling]:
    """What `limits` leave to a process beside this one. Some count each process by itself."""
    return [
        one if one.name in (SPACE, DATA) else replace(one, used=one.used + idle.resident)
        for one in limits
    ]


def objection(ours: Trial, theirs: Trial, nudged: Callable[[], Trial]) -> str | None:
    """Why `theirs` cannot be compared with the trial of the bundle's own runtime, or must not.

    None if the losses agree. `nudged` makes a trial of the own runtime with nudged weights.
    """
    if ours.refused is not None:
        return f"there is nothing to compare it with: {ours.refused}"
    if not comparable(ours, theirs):
        return "its first steps are not those of the bundle's own runtime"
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        allowed = CLOSE_LOSS * abs(mine) + CLOSE_CHANGE * abs(mine - ours.losses[0])
        if not abs(mine - other) <= allowed:  # true for a loss that is not a number, too
            return f"in its first steps the loss is {other:.6g} instead of {mine:.6g}"
    apart = shares(ours, theirs)
    if all(share <= CLOSE_STEP for share in apart.values()):
        return None
    again = nudged()
    moved = shares(ours, again) if again.refused is None and comparable(ours, again) else {}
    for name, share in apart.items():
        if not share <= max(CLOSE_STEP, ROUNDINGS * moved.get(name, 0.0)):
            return f"its first step changes {name!r} otherwise, by {share:.0%} of the change"
    return None


def shares(ours: Trial, theirs: Trial) -> dict[str, float]:
    """How far the change of each tensor in `theirs` is from that in `ours`, by its size there."""
    least = SMALLEST_STEP * rms([number for sums in ours.changes.values() for number in sums])
    found = {}
    for name, sums in ours.changes.items():
        apart = rms(np.subtract(theirs.changes[name], sums))
        found[name] = apart / max(rms(sums), least) if apart else 0.0
    return found


def comparable(ours: Trial, theirs: Trial) -> bool:
    """Whether two trials have losses of the same steps and changes of the same tensors.

    The file of a remembered one can be damaged.
    """
    shapes = [
        (len(one.losses), {name: len(sums) for name, sums in one.changes.items()})
        for one in (ours, theirs)
    ]
    return shapes[0] == shapes[1]


def rms(numbers: ArrayLike) -> float:
    """The root of the mean square of `numbers`; 0 for none."""
    return float(np.linalg.norm(numbers) / math.sqrt(max(1, np.size(numbers))))
