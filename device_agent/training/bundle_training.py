"""Trains a bundle on this device, with its data, limits and checkpoints, and writes the update."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from device_agent.data.data_source import Data
from device_agent.data.local_data import LocalData, load_data, name_of
from device_agent.formats.bundle import Bundle, open_bundle, training_of
from device_agent.formats.evaluation_counts import (
    Judgement,
    LocalEvaluation,
    check_counts,
    finite_counts,
)
from device_agent.formats.input_summary import summary_of
from device_agent.formats.label_rule import label_rule
from device_agent.formats.manifest import FileEntry, Train, uploaded
from device_agent.formats.packing import sample_parts
from device_agent.formats.protocol.rounds import InputSummary
from device_agent.formats.update import UpdateRecord, check_place, check_trained, write_update
from device_agent.privacy.sample_accountant import SampleSteps, sampling_probability
from device_agent.runtime.runtime_choice import runtime_of
from device_agent.system.disk_space import storage_error
from device_agent.system.process_memory import map_large_blocks, ran_out
from device_agent.training.batching import held_out_for
from device_agent.training.checkpoint import Checkpoints, form_begun, training_key
from device_agent.training.execution_plan import plan_execution
from device_agent.training.form_check import with_checked_form
from device_agent.training.memory_limits import Usage
from device_agent.training.personal_model import personal_entries
from device_agent.training.remembered_checks import default_checks
from device_agent.training.round_profile import RoundProfile
from device_agent.training.schedule_interpreter import OnEpoch, ScheduleRun, ignore_epoch
from device_agent.training.signature_runs import OnBatch, at_once
from device_agent.training.training_folder import (
    CHECKPOINT,
    UNPACKED,
    training_folder,
    working_folder,
)
from device_agent.training.training_options import DEFAULT_OPTIONS, TrainingOptions
from profiles.documents.bundle_profile import Profile
from profiles.errors import LimitError, UpdateError
from profiles.text_formatting import counted

log = logging.getLogger(__name__)
KeepPersonal = Callable[[Mapping[str, np.ndarray]], object]
"""A function that stores the new personal tensors, with the statistics of the same training. It is
called before the update is written, and again if the process was killed in between."""
Spend = Callable[[SampleSteps, float], object]
"""A function that counts the private steps of a training, with the delta of the bundle. It is
called like `KeepPersonal`. So after a kill, steps may be counted twice, but never left out."""


@dataclass(frozen=True)
class Trained:
    """The record of a written update, and the personal tensors that stay on the device."""

    record: UpdateRecord
    personal: dict[str, np.ndarray]


def forget(personal: Mapping[str, np.ndarray]) -> None:
    """Do not store the personal tensors."""


def not_counted(steps: SampleSteps, delta: float) -> None:
    """Do not count the private steps."""


def train_bundle(
    folder: str | Path,
    data: Data,
    out: str | Path,
    options: TrainingOptions = DEFAULT_OPTIONS,
    *,
    personal: Mapping[str, np.ndarray] | None = None,
    keep: KeepPersonal = forget,
    spend: Spend = not_counted,
    on_epoch: OnEpoch = ignore_epoch,
    on_batch: OnBatch = at_once,
    force: bool = False,
    profiled: bool = False,
    summarized: bool = False,
    idle: Usage | None = None,
    form_checks: Path | None = None,
) -> Trained:
    """Train the bundle in `folder` on local data and write the update to the folder `out`.

    If the process is killed, the same call continues from the last checkpoint. With one thread and
    the same seed, the update is bit-identical, even if the process was killed during the training.
    Updates with differential privacy for samples differ, because batches and noise are random.

    Args:
        folder: The bundle.
        data: Local data: a path, `module:callable`, or the arrays x and y.
        out: The update's folder. It must not exist, unless `force` is set.
        options: Threads, seed, validation, memory limit and the federation's evaluation.
        personal: Personal tensors of earlier rounds, by name.
        keep: Stores the new personal tensors; see `KeepPersonal`.
        spend: Called with the number of steps with differential privacy for samples; see `Spend`.
        on_epoch: Called after each epoch.
        on_batch: Called before each batch. The training waits until it returns.
        force: Replace an existing update in `out`.
        profiled: Add time and memory of this training to the update's record. Then the record is
            not reproducible, because times differ between runs.
        summarized: Add a coarse summary of the inputs to the update's record, unless the bundle
            promises privacy for samples.
        idle: Memory that this process used before its first training (default: the present use).
        form_checks: The file with the results of form checks (default: a file of this user).

    Returns:
        The update's record and the new personal tensors.

    Raises:
        BundleError: The bundle cannot be used.
        DataError: The data do not fit the bundle.
        LimitError: The training needs too much memory. If this can be predicted, the error is
            raised before the training starts. Otherwise it is raised when memory runs out.
        UpdateError: The training diverged. `out` is not written.
    """
    out = Path(out)
    with _explain_system_errors(out):
        map_large_blocks()
        bundle = open_bundle(Path(folder))
        begun = form_begun(training_folder(out), bundle.sha256)
        plan = plan_execution(bundle, options, idle or Usage.now(), begun)
        with working_folder(out) as scratch:
            # If there is a checkpoint of a finished training, its update may already exist.
            if not (scratch / CHECKPOINT).exists():
                check_place(out, force)
            local = local_data(plan.bundle, data, scratch / UNPACKED)
            for remark in local.remarks:
                log.warning("%s", remark)
            validated = held_out_for(len(local), options)
            _say_if_few(plan.bundle, len(local) - len(validated))
            checked = with_checked_form(plan, form_checks or default_checks(), scratch, on_batch)
            run = ScheduleRun(
                checked.bundle,
                local,
                scratch,
                options,
                dict(personal or {}),
                on_epoch,
                held_out=validated,
                on_batch=on_batch,
                spare_bytes=checked.spare_bytes,
            )
            with _explain_divergence(local, name_of(data)):
                with checked.limited_memory():
                    written_before = resume(run, checked.form)
                    check_place(out, force or written_before)
                    measured = RoundProfile() if profiled else None
                    run.run_schedule()
                profile = None
                if measured is not None:
                    profile = measured.finish(checked.bundle, options.threads, run.batch_seconds)
                told = summarized and training_of(checked.bundle).privacy is None
                inputs = summary_of(local.x, local.samples) if told else None
                spend_privacy(run, spend)
                return finish(run, out, force or written_before, keep, profile, inputs)


def judge_bundle(
    folder: str | Path,
    data: Data,
    scratch_for: Path,
    options: TrainingOptions,
    *,
    on_batch: OnBatch = at_once,
    idle: Usage | None = None,
) -> Judgement | None:
    """Evaluate the model of a bundle on the samples that this device uses only for evaluation.

    Nothing is trained. If an evaluation is killed, the next call starts it again and gives the same
    counts.

    Args:
        folder: The bundle.
        data: Local data, see `train_bundle`.
        scratch_for: The path of an update. Recordings are stored in the training folder of this
            update.
        options: Options of a training, with `evaluation` set.
        on_batch: Called before each batch.
        idle: Memory that this process used before its first training (default: the present use).

    Returns:
        The counts. None if the device has too few samples for an evaluation, or if the bundle
        promises differential privacy for samples, because counts have no noise. A loss that is not
        finite becomes the largest possible loss, see `finite_counts`.

    Raises:
        BundleError: The bundle cannot be used.
        DataError: The data do not fit the bundle.
        LimitError: The evaluation needs too much memory.
        UpdateError: The bundle computes counts that are impossible.
    """
    with _explain_system_errors(scratch_for):
        map_large_blocks()
        # Use the plain form: the check of another form needs training steps.
        plan = plan_execution(open_bundle(Path(folder)), options, idle or Usage.now())
        plan = plan.in_plain_form()
        with working_folder(scratch_for) as scratch:
            local = local_data(plan.bundle, data, scratch / UNPACKED)
            apart = held_out_for(len(local), options)
            if not len(apart) or training_of(plan.bundle).privacy is not None:
                return None
            run = ScheduleRun(
                plan.bundle,
                local,
                scratch,
                options,
                {},
                held_out=apart,
                on_batch=on_batch,
                spare_bytes=plan.spare_bytes,
            )
            with plan.limited_memory():
                counts = finite_counts(run.judge())
            check_counts(counts, "This device", signed=True)
            return Judgement(bundle=plan.bundle.sha256, counts=counts)


@contextmanager
def _explain_system_errors(out: Path) -> Iterator[None]:
    """Convert errors of memory and of the disk to errors with a remedy."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if (short := ran_out(error)) is not None:
            raise LimitError(
                "Memory ran out while training {update}: {reason}. Allow more memory: the same "
                "command then continues the training. Or take a smaller submodel.",
                code="memory.ran-out",
                update=str(out),
                reason=str(short) or "none is left",
            ) from None
        raise (storage_error(error) if isinstance(error, OSError) else None) or error from None


@contextmanager
def _explain_divergence(local: LocalData, source: str) -> Iterator[None]:
    """If the training diverges, name an extreme number in the data as a possible cause."""
    try:
        yield
    except UpdateError as error:
        largest = local.largest()
        if largest is None or error.code == "update.beyond-float16":
            raise
        name, sample, number = largest
        raise UpdateError(
            "{reason} First check the data: in {data}, {array}[{sample}] is {number:g}; models "
            "expect numbers around 1.",
            code="update.diverged",
            data=source,
            array=name,
            sample=sample,
            reason=str(error),
            number=number,
        ) from None


def _say_if_few(bundle: Bundle, samples: int) -> None:
    """Warn if there are fewer `samples` than a batch has: then every step trains on all samples."""
    sizes = [step.batch_size for step in bundle.manifest.schedule if isinstance(step, Train)]
    if samples < max(sizes, default=0):
        log.warning(
            "%s: fewer than a batch of %d, so every step trains on all of them.",
            counted(samples, "sample"), max(sizes),
        )  # fmt: skip


def local_data(bundle: Bundle, source: Data, unpack_to: Path | None = None) -> LocalData:
    """Load `source` and check that it fits `bundle`.

    Args:
        bundle: The bundle to train with the data.
        source: Local data: a path, `module:callable`, or the arrays x and y.
        unpack_to: See `load_data`.

    Raises:
        DataError: The data do not fit the bundle.
    """
    about = bundle.manifest
    return load_data(
        source,
        about.sample_shape,
        label_rule(about),
        about.sample_dtype,
        about.sample_limit,
        unpack_to=unpack_to,
        preprocessing=about.preprocessing,
        parts=sample_parts(about),
    )


def resume(run: ScheduleRun, form: str | None) -> bool:
    """Let `run` store checkpoints, and continue from the last checkpoint if there is one.

    Args:
        run: A run that has not started.
        form: The form of the run's graphs; None if the graphs are plain.

    Returns:
        Whether the checkpoint is from a finished training. If so, the update may already exist.
    """
    options = run.options
    # The memory limit is left out: raising it must not restart a training that hit the limit.
    about = (
        run.bundle.sha256,
        run.local.fingerprint,
        options.seed,
        options.threads,
        options.validation,
        runtime_of(run.bundle.manifest.runtime).description(),
        *(() if options.evaluation is None else (options.evaluation,)),
    )
    key, sha256 = training_key(about), run.bundle.sha256
    run.checkpoints = Checkpoints(run.scratch, key, run.personal, sha256, form)
    checkpoint = run.checkpoints.load()
    if checkpoint is None:
        return False
    run.resume(checkpoint)
    return checkpoint.position.instruction == len(run.bundle.manifest.schedule)


def classes_to_report(run: ScheduleRun) -> tuple[int, ...] | None:
    """The classes on which `run` trained, if the server needs them; otherwise None.

    Without a masked loss, the server learns nothing about a device's labels.
    """
    if not any(entry.by_class for entry in run.bundle.manifest.tensors):
        return None
    return tuple(np.flatnonzero(run.trained_classes).tolist())


def finish(
    run: ScheduleRun,
    out: Path,
    force: bool,
    keep: KeepPersonal,
    profile: Profile | None,
    inputs: InputSummary | None,
) -> Trained:
    """Pass the personal tensors to `keep`, then write the update.

    Raises:
        UpdateError: The loss or a tensor is not finite.
    """
    record, tensors = trained_update(run, profile, inputs)
    if training_of(run.bundle).privacy is not None:
        # The coordinator's graph computes these figures without noise, from any of its inputs.
        record = replace(record, loss_first=0.0, loss_last=0.0, validation=())
    kept = personal_tensors(run)
    if kept and run.checkpoints is not None:
        # After `keep`, a restart reads the new personal tensors. It must accept this checkpoint.
        run.checkpoints.accept_personal(kept)
        run.save_checkpoint()
    keep(kept | statistics(run) if kept else kept)
    return Trained(write_update(out, record, tensors, force, run.scratch), kept)


def spend_privacy(run: ScheduleRun, spend: Spend) -> None:
    """Count the steps of a finished run if its samples have differential privacy."""
    instruction = training_of(run.bundle)
    if (terms := instruction.privacy) is None:
        return
    probability = sampling_probability(len(run.trained), instruction.batch_size)
    steps = SampleSteps(probability, terms.noise_multiplier, run.position.steps)
    spend(steps, terms.delta)


def trained_update(
    run: ScheduleRun, profile: Profile | None = None, inputs: InputSummary | None = None
) -> tuple[UpdateRecord, dict[str, np.ndarray]]:
    """Create the update of a finished run: its record, without `file`, and the uploaded tensors.

    Raises:
        UpdateError: The loss or a tensor is not finite.
    """
    about, losses = run.bundle.manifest, run.position.losses
    record = UpdateRecord(
        bundle=run.bundle.sha256,
        base=about.base,
        submodel=about.submodel,
        samples=len(run.trained) if run.position.samples is None else run.position.samples,
        steps=run.position.steps,
        loss_first=losses[0],
        loss_last=losses[-1],
        tensors=uploaded(about.tensors),
        file=FileEntry(size=0, sha256=""),
        profile=profile,
        validation=tuple(run.position.validation),
        classes=classes_to_report(run),
        inputs=inputs or UNSET,
        evaluation=UNSET
        if run.position.before is None or run.position.after is None
        else LocalEvaluation(before=run.position.before, after=run.position.after),
    )
    tensors = {entry.name: run.state[entry.name] for entry in record.tensors}
    check_trained(record, tensors)
    return record, tensors


def personal_tensors(run: ScheduleRun) -> dict[str, np.ndarray]:
    """The personal tensors that a finished run leaves on the device."""
    return {e.name: run.state[e.name] for e in personal_entries(run.bundle.manifest)}


def statistics(run: ScheduleRun) -> dict[str, np.ndarray]:
    """The statistics of a finished run, such as the statistics of batch norms."""
    return {e.name: run.state[e.name] for e in run.bundle.manifest.tensors if e.role == "buffer"}
