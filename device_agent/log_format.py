"""Lines of the agent's log: plain with a time stamp, or JSON for programs."""

import json
import time
from collections.abc import Callable
from datetime import datetime

Field = str | int | float | bool


class Line(str):
    """A line of the log; `fields` are what a program would have to find in it."""

    fields: dict[str, Field]

    def __new__(cls, text: str, **fields: Field) -> "Line":
        """The line `text`."""
        made = super().__new__(cls, text)
        made.fields = fields
        return made


class Log:
    """Gives `write` every line that it is called with, stamped; as JSON where `as_json` says so.

    Elapsed seconds are of a clock that never jumps, since this log began.
    """

    def __init__(self, write: Callable[[str], None], as_json: bool = False) -> None:
        self._write, self._as_json = write, as_json
        self._began = time.monotonic()

    def __call__(self, line: str) -> None:
        """Log `line`, which may be a Line."""
        now = datetime.now().astimezone()
        if not self._as_json:
            self._write(f"[{now.isoformat(timespec='seconds')}] {line}")
            return
        stamp = {
            "time": now.isoformat(timespec="milliseconds"),
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "level": "info",
            "message": line.strip(),
        }
        self._write(json.dumps(stamp | (line.fields if isinstance(line, Line) else {})))
