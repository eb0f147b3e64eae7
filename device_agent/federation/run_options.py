"""Options of `edgetailor-agent run`. They are set on the command line or in a TOML file."""

import dataclasses
import json
import logging
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from device_agent.federation.owner_limits import NO_LIMITS, OwnerLimits
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.protocol.rounds import Work
from device_agent.training.training_options import DEFAULT_OPTIONS, TrainingOptions
from profiles.errors import InputError
from profiles.text_formatting import did_you_mean

log = logging.getLogger(__name__)
TEXT_OPTIONS = {"data", "state", "quiet_hours"}
SWITCHES = {
    "only_when_charging",
    "only_when_idle",
    "only_unmetered",
    "log_json",
    "report_classes",
    "fine_tune",
}
GROUPS, ASKED = ("training", "limits"), ("evaluation", "budget_s")
"""The fields that are groups of options, and the fields that the federation sets."""
NUMBER_LIMIT = 2**63
"""Numbers in an options file must be below this: larger ones overflow in click and in C code."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """All options of `run`. Addresses and secrets are not options: they are in the state folder.

    This class groups some options, but the command line and the TOML file have no groups.
    `from_flat` and `to_flat` convert between the two forms.

    Attributes:
        data: Local data: a file, a folder or `module:callable`.
        state: The device's state folder. None means the default folder.
        training: Options of the training in every round.
        limits: The conditions under which the agent pauses.
        report_classes: If the federation asks for the evaluation of each class, also report this
            evaluation.
        fine_tune: If the operator asks for fine-tuning, fine-tune releases on the samples of this
            device.
        nice: Niceness of the process, 0 to 19.
        log_json: Write the log as JSON lines.
    """

    data: str
    state: Path | None = None
    training: TrainingOptions = DEFAULT_OPTIONS
    limits: OwnerLimits = NO_LIMITS
    report_classes: bool = False
    fine_tune: bool = False
    nice: int = 0
    log_json: bool = False

    @classmethod
    def from_flat(cls, **values: Any) -> Self:
        """Create the options from their names on the command line, with _ instead of -."""
        training, limits = (
            {name: values.pop(name) for name in _names(group) if name in values}
            for group in (TrainingOptions, OwnerLimits)
        )
        return cls(**values, training=TrainingOptions(**training), limits=OwnerLimits(**limits))

    def evaluation(self, asked: EvaluationRequest | None) -> EvaluationRequest | None:
        """The evaluation that the federation asks for.

        Counts by class are left out unless the owner allows them.
        """
        if asked is None:
            return None
        return dataclasses.replace(asked, by_class=asked.by_class and self.report_classes)

    def for_round(self, work: Work, repeated: int) -> TrainingOptions:
        """The training options of the round of `work`.

        In secure sums, devices ignore the time budget. Otherwise a coordinator could give all other
        devices a tiny budget, so that the sum is almost the update of one device. A repeated
        training gets another seed, so that its update differs.

        Args:
            work: The work.
            repeated: How many masked updates the device has already sent in this round.
        """
        # Imported here: the commands that only read options do not need NumPy.
        from device_agent.training.batching import round_seed

        seed = round_seed(self.training.seed + repeated, work.round)
        return dataclasses.replace(
            self.training,
            seed=seed,
            evaluation=self.evaluation(work.evaluation),
            budget_s=work.budget_s if work.secure is None else None,
        )

    def to_flat(self) -> dict[str, Any]:
        """The options by their names on the command line, with _ instead of -."""
        groups = (self, self.training, self.limits)
        return {name: getattr(group, name) for group in groups for name in _names(type(group))}

    def toml(self) -> str:
        """The content of a TOML file with the options that are set. `read_options` can read it."""
        return "".join(
            f"{key} = {_toml(value)}\n" for key, value in self.to_flat().items() if value
        )


def _names(group: type) -> list[str]:
    """The names of the options in a group, without nested groups and fields of the federation."""
    names = [field.name for field in dataclasses.fields(group)]
    return [name for name in names if name not in (*GROUPS, *ASKED)]


OPTION_NAMES = [*_names(RunOptions), *_names(TrainingOptions), *_names(OwnerLimits)]


def _toml(value: Any) -> str:
    # JSON's texts, numbers and booleans are TOML's too.
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def read_options(path: Path) -> dict[str, Any]:
    """Read an options file.

    Args:
        path: The TOML file.

    Returns:
        The options by name, not converted yet. click takes them as defaults.

    Raises:
        InputError: The file cannot be read, is not TOML, or has an unknown key or a wrong value.
    """
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            "{path} cannot be read: {reason}.",
            code="file.unreadable",
            path=str(path),
            reason=error.strerror,
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            "{path} is not a TOML file: {reason}.",
            code="file.not-toml",
            path=str(path),
            reason=str(error),
        ) from None
    if (runtime := options.pop("runtime", None)) not in (None, "onnxruntime"):
        text = "%s: `runtime = %r` is not supported any more; this agent trains with onnxruntime."
        log.warning(text, path, runtime)
    unknown = sorted(options.keys() - set(OPTION_NAMES))
    if unknown:
        raise InputError(
            "{path}: unknown option `{option}`{did_you_mean} The options are {options}.",
            code="option.unknown",
            path=str(path),
            option=unknown[0],
            did_you_mean=did_you_mean(unknown[0], OPTION_NAMES),
            options=list(OPTION_NAMES),
        )
    for key, value in options.items():
        _check(path, key, value)
    return options


def _check(path: Path, key: str, value: Any) -> None:
    """Raise InputError unless `value` has the type that the option `key` takes."""
    if key in TEXT_OPTIONS:
        # A null character would cut the text off in systemd's and the kernel's calls.
        fine, kind = isinstance(value, str) and "\0" not in value, "a text"
    elif key in SWITCHES:
        fine, kind = isinstance(value, bool), "true or false"
    else:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        fine, kind = numeric and abs(value) < NUMBER_LIMIT, "a number"
        if key == "max_memory":
            fine, kind = fine or isinstance(value, str), "bytes, or a size like 256MB"
    if not fine:
        raise InputError(
            "{path}: `{option}` must be {kind}; it is {value}.",
            code="option.wrong-type",
            path=str(path),
            option=key,
            kind=kind,
            value=repr(value),
        )
