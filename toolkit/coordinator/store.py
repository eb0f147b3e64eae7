"""What the coordinator must not forget: one sqlite3 database and a folder of files by hash.

One writer behind a lock, WAL, synchronous=FULL. A file is on disk before a row refers to it, and a
row is gone before its file is dropped, so a stop at any moment leaves a state to go on from.
"""

import hashlib
import hmac
import secrets
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from device_agent.manifest import FileEntry
from device_agent.protocol import RoundResult
from profiles.errors import InputError
from toolkit.coordinator.blobs import Blobs, Part
from toolkit.coordinator.refusals import forbidden

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (
    kind TEXT PRIMARY KEY, hash TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS devices (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, secret TEXT NOT NULL,
    bytes_down INTEGER NOT NULL DEFAULT 0, bytes_up INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS bundles (
    round INTEGER, submodel TEXT, name TEXT, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (round, submodel, name));
CREATE TABLE IF NOT EXISTS uploads (device TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS updates (
    round INTEGER, device TEXT, sha256 TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (round, device));
CREATE TABLE IF NOT EXISTS history (
    round INTEGER PRIMARY KEY, accuracy REAL NOT NULL, loss REAL NOT NULL,
    updates INTEGER NOT NULL, model TEXT NOT NULL);
"""

Bundle = dict[str, FileEntry]


def hashed(secret: str) -> str:
    """What is kept of a token or secret: its SHA-256 (they are random, so no salt is needed)."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True)
class Device:
    """An enrolled device; bytes count bodies over all rounds."""

    id: str
    kind: str
    name: str
    secret_hash: str
    bytes_down: int
    bytes_up: int


class Store:
    """The state folder of one federation. Raises InputError where another process has it open."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.blobs = Blobs(folder / "files")
        self._lock = threading.RLock()
        self._db = sqlite3.connect(folder / "state.sqlite3", timeout=1, check_same_thread=False)
        try:
            # Exclusive: a second `serve` on this folder fails here rather than later and oddly.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            self._db.close()
            raise InputError(
                f"{folder} cannot be used ({error}): stop the coordinator that runs on it, or set "
                "another `state` folder."
            ) from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise InputError(
                f"{folder} is not a state folder of this program ({error}): set another `state`."
            ) from None

    def close(self) -> None:
        """Let go of the folder."""
        with self._lock:
            self._db.close()

    def settle(self, key: str, value: str) -> str:
        """Remember `value` under `key` the first time; returns what is remembered."""
        with self._lock, self._db:
            self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return str(row[0])

    # Devices and tokens

    def set_token(self, kind: str, token: str, count: int) -> None:
        """Let `token` enrol devices of `kind`, `count` in all."""
        with self._lock, self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)", (kind, hashed(token), count)
            )

    def enrol(self, token: str, name: str) -> tuple[Device, str]:
        """Make a device of the token's kind; returns it and its secret.

        Raises RefusalError (403) for an unknown token and for one that is used up.
        """
        with self._lock, self._db:
            kind, count = self._token(token)
            used = self._db.execute("SELECT count(*) FROM devices WHERE kind = ?", (kind,))
            number = int(used.fetchone()[0]) + 1
            if number > count:
                raise forbidden(
                    f"This join token is used up: all {count} devices of kind {kind!r} have "
                    "joined. Use the token of another kind, or start a federation with more."
                )
            secret = secrets.token_urlsafe(32)
            device = Device(f"{kind}-{number}", kind, name, hashed(secret), 0, 0)
            self._db.execute(
                "INSERT INTO devices (id, kind, name, secret) VALUES (?, ?, ?, ?)",
                (device.id, kind, name, device.secret_hash),
            )
            return device, secret

    def _token(self, token: str) -> tuple[str, int]:
        given = hashed(token)
        for kind, known, count in self._db.execute("SELECT kind, hash, count FROM tokens"):
            if hmac.compare_digest(known, given):
                return kind, count
        raise forbidden(
            "This join token is unknown here: give the content of one of the .token files that "
            "`edgetailor serve` names when it starts."
        )

    def devices(self) -> list[Device]:
        """All enrolled devices, in the order in which they came."""
        columns = "id, kind, name, secret, bytes_down, bytes_up"
        with self._lock:
            rows = self._db.execute(f"SELECT {columns} FROM devices ORDER BY rowid").fetchall()
        return [Device(*row) for row in rows]

    def device_with(self, secret: str) -> Device | None:
        """The device that authenticates with `secret`, if there is one."""
        given = hashed(secret)
        matching = (d for d in self.devices() if hmac.compare_digest(d.secret_hash, given))
        return next(matching, None)

    def count_bytes(self, device: str, *, down: int = 0, up: int = 0) -> None:
        """Add to the bytes that `device` has fetched and sent."""
        with self._lock, self._db:
            self._db.execute(
                "UPDATE devices SET bytes_down = bytes_down + ?, bytes_up = bytes_up + ? "
                "WHERE id = ?",
                (down, up, device),
            )

    # Rounds

    def set_bundles(
        self, round_: int, bundles: Mapping[str, Mapping[str, bytes]]
    ) -> dict[str, Bundle]:
        """Keep the bundles of `round_` by submodel, and none of earlier rounds' files."""
        with self._lock:
            kept = {
                submodel: {name: self.blobs.put(data) for name, data in files.items()}
                for submodel, files in bundles.items()
            }
            with self._db:
                self._db.execute("DELETE FROM bundles")
                self._db.execute("DELETE FROM uploads")
                self._db.executemany(
                    "INSERT INTO bundles VALUES (?, ?, ?, ?, ?)",
                    [
                        (round_, submodel, name, entry.size, entry.sha256)
                        for submodel, files in kept.items()
                        for name, entry in files.items()
                    ],
                )
            self._drop_files()
            return kept

    def bundles(self, round_: int) -> dict[str, Bundle]:
        """The bundles of `round_` by submodel; empty where that round has not been opened."""
        found: dict[str, Bundle] = {}
        with self._lock:
            rows = self._db.execute(
                "SELECT submodel, name, size, sha256 FROM bundles WHERE round = ?", (round_,)
            ).fetchall()
        for submodel, name, size, sha256 in rows:
            found.setdefault(submodel, {})[name] = FileEntry(size=size, sha256=sha256)
        return found

    def keep_upload(self, device: str, part: Part) -> FileEntry:
        """Keep the received tensors of `device`, in place of any it sent before."""
        with self._lock:
            entry = self.blobs.adopt(part)
            with self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO uploads VALUES (?, ?)", (device, entry.sha256)
                )
                self._db.execute(
                    "UPDATE devices SET bytes_up = bytes_up + ? WHERE id = ?", (entry.size, device)
                )
            self._drop_files()
            return entry

    def upload(self, device: str) -> str | None:
        """SHA-256 of the tensors that `device` sent last in this round."""
        with self._lock:
            row = self._db.execute("SELECT sha256 FROM uploads WHERE device = ?", (device,))
            found = row.fetchone()
        return None if found is None else str(found[0])

    def add_update(self, round_: int, device: str, sha256: str, record: bytes) -> None:
        """Count an update (hash of its tensors, its update.json) towards `round_`."""
        with self._lock, self._db:
            self._db.execute(
                "INSERT OR IGNORE INTO updates VALUES (?, ?, ?, ?)",
                (round_, device, sha256, record),
            )

    def updates(self, round_: int) -> list[tuple[str, str, bytes]]:
        """(device, hash of its tensors, update.json) of `round_`, in a steady order."""
        with self._lock:
            return self._db.execute(
                "SELECT device, sha256, record FROM updates WHERE round = ? ORDER BY device",
                (round_,),
            ).fetchall()

    def rounds_trained(self) -> dict[str, int]:
        """How many rounds each device's update was taken in."""
        with self._lock:
            rows = self._db.execute("SELECT device, count(*) FROM updates GROUP BY device")
            return dict(rows.fetchall())

    def add_result(self, result: RoundResult, model: bytes) -> None:
        """Keep the global model after a round together with how good it is."""
        with self._lock:
            entry = self.blobs.put(model)
            with self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?, ?)",
                    (result.round, result.accuracy, result.loss, result.updates, entry.sha256),
                )
            self._drop_files()

    def history(self) -> list[RoundResult]:
        """The results so far, from round 0."""
        with self._lock:
            rows = self._db.execute(
                "SELECT round, accuracy, loss, updates FROM history ORDER BY round"
            ).fetchall()
        return [RoundResult(round=r, accuracy=a, loss=x, updates=n) for r, a, x, n in rows]

    def model(self) -> bytes | None:
        """The latest global model, if there is one."""
        with self._lock:
            row = self._db.execute("SELECT model FROM history ORDER BY round DESC LIMIT 1")
            found = row.fetchone()
            return None if found is None else self.blobs.path(found[0]).read_bytes()

    def _drop_files(self) -> None:
        rows = self._db.execute(
            "SELECT sha256 FROM bundles UNION SELECT sha256 FROM uploads "
            "UNION SELECT sha256 FROM updates "  # those that are not folded in yet
            "WHERE round > (SELECT coalesce(max(round), 0) FROM history) "
            "UNION SELECT * FROM (SELECT model FROM history ORDER BY round DESC LIMIT 1)"
        )
        self.blobs.keep_only({row[0] for row in rows})
