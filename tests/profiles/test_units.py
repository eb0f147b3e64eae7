"""Sizes as people write them."""

import pytest

from profiles.units import parse_bytes, parse_duration
from refusals import refused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MB", 256_000_000),
        ("256mb", 256_000_000),
        (" 1.5 GB ", 1_500_000_000),
        ("512MiB", 536_870_912),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("1GiB", 2**30),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "256",
        "",
        "MB",
        "-1MB",
        "1e3MB",
        "256 M",
        "0MB",
        "0.1B",
        "9EB",
        "9999999999GB",
        f"{'9' * 400}MB",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with refused("option.invalid-size", repr(text), text=text):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m ", 120)]
)
def test_time_spans(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["10", "", "m", "-1m", "10min", "1e3s"])
def test_what_is_no_time_span(text: str) -> None:
    with refused("option.invalid-duration", repr(text), text=text):
        parse_duration(text)
