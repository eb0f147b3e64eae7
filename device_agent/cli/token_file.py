"""Reads the file with a join token."""

from pathlib import Path

from profiles.errors import InputError

TOKEN_BYTES = 4096
UNALTERED = "Give the file that `edgetailor serve` wrote, unaltered."


def read_token(path: Path) -> str:
    """Read a join token.

    Raises:
        InputError: The file cannot be read, is too long or is not text.
    """
    try:
        with path.open("rb") as file:
            # A wrong path may name a file of gigabytes, or one without end such as /dev/zero.
            content = file.read(TOKEN_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise InputError(
            "The token file {path} cannot be read: {reason}.",
            code="file.unreadable",
            path=str(path),
            reason=error.strerror,
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            "The token file {path} is not a text file. {remedy}",
            code="join.invalid-token-file",
            path=str(path),
            remedy=UNALTERED,
        ) from None
    if len(content) > TOKEN_BYTES:
        raise InputError(
            "The token file {path} has more than {limit_bytes} bytes. {remedy}",
            code="join.invalid-token-file",
            path=str(path),
            limit_bytes=TOKEN_BYTES,
            remedy=UNALTERED,
        )
    return text.strip()
