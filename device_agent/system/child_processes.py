"""Explains why a child process of the agent failed."""

import signal


def failure(code: int, errors: bytes) -> str:
    """Explain why a child process failed.

    Args:
        code: Its exit status. If a signal ended it, this is the negative number of the signal.
        errors: Its output on stderr.

    Returns:
        The last line of `errors`. If SIGKILL ended the process, a sentence which says that memory
        probably ran out.
    """
    if code == -signal.SIGKILL:
        return "the system killed the process, most likely because memory ran out."
    # The child prints its error last, after anything that the runtime prints.
    said = errors.decode(errors="replace").strip().split("\n")[-1]
    return said or f"its process ended with the status {code}"
