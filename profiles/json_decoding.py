"""Decoding of untrusted JSON, with one error for every way in which it can be wrong."""

from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedError(msgspec.DecodeError):
    """Data that is not JSON or not of the requested type; the message says where."""


def decode_json(data: bytes | str, type: type[T]) -> T:
    """Decode `data` as `type`. Raises MalformedError."""
    # msgspec passes on two errors that are not its own.
    try:
        return msgspec.json.decode(data, type=type)
    except UnicodeDecodeError:
        raise MalformedError("it is not UTF-8 text") from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise MalformedError(str(error)) from None
