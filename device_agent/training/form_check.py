"""Checks that a bundle's graphs in the device's form give the same results as the plain graphs.

A probe of the runtime shows which form this device can run. It does not show that the form of this
bundle is correct. If the form has another block size, or if the runtime computes one shape wrongly,
the training gives wrong results without an error. Therefore, before the first training of a bundle,
one batch of random data runs through both forms. Graphs of frozen stages have only the plain form.
"""

import logging
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import Bundle, training_of
from device_agent.formats.manifest import SAMPLES
from device_agent.system.process_memory import release_unused
from device_agent.training.execution_plan import ExecutionPlan
from device_agent.training.random_run import nudge, random_run
from device_agent.training.remembered_checks import keep_check, key_of, read_checks
from device_agent.training.step_comparison import FirstStep, changed_since, objection, projected
from profiles.errors import BundleError
from profiles.project_urls import issues_url

log = logging.getLogger(__name__)


def with_checked_form(
    plan: ExecutionPlan, file: Path, scratch: Path, wait: Callable[[], object] = lambda: None
) -> ExecutionPlan:
    """Check the form of `plan`. Returns `plan`, or a plan with plain graphs if the results differ.

    The check compares the results of the first training step. If memory is too small for the check,
    or if numbers are not finite, the check has no result. Then the form is used now, and checked
    again before the next training.

    Args:
        plan: How the device would train the bundle.
        file: The file with the results of earlier checks.
        scratch: Folder for temporary files.
        wait: Called before the check. The check starts when `wait` returns.
    """
    if plan.form is None:
        return plan
    key, remembered = key_of(plan), read_checks(file)
    if key not in remembered:
        wait()
        try:
            with plan.limited_memory():
                remembered[key] = difference(plan, scratch)
        except (MemoryError, FloatingPointError):
            return plan
        finally:
            release_unused()
        keep_check(file, key, remembered[key])
    if remembered[key] is None:
        return plan
    log.warning(
        "%s trains with its plain graphs on this machine, because the form %s of the graphs gives "
        "other results: %s. Please report it at %s with the output of `edgetailor-agent doctor`. "
        "Delete %s to compare again.",
        plan.bundle.manifest.submodel, plan.form, remembered[key], issues_url(), file,
    )  # fmt: skip
    return plan.in_plain_form()


def difference(plan: ExecutionPlan, scratch: Path) -> str | None:
    """Describe how the first steps in the plan's form and in plain form differ; None if they agree.

    Raises FloatingPointError if the plain graphs compute numbers that are not finite.
    """
    step = partial(first_step, threads=plan.options.threads, scratch=scratch)
    plain = step(plan.plain)
    if not np.isfinite([*plain.losses, *chain(*plain.changes.values())]).all():
        raise FloatingPointError
    try:
        formed = step(plan.bundle)
    except BundleError as error:
        return str(error)
    return objection(plain, formed, partial(step, plan.plain, nudged=True))


def first_step(bundle: Bundle, threads: int, scratch: Path, nudged: bool = False) -> FirstStep:
    """Do all training work for one batch of random data. Returns losses and changes of tensors.

    If `nudged` is set, all weights are slightly changed before the step.
    """
    training = training_of(bundle)
    recordings = [] if training.source == SAMPLES else [training.source]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run = random_run(bundle, recordings, Path(folder), threads)
        sessions = run.open_sessions(training)
        if nudged:
            nudge(run.state.values())
        before = projected(run.state)
        losses = run.train_batch(training, sessions, np.arange(len(run.local)))
        return FirstStep(tuple(losses), changed_since(before, run.state))
