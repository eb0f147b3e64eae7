"""Checks without torch. Every command runs them first, so that a typo is refused at once."""

from collections.abc import Iterable
from pathlib import Path

from device_agent.data.data_functions import is_reference
from profiles.errors import DataError, SpecError
from toolkit.families import check_spec
from toolkit.submodels.model_reference import check_reference, unreadable


def check_model(reference: str, weights: Path | None = None) -> None:
    """Refuse a misspelt MODEL and a weights file that cannot be read.

    Raises:
        ModelError: See `check_reference`.
        InputError: The file cannot be read.
    """
    check_reference(reference)
    if weights is not None:
        check_weights(weights)


def check_weights(path: Path) -> None:
    """Raise InputError if the weights file `path` cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from None


def check_data(source: str) -> None:
    """Raise DataError if `source` names a file that does not exist."""
    if not is_reference(source) and not Path(source).exists():
        raise DataError(
            "{file} does not exist; give an .npz file with x and y, or x_NAME and y_NAME for "
            "several inputs or outputs.",
            code="data.missing-file",
            file=source,
        )


def check_specs(specs: Iterable[str]) -> list[str]:
    """Return the specs in canonical form. Raises SpecError for the first wrong spec."""
    return [str(check_spec(spec)) for spec in specs]


def check_some_spec(specs: Iterable[str]) -> None:
    """Raise the first SpecError if every spec is wrong.

    If at least one spec is right, nothing is raised, because the command has something to show.
    """
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
