"""How the commands put numbers and other people's errors into words."""

import textwrap

WIDTH = 80


def counted(number: int, noun: str) -> str:
    """`number` and the noun in the form that goes with it: 1 sample, 1,797 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_a_row(times: int) -> str:
    """How often something happened without anything else in between."""
    return "once" if times == 1 else f"{times} times in a row"


def have_joined(joined: int, expected: int) -> str:
    """How far a federation is from its first round."""
    return f"{joined} of {counted(expected, 'device')} {'has' if joined == 1 else 'have'} joined"


def one_line(text: str, most: int | None = None) -> str:
    """At most `most` characters of what somebody else says; they move no terminal's cursor."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:most]


def said_by(error: BaseException) -> str:
    """What `error` of somebody else's code says, in one line."""
    try:
        return one_line(str(error))
    except Exception:  # its own words may fail too
        return "it does not say why"


def wrapped(head: str, text: str) -> list[str]:
    """`text` after `head` in 80 columns, its further lines below; commands and paths stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
