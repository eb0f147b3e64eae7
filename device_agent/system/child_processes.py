"""What is said of a child process of the agent that failed."""

import signal


def failure(code: int, errors: bytes) -> str:
    """Why a child process failed.

    Args:
        code: Its exit status; negative for the number of the signal that ended it.
        errors: What it wrote to stderr.

    Returns:
        The last line of `errors`, or what the signal means.
    """
    if code == -signal.SIGKILL:
        return "the system killed the process, most likely because memory ran out."
    # The child prints its error last, after anything that the runtime prints.
    said = errors.decode(errors="replace").strip().split("\n")[-1]
    return said or f"its process ended with the status {code}"
