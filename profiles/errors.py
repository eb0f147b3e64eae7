"""All errors of EdgeTailor. If a command fails, the error's class sets its exit code."""

import os
import re
from collections.abc import Mapping
from typing import Any

_FIELD = re.compile(r"\{(\w+)(![rs])?(:[^{}]*)?\}")


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill in `template`: replace `{name}`, `{name!r}` and `{name:.1f}` by the value of `name`.

    A list is written with commas. Other braces stay unchanged, because a value such as a path may
    contain braces.

    Examples:
        >>> filled("{path} holds {count:.1f} of {these}.", {"path": "a.npz", "count": 2})
        'a.npz holds 2.0 of {these}.'
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            return match[0]
        value = values[name]
        if isinstance(value, list) and not match[2]:
            value = ", ".join(map(str, value))
        return f"{{0{match[2] or ''}{match[3] or ''}}}".format(value)

    return _FIELD.sub(replaced, template)


def _plain(value: Any) -> Any:
    """Convert a path or an exception to text, which JSON can hold. Other values are unchanged."""
    if isinstance(value, BaseException):
        return str(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class EdgeTailorError(Exception):
    """An error that a person can act on. Its message states the rule, the problem and the remedy.

    To handle all errors that this library reports, catch this class. Distinguish the errors by
    `code`. Any other exception is a bug of the library.

    The message is made from a template: each name in braces is replaced by its value in `values`.

    Attributes:
        template: The message with names in braces instead of values, as in
            `docs/reference/errors.md`.
        code: A stable name for programs, for example `spec.unknown-family`.
            `docs/reference/errors.md` lists all codes.
        values: The values that the message names, in types that JSON can represent.
        exit_code: The exit code of a command that ends with this error.

    Examples:
        >>> error = SpecError("Unknown family {name!r}.", code="spec.unknown-family", name="x")
        >>> str(error), error.code, error.values
        ("Unknown family 'x'.", 'spec.unknown-family', {'name': 'x'})
    """

    exit_code = 2

    def __init__(self, template: str = "", *, code: str = "", **values: Any) -> None:
        plain = {name: _plain(value) for name, value in values.items()}
        super().__init__(filled(template, plain))
        self.template = template
        self.code = code
        self.values: dict[str, Any] = plain


class InputError(EdgeTailorError):
    """A file, argument or value that cannot be used."""


class ModelError(InputError):
    """A model reference that cannot be loaded, or a model that cannot be captured."""


class SpecError(InputError):
    """A submodel spec that cannot be read, or that the model cannot satisfy."""


class DataError(InputError):
    """Local training data that does not fit the bundle."""


class StorageError(DataError):
    """Training needs space on a disk, but the disk is full or cannot be written."""


class BundleError(InputError):
    """A bundle that is incomplete, altered or in a format that this version does not read."""


class UpdateError(InputError):
    """An update that belongs to another round or bundle, or that has unusable numbers."""


class ExportError(EdgeTailorError):
    """A submodel could not be turned into graphs."""

    exit_code = 3


class VerificationError(EdgeTailorError):
    """Exported graphs and PyTorch disagree by more than the tolerance."""

    exit_code = 4


class LimitError(EdgeTailorError):
    """A task needs more memory than it may use, or more than the machine has."""

    exit_code = 5


class DoesNotFitError(LimitError):
    """A bundle needs more memory than a process may use. The bundle is refused before training."""


class NothingFitsError(EdgeTailorError):
    """No submodel is within the budgets of a device."""

    exit_code = 5


class UnstableError(EdgeTailorError):
    """A measurement that is too noisy for `--strict`."""

    exit_code = 7


class RegressionError(EdgeTailorError):
    """A measured time or size grew by more than allowed."""

    exit_code = 8


class ClientError(EdgeTailorError):
    """The coordinator cannot be reached, or its answer does not follow the protocol."""

    exit_code = 6


class AuthorisationError(ClientError):
    """The coordinator refused a token or the secret of a device."""


class TrustError(ClientError):
    """A message does not come from the coordinator that the device has joined."""
