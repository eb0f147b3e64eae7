"""Training a bundle on this device: its data, limits and checkpoints, and the update."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.manifest import FileEntry, label_dtype, uploaded
from device_agent.formats.update import UpdateRecord, check_place, check_trained, write_update
from device_agent.runtime.runtime_choice import describe
from device_agent.system.disk_space import storage_error
from device_agent.system.process_memory import map_large_blocks, ran_out
from device_agent.training.batching import held_out
from device_agent.training.checkpoint import (
    CHECKPOINT,
    UNPACKED,
    Checkpoints,
    key_of,
    working_folder,
)
from device_agent.training.local_data import LocalData, load_data
from device_agent.training.memory_estimate import open_at_once
from device_agent.training.memory_limits import (
    Usage,
    ceilings,
    check_fits,
    enforce_memory_limit,
    spare_bytes,
)
from device_agent.training.personal_model import personal_entries
from device_agent.training.round_profile import RoundProfile
from device_agent.training.schedule_interpreter import OnEpoch, ScheduleRun, quiet
from device_agent.training.signature_runs import OnBatch, at_once
from profiles.documents.bundle_profile import Profile
from profiles.errors import LimitError, UpdateError

log = logging.getLogger(__name__)
Keep = Callable[[Mapping[str, np.ndarray]], object]
"""Takes the new personal tensors, before the update appears; twice where a kill came between."""


@dataclass(frozen=True)
class Trained:
    """A written update's record, and the personal tensors to keep on the device."""

    record: UpdateRecord
    personal: dict[str, np.ndarray]


def forget(personal: Mapping[str, np.ndarray]) -> None:
    """Keep nothing."""


def train_bundle(
    folder: str | Path,
    data: str,
    out: str | Path,
    *,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    personal: Mapping[str, np.ndarray] | None = None,
    keep: Keep = forget,
    on_epoch: OnEpoch = quiet,
    on_batch: OnBatch = at_once,
    force: bool = False,
    profiled: bool = False,
    idle: Usage | None = None,
) -> Trained:
    """Train the bundle in `folder` on local `data` and write the update folder `out`.

    Killed and called again with the same arguments it goes on from its last checkpoint. `personal`
    are tensors kept from earlier rounds, `keep` takes the new ones. `seed` decides the order of the
    samples and what dropout drops; with one thread and the same seed the update is the same, bit
    for bit, however often it was killed. `validation` is the share of the samples that is held out
    and judged by after each epoch, `max_memory` the bytes that the process may use. `on_batch`
    may hold the training up before each batch. `force` replaces the update that is in `out`.
    `profiled` adds to the update's record what the training took here; times are never the same
    twice. `idle` is what this process took before it trained anything, where it has.

    Raises BundleError, DataError, LimitError (memory: at once where it is predicted, or when it
    runs out) or UpdateError (training diverged); then `out` is not written.
    """
    out = Path(out)
    with _trouble_in_words(out):
        bundle = open_bundle(Path(folder))
        map_large_blocks()
        idle = idle or Usage.now()
        limits = ceilings(max_memory, idle)
        check_fits(bundle.manifest, validation > 0, limits)
        with working_folder(out) as scratch:
            if not (scratch / CHECKPOINT).exists():
                check_place(out, force)
            local = local_data(bundle, data, scratch / UNPACKED)
            for remark in local.remarks:
                log.warning(remark)
            run = ScheduleRun(
                *(bundle, local, scratch, threads, seed, dict(personal or {}), on_epoch),
                held_out=held_out(len(local), validation),
                on_batch=on_batch,
                spare_bytes=spare_bytes(bundle.manifest, validation > 0, limits),
            )
            with _data_in_mind(local, data):
                sessions = open_at_once(bundle.manifest)
                with enforce_memory_limit(max_memory, threads, sessions, idle):
                    written_before = resume(run, validation)
                    check_place(out, force or written_before)
                    measured = RoundProfile() if profiled else None
                    run.go()
                profile = measured.finish(bundle, threads, run.batch_seconds) if measured else None
                return finish(run, out, force or written_before, keep, profile)


@contextmanager
def _trouble_in_words(out: Path) -> Iterator[None]:
    """Turn what the machine refuses into a sentence."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if (short := ran_out(error)) is not None:
            raise LimitError(
                f"Memory ran out while training {out}: {str(short) or 'none is left'}. Allow more "
                "memory or take a smaller submodel; the same command goes on where it was."
            ) from None
        raise (storage_error(error) if isinstance(error, OSError) else None) or error from None


@contextmanager
def _data_in_mind(local: LocalData, source: str) -> Iterator[None]:
    """Where training diverges, also name a number of the data that may be why."""
    try:
        yield
    except UpdateError as error:
        found = local.largest()
        if found is None:
            raise
        name, sample, number = found
        raise UpdateError(
            f"{error} Before that, look at the data: in {source}, {name}[{sample}] holds "
            f"{number:g}, and models are made for numbers around 1."
        ) from None


def local_data(bundle: Bundle, source: str, unpack_to: Path | None = None) -> LocalData:
    """The data of `source` for `bundle`; `unpack_to`: see `load_data`.

    Raises DataError where they do not fit it.
    """
    about = bundle.manifest
    return load_data(
        source,
        about.sample_shape,
        about.classes,
        about.sample_dtype,
        about.sample_limit,
        labels=label_dtype(about),
        unpack_to=unpack_to,
    )


def resume(run: ScheduleRun, validation: float) -> bool:
    """Let `run` keep checkpoints, and go on from the one that it finds.

    Returns whether that is of a training that was over, so that the update may be there.
    """
    about = (run.bundle.sha256, run.local.fingerprint, run.seed, run.threads, validation)
    key = key_of((*about, describe(run.bundle.manifest.runtime)))
    run.checkpoints = Checkpoints(run.scratch, key, run.personal)
    found = run.checkpoints.latest()
    if found is None:
        return False
    run.resume(found)
    return found.position.instruction == len(run.bundle.manifest.schedule)


def finish(
    run: ScheduleRun, out: Path, force: bool, keep: Keep, profile: Profile | None
) -> Trained:
    """Write the update, after `keep` has the personal tensors.

    Raises UpdateError where the loss or a tensor is not finite.
    """
    about, losses = run.bundle.manifest, run.at.losses
    record = UpdateRecord(
        bundle=run.bundle.sha256,
        base=about.base,
        submodel=about.submodel,
        samples=len(run.trained),
        steps=run.at.steps,
        loss_first=losses[0],
        loss_last=losses[-1],
        tensors=uploaded(about.tensors),
        file=FileEntry(size=0, sha256=""),
        profile=profile,
        validation=tuple(run.at.validation),
    )
    tensors = {entry.name: run.state[entry.name] for entry in record.tensors}
    check_trained(record, tensors)
    kept = {entry.name: run.state[entry.name] for entry in personal_entries(about)}
    if kept and run.checkpoints is not None:
        run.checkpoints.also_for(kept)
        run.checkpoint()
    keep(kept)
    return Trained(write_update(out, record, tensors, force, run.scratch), kept)
