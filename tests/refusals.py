"""Checking errors by their code and values, so that a test does not depend on their wording.

The wording of every error is pinned in one place that a test compares: docs/reference/errors.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from profiles.errors import EdgeTailorError


@contextmanager
def refused(code: str, **values: object) -> Iterator[pytest.ExceptionInfo[EdgeTailorError]]:
    """The block raises an error with this `code` whose values include `values`."""
    with pytest.raises(EdgeTailorError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    found = {name: error.values.get(name) for name in values}
    assert found == values, f"{error.values}: {error}"
