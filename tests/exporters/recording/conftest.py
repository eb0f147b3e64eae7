"""Tests of recordings make their own."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def models_recorded_once() -> None:
    """Replaces that of all exporters."""
