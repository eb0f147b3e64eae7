"""Recovers a Ctrl-C that torch hid: torch's clean-up code may raise another error instead."""


def raise_if_interrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt if one is among the causes of `error`."""
    before = error.__cause__ or error.__context__
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        before = before.__cause__ or before.__context__
