"""Trials of runtimes, remembered in a file, so that later rounds do not repeat them."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from device_agent.formats.atomic_files import fingerprint, fingerprint_file, write_file
from device_agent.formats.bundle import Bundle, structure, training_of
from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import Struct
from device_agent.runtime.runtime_choice import alternatives, describe, versions
from device_agent.training.training_options import TrainingOptions
from device_agent.training.trials.runtime_trial import Trial, faster_of
from profiles.documents.bundle_profile import this_machine
from profiles.json_decoding import MalformedError, decode_json

log = logging.getLogger(__name__)
VERSION = 1
KEPT = 50
"""Keys that a file holds; the oldest are dropped."""


class Remembered(Struct, frozen=True, kw_only=True):
    """The content of the file: trials by key (see `key_of`) and by name of a runtime or form."""

    version: int = VERSION
    trials: dict[str, dict[str, Trial]]


def default_trials() -> Path:
    """The file of a device outside a federation, below $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "edgetailor-agent" / "runtimes.json"


def key_of(bundle: Bundle, options: TrainingOptions) -> str:
    """SHA-256 of what a trial depends on: the bundle, threads, memory limit, software and machine.

    It is the same in all rounds of one submodel, as long as the server writes the same graphs.
    """
    own, training = bundle.manifest.runtime, training_of(bundle)
    files = sorted(bundle.manifest.files.items())
    about = (
        structure(bundle.manifest),
        [fingerprint_file(bundle.graph(step.signature)).sha256 for step in training.steps],
        [(name, one.sha256) for name, one in files if form_of(name) is not None],
        training.batch_size,
        options.threads,
        options.max_memory,  # a trial that ran out of memory may have enough with another limit
        [describe(name) for name in (own, *alternatives(own))],
        versions(),
        this_machine(describe(own)),
    )
    return fingerprint(msgspec.json.encode(about, order="sorted")).sha256


class Trials:
    """The trials of one bundle. New ones are made when they are asked for, and remembered.

    Args:
        file: The file.
        key: What the trials are of, see `key_of`.
        make: Makes the trial of a runtime or form.
    """

    def __init__(self, file: Path, key: str, make: Callable[[str], Trial]) -> None:
        self._file, self._key, self._make = file, key, make
        self._known = self._read().get(key, {})

    def __contains__(self, runtime: str) -> bool:
        return runtime in self._known

    def of(self, runtime: str) -> Trial:
        """The trial of `runtime`."""
        return self._known.get(runtime) or self._keep(runtime, self._make(runtime))

    def repeat(self, runtime: str) -> Trial:
        """The trial of `runtime` after another one, of which the shorter times count."""
        known, again = self.of(runtime), self._make(runtime)
        return known if again.refused else self._keep(runtime, faster_of(known, again))

    def _keep(self, runtime: str, trial: Trial) -> Trial:
        self._known[runtime] = trial
        self._write()
        return trial

    def _read(self) -> dict[str, dict[str, Trial]]:
        try:
            found = decode_json(self._file.read_bytes(), Remembered)
        except (OSError, MalformedError):
            return {}  # none yet, or damaged: try again
        return found.trials if found.version == VERSION else {}

    def _write(self) -> None:
        others = {key: trials for key, trials in self._read().items() if key != self._key}
        newest = dict([*others.items(), (self._key, self._known)][-KEPT:])
        try:
            write_file(self._file, msgspec.json.encode(Remembered(trials=newest)))
        except OSError as error:
            log.warning("The trial is not remembered: %s: %s", self._file, error.strerror)
