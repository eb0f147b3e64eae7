"""Decoding JSON of unknown origin, with one error for all that can be wrong with it."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedError(msgspec.DecodeError):
    """Bytes that are no JSON, or not of the type that was asked for; the message says what."""


def decode_json(data: bytes | str, type: type[T]) -> T:
    """`data` as a `type`. Raises MalformedError."""
    # msgspec lets two errors through that are not its own.
    try:
        return msgspec.json.decode(data, type=type)
    except UnicodeDecodeError:
        raise MalformedError("it is not UTF-8 text") from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise MalformedError(str(error)) from None
