"""Python's garbage collection is rarer for a time, and as the caller set it afterwards."""

import gc
from collections.abc import Iterator

import pytest

from exporters.programs.garbage_collection import NEW_OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("own", "meanwhile"), [(700, NEW_OBJECTS), (NEW_OBJECTS + 1, NEW_OBJECTS + 1), (0, 0)]
)
def test_the_callers_setting_returns_even_after_an_error(own: int, meanwhile: int) -> None:
    gc.set_threshold(own, 5, 6)

    @rare_collections()
    def fail() -> None:
        assert gc.get_threshold() == (meanwhile, 5, 6)
        raise ZeroDivisionError

    for _ in range(2):  # a decorated function may run again
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.get_threshold() == (own, 5, 6)


def test_contexts_that_overlap_restore_the_first_setting() -> None:
    gc.set_threshold(700, 5, 6)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (NEW_OBJECTS, 5, 6)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 5, 6)
