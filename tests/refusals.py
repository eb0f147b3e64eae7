"""Checking errors by their code and values, so that a test does not depend on their wording.

The wording of every error is pinned in one place that a test compares: docs/reference/errors.md.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from profiles.errors import EdgeTailorError


@contextmanager
def refused(
    code: str, words: str = "", /, **values: object
) -> Iterator[pytest.ExceptionInfo[EdgeTailorError]]:
    """The block raises an error with this `code`, with `words` in its message and with `values`."""
    with pytest.raises(EdgeTailorError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    assert words in str(error), f"{words!r} is not in: {error}"
    # As a program reads them: a tuple is a list in JSON.
    reported = json.loads(json.dumps({name: error.values.get(name) for name in values}))
    assert reported == json.loads(json.dumps(values)), f"{error.values}: {error}"


class ErrorAudit:
    """Watches every error that the tests' process makes: is its message complete, its data JSON?

    Attributes:
        faults: What is wrong with the errors since `faults` was emptied.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []

    def install(self) -> None:
        """Watch from now on."""
        original = EdgeTailorError.__init__

        def watched(error: EdgeTailorError, /, *args: Any, **values: Any) -> None:
            original(error, *args, **values)
            self.faults += faults_of(error)

        EdgeTailorError.__init__ = watched  # type: ignore[assignment, method-assign]


def faults_of(error: EdgeTailorError) -> Iterator[str]:
    """What a reader or a program cannot use of `error`: names not filled in, values not JSON."""
    for name in re.findall(r"\{(\w+)(?:![rs])?(?::[^{}]*)?\}", error.template):
        if name not in error.values:
            yield f"{error.code}: {{{name}}} has no value in {error.template!r}"
    try:
        json.dumps(error.values)
    except (TypeError, ValueError) as problem:
        yield f"{error.code}: {error.values} are not JSON: {problem}"
