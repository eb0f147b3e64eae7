"""Sizes and time spans as people write them."""

import re

from profiles.errors import InputError

UNITS: dict[str, int] = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
LARGEST = 2**63
SPANS = {"s": 1, "m": 60, "h": 3600}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 256MB, 1.5 GB (powers of 1000) or 512MiB (powers of 1024).

    Raises InputError for anything else, a size without a unit included.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    unit = found and UNITS.get(found[2].upper())
    if not found or not unit:
        raise InputError(
            f"A size is a number and a unit (kB, MB, GB, KiB, MiB, GiB), such as 256MB; "
            f"{text!r} is none."
        )
    amount = float(found[1]) * unit
    if not (amount < LARGEST and round(amount)):
        raise InputError(f"A size is at least one byte and below 8 EiB; {text!r} is none.")
    return round(amount)


def parse_duration(text: str) -> float:
    """Seconds of a time span such as 90s, 10m or 1.5h. Raises InputError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if not found:
        raise InputError(f"A time span is a number and s, m or h, such as 10m; {text!r} is none.")
    return float(found[1]) * SPANS[found[2]]
