"""What is said of a weights file that cannot be read. Needs no torch, as a command checks first."""

from pathlib import Path

from profiles.errors import InputError


def unreadable(path: str | Path, error: OSError) -> InputError:
    """The error for the weights file `path`, which could not be opened because of `error`."""
    if isinstance(error, IsADirectoryError):
        return InputError(
            "{file} is a folder, but the weights of the global model are one file. Give the "
            ".safetensors file that `edgetailor export --save-weights` or `edgetailor aggregate "
            "--out` wrote.",
            code="file.is-a-folder",
            file=str(path),
        )
    return InputError(
        "{file} cannot be read: {reason}.",
        code="file.unreadable",
        file=str(path),
        reason=error.strerror,
    )
