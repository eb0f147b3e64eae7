"""Decodes untrusted JSON. Every problem of the JSON raises the same error."""

import json
from collections.abc import Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")


class MalformedError(msgspec.DecodeError):
    """Data that is not JSON or not of the requested type. The message names the wrong place."""


def build_decoders(types: Iterable[type]) -> None:
    """Let msgspec build a decoder for each of `types`. Call this before threads decode such types.

    If two threads decode a type for the first time at once, msgspec 0.22 crashes the process: the
    second thread reads the description of the type while the first thread is still filling it.
    """
    for kind in types:
        msgspec.json.Decoder(kind)


def decode_json(data: bytes | str, type: type[T]) -> T:
    """Decode `data` as `type`. Raises MalformedError."""
    # msgspec lets two errors of other libraries through.
    try:
        return msgspec.json.decode(data, type=type)
    except UnicodeDecodeError:
        raise MalformedError("it is not UTF-8 text") from None
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise MalformedError(str(error)) from None


def decode_strictly(data: bytes, type: type[T]) -> T:
    """Decode `data` from another machine as `type`. Also refuse objects that have a key twice."""
    refuse_repeated_keys(data)
    return decode_json(data, type)


def refuse_repeated_keys(data: bytes) -> None:
    """Raise MalformedError if `data` is not JSON, or an object in it has a key twice.

    If an object has a key twice, some JSON parsers use the first value and some use the last.
    """

    def unique(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedError(f"it has the key {key!r} twice")
            seen.add(key)

    try:
        json.loads(data, object_pairs_hook=unique)
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except ValueError as error:
        raise MalformedError(str(error)) from None
