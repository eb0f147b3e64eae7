"""How the commands put numbers into words."""


def counted(number: int, noun: str) -> str:
    """`number` and the noun in the form that goes with it: 1 sample, 1,797 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(text: str, most: int) -> str:
    """At most `most` characters of what somebody else says; they move no terminal's cursor."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:most]
