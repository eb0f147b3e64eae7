"""Reading the file with a join token that the user names."""

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
            f"The token file {path} cannot be read: {error.strerror}.",
            code="file.unreadable",
            path=str(path),
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            f"The token file {path} is not a text file. {UNALTERED}",
            code="join.invalid-token-file",
            path=str(path),
        ) from None
    if len(content) > TOKEN_BYTES:
        raise InputError(
            f"The token file {path} has more than {TOKEN_BYTES} bytes. {UNALTERED}",
            code="join.invalid-token-file",
            path=str(path),
        )
    return text.strip()
