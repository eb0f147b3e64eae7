"""Checks that need no torch. Every command runs them first, so that a typo is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from device_agent.training.data_functions import is_reference
from profiles.errors import DataError, InputError, SpecError
from toolkit.families import check_spec
from toolkit.submodels.model_reference import check_reference


def check_model(reference: str, weights: Path | None = None) -> None:
    """Refuse a misspelt MODEL and a weights file that cannot be read.

    Raises:
        ModelError: See `check_reference`.
        InputError: The file cannot be read.
    """
    check_reference(reference)
    if weights is not None:
        check_readable(weights)


def check_readable(path: Path) -> None:
    """Raise InputError if the file `path` cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}.", code="file.unreadable", file=str(path)
        ) from None


def check_data(source: str) -> None:
    """Raise DataError if `source` names a file that does not exist."""
    if not is_reference(source) and not Path(source).exists():
        raise DataError(
            f"{source} does not exist; give an .npz file with x and y.",
            code="data.missing-file",
            file=source,
        )


def check_specs(specs: Iterable[str]) -> None:
    """Raise SpecError for the first spec that no model could satisfy."""
    for spec in specs:
        check_spec(spec)


def check_some_spec(specs: Iterable[str]) -> None:
    """Raise the first SpecError if every spec is wrong: the others are still worth a table."""
    errors = []
    for spec in specs:
        try:
            check_spec(spec)
        except SpecError as error:
            errors.append(error)
        else:
            return
    if errors:
        raise errors[0]
