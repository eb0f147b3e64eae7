"""Explains why a child process of the agent failed."""

import signal


def failure(code: int, errors: bytes) -> str:
    """Explain why a child process failed.

    Args:
        code: The exit status of the process. If a signal ended the process, it is the negative
            number of the signal.
        errors: The output of the process on stderr.

    Returns:
        The last line of `errors`. If SIGKILL ended the process, the result is a sentence that
        memory probably ran out.
    """
    if code == -signal.SIGKILL:
        return "the system killed the process, most likely because memory ran out."
    # The child prints its error last, after anything that the runtime prints.
    said = errors.decode(errors="replace").strip().split("\n")[-1]
    return said or f"its process ended with the status {code}"
