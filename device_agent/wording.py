"""How the commands put numbers into words."""


def counted(number: int, noun: str) -> str:
    """`number` and the noun in the form that goes with it: 1 sample, 1,797 samples."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
