"""Stores the results of form checks in a file, so that later rounds do not repeat the checks."""

import logging
import os
from pathlib import Path

import msgspec

from device_agent.formats.atomic_files import fingerprint, fingerprint_file, write_file
from device_agent.formats.bundle import structure, training_of
from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import Struct
from device_agent.runtime.runtime_choice import runtime_of, versions
from device_agent.training.execution_plan import ExecutionPlan
from profiles.documents.bundle_profile import this_machine
from profiles.json_decoding import MalformedError, decode_json

log = logging.getLogger(__name__)
VERSION = 1
KEPT = 50
"""Number of results in a file. Older results are dropped."""


class Remembered(Struct, frozen=True, kw_only=True):
    """The content of the file with the results of checks.

    `objections` maps the key of a check (see `key_of`) to the reason why the checked form of a
    graph is not used. If the form is correct, the reason is None.
    """

    version: int = VERSION
    objections: dict[str, str | None]


def default_checks() -> Path:
    """The file for a device outside a federation: below $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "edgetailor-agent" / "forms.json"


def key_of(plan: ExecutionPlan) -> str:
    """Hash everything on which a check depends: bundle, form, threads, memory, software, machine.

    If the server writes the same graphs in all rounds of a submodel, the SHA-256 stays the same.
    """
    plain, training = plan.plain, training_of(plan.plain)
    runtime = runtime_of(plain.manifest.runtime).description()
    files = sorted(plain.manifest.files.items())
    about = (
        structure(plain.manifest),
        [fingerprint_file(plain.graph(step.signature)).sha256 for step in training.steps],
        [(name, entry.sha256) for name, entry in files if form_of(name) is not None],
        plan.form,
        training.batch_size,
        plan.options.threads,
        plan.options.max_memory,  # with another limit, a refused form may have enough memory
        versions(),
        this_machine(runtime),
    )
    return fingerprint(msgspec.json.encode(about, order="sorted")).sha256


def read_checks(file: Path) -> dict[str, str | None]:
    """Read the results in `file`. The result is empty if the file does not exist or is damaged."""
    try:
        remembered = decode_json(file.read_bytes(), Remembered)
    except (OSError, MalformedError):
        return {}
    return remembered.objections if remembered.version == VERSION else {}


def keep_check(file: Path, key: str, objection: str | None) -> None:
    """Add a result to `file`. If this fails, log a warning."""
    objections = {**read_checks(file), key: objection}
    newest = dict(list(objections.items())[-KEPT:])
    try:
        write_file(file, msgspec.json.encode(Remembered(objections=newest)))
    except OSError as error:
        log.warning(
            "Cannot store the result of a check of the graph's form; the check is repeated in "
            "later rounds: %s: %s",
            file,
            error.strerror,
        )
