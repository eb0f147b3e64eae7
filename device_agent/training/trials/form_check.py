"""Whether the form of a bundle's graphs that this device runs computes what the plain graphs do.

The probe of the runtime shows which form this device can run, not that this bundle's is right. A
form with another block, or a kernel that is wrong for one shape, trains wrongly without an error.
Before the first training of a bundle, one batch of random data therefore goes through both. Graphs
of frozen stages have no other form.
"""

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import SAMPLES
from device_agent.system.process_memory import release_unused
from device_agent.training.memory_estimate import open_at_once, untouched_bytes
from device_agent.training.memory_limits import Usage, enforce_memory_limit
from device_agent.training.random_run import nudge, random_run
from device_agent.training.runtime_option import Fits, with_runtime, without_forms
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.fastest_runtime import objection
from device_agent.training.trials.remembered_trials import Trials, key_of
from device_agent.training.trials.runtime_trial import Trial, changed_since, projected
from profiles.errors import BundleError
from profiles.project_urls import issues_url

log = logging.getLogger(__name__)


def with_right_forms(
    bundle: Bundle,
    options: TrainingOptions,
    idle: Usage,
    file: Path,
    *,
    fits: Fits,
    scratch: Path,
    wait: Callable[[], object] = lambda: None,
) -> Bundle:
    """`bundle`, or if a first step in this device's form differs, `bundle` without forms.

    A check for which there is too little memory, or in which numbers are not finite, proves
    nothing; then the form is used.

    Args:
        bundle: The bundle as it was opened.
        options: Threads and memory limit of the training.
        idle: Memory of this process before its first training.
        file: Where the result is remembered.
        fits: Whether the form fits, see `with_runtime`.
        scratch: Folder for temporary files.
        wait: Called before the check, which starts when it returns.
    """
    formed = with_runtime(bundle, bundle.manifest.runtime, fits)
    graphs = (formed.graph(step.signature).name for step in training_of(formed).steps)
    forms = {form for name in graphs if (form := form_of(name)) is not None}
    if not forms:
        return bundle

    def make(name: str) -> Trial:
        wait()
        sessions, untouched = open_at_once(formed.manifest), untouched_bytes(formed.manifest)
        try:
            with enforce_memory_limit(
                options.max_memory, options.threads, sessions, idle, untouched
            ):
                return Trial(refused=difference(bundle, formed, options.threads, scratch))
        finally:
            release_unused()

    (form,) = forms
    try:
        against = Trials(file, key_of(bundle, options), make).of(form).refused
    except (MemoryError, FloatingPointError):
        return bundle
    if against is None:
        return bundle
    log.warning(
        "%s trains its plain graphs here, because their form %s computes other numbers: %s. Please "
        "report it at %s with the output of `edgetailor-agent doctor`. Delete %s to compare again.",
        *(bundle.manifest.submodel, form, against, issues_url(), file),
    )
    return without_forms(bundle)


def difference(plain: Bundle, formed: Bundle, threads: int, scratch: Path) -> str | None:
    """How the first steps of two forms of a bundle differ; None if they agree.

    Raises FloatingPointError if the plain graphs compute numbers that are not finite.
    """
    step = partial(first_step, threads=threads, scratch=scratch)
    ours = step(plain)
    if not np.isfinite([*ours.losses, *chain(*ours.changes.values())]).all():
        raise FloatingPointError
    try:
        theirs = step(formed)
    except BundleError as error:
        return str(error)
    return objection(ours, theirs, partial(step, plain, nudged=True))


def first_step(bundle: Bundle, threads: int, scratch: Path, nudged: bool = False) -> Trial:
    """The losses of all training work for one batch of random data, and what it changes.

    With `nudged`, all weights differ a little.
    """
    training = training_of(bundle)
    recorded = [] if training.source == SAMPLES else [training.source]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run = random_run(bundle, recorded, Path(folder), threads)
        sessions = run.open_sessions(training)
        if nudged:
            nudge(run.state.values())
        before = projected(run.state)
        losses = run.train_batch(training, sessions, np.arange(len(run.local)))
        return Trial(losses=tuple(losses), changes=changed_since(before, run.state))
