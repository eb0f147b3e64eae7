"""The marker: a small file that names the database's federation and its last milestone.

With the marker, `serve` notices if the database is missing, belongs to another federation, or is
older than the marker. The milestones are: a join, a departure, a return, the end of a round, and a
rollback.
"""

import hashlib
import json
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from device_agent.formats.atomic_files import write_file
from toolkit.coordinator.database import schema

MARKER = "federation.json"


@dataclass(frozen=True)
class Marker:
    """The state of the federation `id` after milestone number `generation`.

    `round` is the last round that is over. `model` is the SHA-256 of the model that the next round
    starts from. Both are None before round 0.
    """

    id: str
    generation: int
    round: int | None
    model: str | None

    @classmethod
    def of(cls, connection: sqlite3.Connection) -> Self:
        """The marker that belongs to this database."""
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        current = connection.execute(schema.CURRENT_MODEL).fetchone()
        return cls(meta["id"], int(meta["generation"]), *(current or (None, None)))

    def write(self, folder: Path) -> None:
        """Write the marker of the state folder `folder`."""
        fields = asdict(self)
        document = {"version": 1, **fields, "check": _check(fields)}
        write_file(folder / MARKER, json.dumps(document, indent=1).encode() + b"\n")


def read_marker(folder: Path) -> Marker | None:
    """The marker of `folder`; None if it is missing or damaged."""
    try:
        document = json.loads((folder / MARKER).read_bytes())
        fields = {key: document[key] for key in Marker.__dataclass_fields__}
        return Marker(**fields) if document["check"] == _check(fields) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _check(fields: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]
