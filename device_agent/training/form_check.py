"""Whether the form of a bundle's graphs that this device runs computes what the plain graphs do.

The probe of the runtime shows which form this device can run, not that this bundle's is right. A
form with another block, or a kernel that is wrong for one shape, trains wrongly without an error.
Before the first training of a bundle, one batch of random data therefore goes through both. Graphs
of frozen stages have no other form.
"""

import logging
import tempfile
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import SAMPLES
from device_agent.system.process_memory import release_unused
from device_agent.training.fastest_runtime import objection
from device_agent.training.memory_estimate import open_at_once, untouched_bytes
from device_agent.training.memory_limits import Usage, enforce_memory_limit
from device_agent.training.random_run import nudge, random_run
from device_agent.training.remembered_trials import Trials, key_of
from device_agent.training.runtime_trial import Trial, projected
from device_agent.training.training_options import TrainingOptions
from profiles.errors import BundleError

log = logging.getLogger(__name__)


def with_checked_form(
    plain: Bundle, formed: Bundle, options: TrainingOptions, idle: Usage, file: Path
) -> Bundle:
    """`formed`, or `plain` with a warning if the first steps of the two differ.

    A check for which there is too little memory, or in which numbers are not finite, proves
    nothing; then the form is used.

    Args:
        plain: The bundle as it was opened.
        formed: The same bundle as this device runs it.
        options: Threads and memory limit of the training.
        idle: Memory of this process before its first training.
        file: Where the result is remembered.
    """
    graphs = {formed.graph(step.signature).name for step in training_of(formed).steps}
    forms = {form for name in graphs if (form := form_of(name)) is not None}
    if not forms:
        return formed

    def make(name: str) -> Trial:
        sessions, untouched = open_at_once(plain.manifest), untouched_bytes(plain.manifest)
        try:
            with enforce_memory_limit(
                options.max_memory, options.threads, sessions, idle, untouched
            ):
                return Trial(refused=difference(plain, formed, options.threads))
        except MemoryError:
            return Trial()
        finally:
            release_unused()

    files = [(name, formed.manifest.files[name].sha256) for name in sorted(graphs)]
    key = fingerprint(msgspec.json.encode((key_of(plain, options), files))).sha256
    against = Trials(file, key, make).of(form := min(forms)).refused
    if against is None:
        return formed
    log.warning(
        "This device trains the plain graphs, because their form %s computes other numbers: %s. "
        "Please report it with the output of `edgetailor-agent doctor`.",
        *(form, against),
    )
    return plain


def difference(plain: Bundle, formed: Bundle, threads: int) -> str | None:
    """How the first steps of two forms of a bundle differ; None if they agree."""
    ours = first_step(plain, threads)
    if not np.isfinite([*ours.losses, *chain(*ours.changes.values())]).all():
        return None
    try:
        theirs = first_step(formed, threads)
    except BundleError as error:
        return str(error)
    return objection(ours, theirs, lambda: first_step(plain, threads, nudged=True))


def first_step(bundle: Bundle, threads: int, nudged: bool = False) -> Trial:
    """The losses of all training work for one batch of random data, and what it changes.

    With `nudged`, all weights differ a little.
    """
    training = training_of(bundle)
    recorded = [] if training.source == SAMPLES else [training.source]
    with tempfile.TemporaryDirectory() as scratch:
        run = random_run(bundle, recorded, Path(scratch), threads)
        sessions = run.open_sessions(training)
        if nudged:
            nudge(run.state.values())
        before = projected(run.state)
        losses = run.train_batch(training, sessions, np.arange(len(run.local)))
        after = projected(run.state)
    changes = {name: (after[name] - sums).tolist() for name, sums in before.items()}
    return Trial(losses=tuple(losses), changes=changes)
