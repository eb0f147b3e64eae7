"""Ctrl-C while torch works: its own clean-up may fail on the way and hide it behind that error."""


def raise_if_interrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt where `error` came up while one was on its way."""
    before = error.__cause__ or error.__context__
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        before = before.__cause__ or before.__context__
