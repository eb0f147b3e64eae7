"""The last message of a device to its coordinator, so that no round waits for the device.

The message leaves the device. So it has no values from the data, and no folder names, because
folder names may contain the owner's name.
"""

import re
from collections.abc import Iterable

from device_agent.formats.protocol.rounds import Stopped
from device_agent.system.process_memory import ran_out
from profiles.errors import AuthorisationError, EdgeTailorError, filled

BY_OWNER = "agent.stopped"
"""Code of a device that was stopped in order, by its owner or its system."""
REASON_LENGTH = 500
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.\.?)?/(?:[^\s/'\":]+/)*")
_OF_DATA = re.compile(r"\{(?:number|label)(?:![rs])?(?::[^{}]*)?\}")
"""Fields of templates that are filled in with numbers or labels from the data."""
_NUMBER = re.compile(r"(?<!\w)[-+]?\d[\d.]*(?:[eE][-+]?\d+)?")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


def stop_report(error: BaseException, round_: int) -> Stopped | None:
    """Describe the `error` that ends the agent in `round_`. Returns None for an AuthorisationError.

    An AuthorisationError means that the coordinator no longer knows the device, so no round waits
    for it.
    """
    if isinstance(error, AuthorisationError):
        return None
    code, reason = _described(error)
    return Stopped(code=code, reason=reason[:REASON_LENGTH], round=round_)


def _described(error: BaseException) -> tuple[str, str]:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return BY_OWNER, "stopped by its owner or its system"
    if ran_out(error) is not None:
        return "memory.ran-out", "memory ran out"
    if isinstance(error, EdgeTailorError):
        return error.code, reported(error)
    if isinstance(error, OSError):
        path = "" if error.filename is None else f"{error.filename}: "
        reason = f"{path}{error.strerror or type(error).__name__}"
        return "file.system-error", without_folders(reason, [error.filename])
    # The message is left out, because it may contain anything.
    return "program.internal-error", f"an internal error ({type(error).__name__})"


def reported(error: EdgeTailorError) -> str:
    """The message of `error` without folders and without values from the data.

    Examples:
        >>> reported(EdgeTailorError("In {data} is {number:g}.", data="/a/b.csv", number=3e4))
        "In b.csv is '...'."
    """
    values = error.values
    if "library" in values:
        # A runtime's message may have numbers from the data, and a graph can choose them.
        values = {**values, "reason": _NUMBER.sub("...", str(values["reason"]))}
    text = filled(_OF_DATA.sub("'...'", error.template), values)
    text = without_folders(text, error.values.values())
    return _QUOTED.sub("'...'", text) if error.code.startswith("data.") else text


def without_folders(text: str, values: Iterable[object] = ()) -> str:
    """Replace each path in `text` by its file name.

    A path is a value in `values` that has a slash, or a part of `text` that looks like a path.

    Examples:
        >>> without_folders("/home/ann/a.npz: y in my data/b.npz", ["my data/b.npz"])
        'a.npz: y in b.npz'
    """
    paths = {str(value) for value in values if "/" in str(value)}
    for path in sorted(paths, key=len, reverse=True):
        text = text.replace(path, path.rstrip("/").rpartition("/")[2])
    return _FOLDERS.sub("", text)
