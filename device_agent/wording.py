"""How the commands put numbers and other people's errors into words."""


def counted(number: int, noun: str) -> str:
    """`number` and the noun in the form that goes with it: 1 sample, 1,797 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
