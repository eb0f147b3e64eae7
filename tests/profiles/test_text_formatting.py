"""Numbers as the commands show them, at the borders between units."""

import pytest

from profiles.text_formatting import (
    bytes_as_option,
    format_bytes,
    format_duration,
    format_seconds,
    megabytes,
    milliseconds,
)
from profiles.units import parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.0 kB"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (28_449_999, "28.4 MB"),
        (8e9, "8.0 GB"),
        (3.5e12, "3.5 TB"),
        (4e15, "4000.0 TB"),
        (None, "not measurable"),
    ],
)
def test_bytes(count: float | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1, 99_999, 100_001, 84_999_999, 85_000_000])
def test_an_option_allows_what_it_was_made_from(count: int) -> None:
    allowed = parse_bytes(bytes_as_option(count))
    assert count <= allowed < count + 10**5


def test_an_option_that_must_not_allow_more_is_rounded_down() -> None:
    assert bytes_as_option(10_799_999, round_down=True) == "10.7MB"
    assert bytes_as_option(10_799_999) == "10.8MB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 ms"),
        (1.5e-7, "0.150 us"),
        (2.3456e-6, "2.35 us"),
        (4.051e-4, "0.405 ms"),
        (0.1, "100.00 ms"),
        (-0.0012, "-1.20 ms"),
        (1, "1.00 s"),
        (75.25, "75.25 s"),
    ],
)
def test_run_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (123.4, "2 min 3 s"),
        (3599.6, "1 h 0 min"),
        (3900, "1 h 5 min"),
    ],
)
def test_elapsed_times(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_cells_hold_no_unit() -> None:
    assert (megabytes(1_640_000), megabytes(1_640_000, 2), megabytes(None)) == ("1.6", "1.64", "-")
    assert (milliseconds(0.0205), milliseconds(None)) == ("20.50", "-")
