"""Reads sizes and time spans in the notation that people use."""

import re

from profiles.errors import InputError

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
LARGEST = 2**63
SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_bytes(text: str) -> int:
    """Read a size in bytes.

    Args:
        text: A number and a unit: 256MB, 1.5 GB (powers of 1000) or 512MiB (powers of 1024).

    Returns:
        The size in bytes.

    Raises:
        InputError: `text` is not a size, or has no unit.

    Examples:
        >>> parse_bytes("1.5kB"), parse_bytes("2 KiB")
        (1500, 2048)
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = matched and UNITS.get(matched[2].upper())
    if not matched or not unit:
        raise InputError(
            "Invalid size {text!r}: write a number and a unit (kB, MB, GB, KiB, MiB, GiB), for "
            "example 256MB.",
            code="option.invalid-size",
            text=text,
        )
    # Very long numbers become infinite here, which the limit refuses.
    amount = float(matched[1]) * unit
    if not (amount < LARGEST and round(amount)):
        raise InputError(
            "Invalid size {text!r}: it must be at least one byte and below 8 EiB.",
            code="option.invalid-size",
            text=text,
        )
    return round(amount)


def parse_duration(text: str) -> float:
    """Read a time span in seconds.

    Args:
        text: A number and `s`, `m`, `h` or `d`: 90s, 10m, 1.5h or 7d.

    Returns:
        The time span in seconds.

    Raises:
        InputError: `text` is not a time span.

    Examples:
        >>> parse_duration("1.5h")
        5400.0
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip())
    if not matched:
        raise InputError(
            "Invalid time span {text!r}: write a number and s, m, h or d, for example 10m.",
            code="option.invalid-duration",
            text=text,
        )
    return float(matched[1]) * SPANS[matched[2]]
