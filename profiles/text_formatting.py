"""Formats each kind of quantity for people, and cleans messages of other programs."""

import difflib
import math
import re
import textwrap
from collections.abc import Iterable

WIDTH = 80
NOT_MEASURABLE = "not measurable"
UNKNOWN_CELL = "-"
"""Stands in tables for a figure that is not known."""
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Unicode's controls of the writing direction."""


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural: 1 sample, 1,797 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def round_of(round_: int, last: int | None) -> str:
    """A round and the last round's number: round 3 of 12; round 3 if there is no last round."""
    return f"round {round_} of {last}" if last else f"round {round_}"


def in_a_row(times: int) -> str:
    """How often something happened in a row: once, 3 times in a row."""
    return "once" if times == 1 else f"{times} times in a row"


def have_joined(joined: int, expected: int) -> str:
    """How many devices have joined: 1 of 3 devices has joined."""
    return f"{joined} of {counted(expected, 'device')} {'has' if joined == 1 else 'have'} joined"


def loss_figure(loss: float) -> str:
    """A loss with four decimals, or in powers of ten if it is huge.

    Examples:
        >>> loss_figure(0.25), loss_figure(3.325e35)
        ('0.2500', '3.33e+35')
    """
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def did_you_mean(came: str, known: Iterable[str], most: int = 1) -> str:
    """End a sentence about the unknown word `came`: suggest up to `most` similar words of `known`.

    Examples:
        >>> did_you_mean("lowrank", ["full", "low-rank"]), did_you_mean("x", ["full"])
        (": did you mean 'low-rank'?", '.')
    """
    close = difflib.get_close_matches(came, list(known), n=most)
    return f": did you mean {' or '.join(map(repr, close))}?" if close else "."


def one_line(text: str, most: int | None = None) -> str:
    """Untrusted text as one line of at most `most` characters, without control characters."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:most]


def visible(text: str) -> str:
    r"""Return `text` with escapes for all characters that control the writing direction.

    Such characters could make one name look like another, or reverse the line with the name.

    Examples:
        >>> visible("a\u202eb")
        'a\\u202eb'
    """
    return _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def said_by(error: BaseException) -> str:
    """The message of an exception that other code raised, as one line."""
    try:
        return one_line(str(error))
    except Exception:  # __str__ of foreign code may fail too
        return "it does not say why"


def wrapped(head: str, text: str) -> list[str]:
    """Wrap `head` and `text` at 80 columns, without breaking words.

    All lines after the first are indented by the length of `head`.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def format_bytes(count: float | None) -> str:
    """Bytes with one decimal, in powers of 1000: 512 B, 28.4 MB. None gives "not measurable"."""
    if count is None:
        return NOT_MEASURABLE
    if round(count) < 1000:
        return f"{count:.0f} B"
    # Compare the rounded figure: 999,960 bytes are 1.0 MB, not 1000.0 kB.
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def bytes_as_option(count: float, *, round_down: bool = False) -> str:
    """Bytes in the form that options and files take: 28.4MB, rounded up unless `round_down`."""
    tenths = math.floor(count / 1e5) if round_down else math.ceil(count / 1e5)
    return f"{tenths / 10:.1f}MB"


def megabytes(count: float | None, places: int = 1) -> str:
    """Megabytes without the unit, for a table whose header names the unit. None gives a dash."""
    return UNKNOWN_CELL if count is None else f"{count / 1e6:.{places}f}"


def format_seconds(seconds: float) -> str:
    """A run time in s, ms or us: at least two decimals and three significant digits."""
    if abs(seconds) >= 1:
        return f"{_three_digits(seconds)} s"
    # Steps of small models take some tenths of a millisecond. They are written in ms, like others.
    if abs(seconds) >= 1e-4 or not seconds:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def milliseconds(seconds: float | None) -> str:
    """Milliseconds without the unit, for a table whose header names the unit. None gives a dash."""
    return UNKNOWN_CELL if seconds is None else f"{seconds * 1e3:.2f}"


def format_duration(seconds: float) -> str:
    """An elapsed time, rounded to whole seconds or minutes: 42 s, 2 min 3 s, 1 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def _three_digits(value: float) -> str:
    """Format `value` with three significant digits and at least two decimals."""
    places = 2 if value == 0 else max(2, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def format_macs(macs: int) -> str:
    """Multiply-accumulates with a unit."""
    return f"{macs / 1e6:,.1f} M" if macs >= 1e6 else f"{macs / 1e3:.1f} k"


def format_capacity(value: float) -> str:
    """A capacity with two decimals. If these would be 0.00, it has two significant digits."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.{1 - math.floor(math.log10(value))}f}"
