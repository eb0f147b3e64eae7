"""The coordinator's state on disk: a database, and a folder of files named by their hashes.

A file is on disk before a row refers to it, and a row is deleted before its file. A coordinator
that is killed at any moment can therefore continue. `folder_check.py` finds files that were lost or
damaged while no coordinator ran.
"""

import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.manifest import FileEntry, encode
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    RoundResult,
)
from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError
from toolkit.aggregation.limits.reference import Reference
from toolkit.coordinator.database import final_evaluation, open_round, schema
from toolkit.coordinator.database.database import Database
from toolkit.coordinator.database.device_registry import Registry
from toolkit.coordinator.database.final_evaluation import FinalEvaluation
from toolkit.coordinator.database.join_tokens import JoinTokens
from toolkit.coordinator.database.joins import UsedJoins
from toolkit.coordinator.database.key_log import TrustedKeys
from toolkit.coordinator.database.open_round import OpenRound, StoppedDevices
from toolkit.coordinator.database.operator_log import Action, OperatorLog
from toolkit.coordinator.database.operator_tokens import OperatorTokens
from toolkit.coordinator.database.release_reports import ReleaseReports
from toolkit.coordinator.database.round_history import (
    RoundHistory,
    figures_text,
    judge,
    limited_text,
    note_spent,
)
from toolkit.coordinator.database.schema_upgrade import columns
from toolkit.coordinator.database.settings_log import (
    LOSS,
    Change,
    SettingsLog,
    changes_model,
)
from toolkit.coordinator.database.suspicions import Suspect, Suspicions
from toolkit.coordinator.database.update_records import UpdateRecords
from toolkit.coordinator.storage import retention
from toolkit.coordinator.storage.blobs import Blobs
from toolkit.coordinator.storage.federation_marker import Marker, read_marker
from toolkit.coordinator.storage.folder_check import DATABASE, check_folder
from toolkit.coordinator.storage.folder_lock import FolderLock, locked
from toolkit.coordinator.storage.incoming_files import IncomingFile, IncomingFiles
from toolkit.coordinator.storage.recoverable import FILES, MODEL, has_hash
from toolkit.coordinator.storage.retention import Keep

logger = logging.getLogger(__name__)

Bundle = dict[str, FileEntry]
INCOMING = "incoming"
REFERENCE = "reference"
"""The key in the table `meta` of the medians of earlier updates."""
FLIGHTS = "flights"
"""The key in the table `meta` of the devices that train earlier rounds."""
REFERENCED = """
SELECT sha256 FROM bundles UNION ALL SELECT sha256 FROM uploads
UNION ALL SELECT sha256 FROM updates WHERE round > (SELECT coalesce(max(round), 0) FROM history)
UNION ALL SELECT model FROM history WHERE kept"""
"""The hashes of the files that the database needs; some are listed twice. The tensors of updates
that are in the global model are no longer needed."""
KEPT_UPDATES = f"""
SELECT sha256 FROM updates WHERE round > (SELECT max(round) FROM history) -
(SELECT CAST(value AS INTEGER) FROM meta WHERE key = '{retention.KEEP_UPDATES}')"""
"""The hashes of the tensors of updates that stay after their round. These tensors may be missing:
only `leave_one_out.py` reads them."""


class Store:
    """The state folder of one federation. `keep` says which models stay.

    At the start, the newest and the best model are compared with their hashes. With `read_all`, all
    kept models are compared. `lock` is the lock of the folder, if the caller holds it already.

    Raises InputError, and changes nothing, if another process uses the folder or if its federation
    cannot be continued.
    """

    def __init__(
        self,
        folder: Path,
        keep: Keep = "all",
        needs_model: bool = True,
        read_all: bool = False,
        lock: FolderLock | None = None,
    ) -> None:
        self.folder, self.keep = folder, keep
        self._lock = lock or locked(folder)
        try:
            check_folder(folder, needs_model)
            self._database = Database(folder / DATABASE)
        except BaseException:
            self._lock.release()
            raise
        self._database.on_milestone = self._write_marker
        self.blobs = Blobs(folder / FILES)
        self.incoming = IncomingFiles(folder / INCOMING)
        self.registry = Registry(self._database)
        self.open_round = OpenRound(self._database)
        self.final_evaluation = FinalEvaluation(self._database)
        self.stopped = StoppedDevices(self._database)
        self.suspicions = Suspicions(self._database)
        self.operator_log = OperatorLog(self._database)
        self.operators = OperatorTokens(self._database)
        self.join_tokens = JoinTokens(self._database)
        self.settings = SettingsLog(self._database)
        self.history = RoundHistory(self._database, self.settings)
        self.records = UpdateRecords(self._database)
        self.used_joins = UsedJoins(self._database)
        self.trusted_keys = TrustedKeys(self._database)
        self.release_reports = ReleaseReports(self._database)
        self._held: list[str] = []
        self._recover(read_all)

    def close(self) -> None:
        """Close the database, so that another process may open the folder."""
        self._database.close()
        self._lock.release()

    def _write_marker(self, connection: sqlite3.Connection) -> None:
        Marker.of(connection).write(self.folder)

    def _recover(self, read_all: bool) -> None:
        """Repair an incomplete state after a kill or damage, as far as possible."""
        with self._database.transaction() as db:
            marker = Marker.of(db)
            pending = db.execute("SELECT sha256 FROM uploads EXCEPT SELECT sha256 FROM updates")
            lost = [(sha256,) for (sha256,) in pending if not self.blobs.is_whole(sha256)]
            db.executemany("DELETE FROM uploads WHERE sha256 = ?", lost)
            rounds = retention.drop_lost(db, marker.model, self.blobs, read_all)
        for round_ in rounds:
            logger.warning("The model of round %d is missing or damaged: it is lost.", round_)
        if marker != read_marker(self.folder):
            marker.write(self.folder)
        if marker.model is not None and not self.blobs.is_whole(marker.model):
            copy = self.folder / MODEL
            if has_hash(copy, marker.model):
                self.blobs.put(copy.read_bytes())

    def set_once(self, key: str, value: str) -> str:
        """Store `value` under `key` unless `key` has a value. Returns the stored value."""
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return str(row[0])

    def set_value(self, key: str, value: str) -> None:
        """Store `value` under `key`, in place of an earlier value."""
        if self.value(key) != value:
            with self._database.transaction() as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def value(self, key: str) -> str | None:
        """The value under `key`, or None."""
        with self._database.transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_bundles(
        self,
        round_: int,
        bundles: Iterable[tuple[str, Mapping[str, bytes]]],
        oldest: int | None = None,
    ) -> dict[str, Bundle]:
        """Keep the bundles of `round_` by submodel.

        Args:
            round_: The round that opens next.
            bundles: Each submodel with its files: one bundle is in memory at a time.
            oldest: The first round whose bundles devices may still train. By default this is
                `round_`; then partly received updates are forgotten, too.
        """
        if oldest is None:
            self.incoming.clear()
        with self._unnamed() as put:
            kept = {
                submodel: {name: put(data) for name, data in files.items()}
                for submodel, files in bundles
            }
            with self._database.transaction() as db:
                first = round_ if oldest is None else oldest
                db.execute("DELETE FROM bundles WHERE round < ? OR round = ?", (first, round_))
                if oldest is None:
                    db.execute("DELETE FROM uploads")
                db.executemany(
                    "INSERT INTO bundles VALUES (?, ?, ?, ?, ?)",
                    [
                        (round_, submodel, name, entry.size, entry.sha256)
                        for submodel, files in kept.items()
                        for name, entry in files.items()
                    ],
                )
        return kept

    def bundles(self, round_: int) -> dict[str, Bundle]:
        """The bundles of `round_` by submodel; empty if they were not kept.

        Also empty if one of their files is missing or damaged, so that they are made again.
        """
        bundles: dict[str, Bundle] = {}
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT submodel, name, size, sha256 FROM bundles WHERE round = ?", (round_,)
            ).fetchall()
        for submodel, name, size, sha256 in rows:
            bundles.setdefault(submodel, {})[name] = FileEntry(size=size, sha256=sha256)
        whole = all(
            self.blobs.is_whole(e.sha256) for files in bundles.values() for e in files.values()
        )
        return bundles if whole else {}

    def keep_flights(self, flights: Mapping[str, int]) -> None:
        """Store the round of each device that goes on training after the end of its round."""
        self.set_value(FLIGHTS, json.dumps(flights, sort_keys=True))

    def flights(self) -> dict[str, int]:
        """The rounds that the last `keep_flights` stored, by device."""
        return msgspec.json.decode(self.value(FLIGHTS) or "{}", type=dict[str, int])

    def keep_upload(self, device: str, received: IncomingFile) -> FileEntry:
        """Keep the received tensors of `device`. They replace the tensors that it sent before."""
        entry = received.finish()
        with self._database.exclusively():
            before = self.upload(device)
            self.blobs.adopt(received.path, entry)
            with self._database.transaction() as db:
                db.execute("INSERT OR REPLACE INTO uploads VALUES (?, ?)", (device, entry.sha256))
                self.registry.count_bytes(device, sent=entry.size)  # in the same transaction
        if before is not None:
            self._drop_files([before])
        return entry

    def upload(self, device: str) -> str | None:
        """SHA-256 of the tensors that `device` sent last in this round, or None."""
        with self._database.transaction() as db:
            row = db.execute("SELECT sha256 FROM uploads WHERE device = ?", (device,)).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def checking(self, device: str) -> Iterator[str | None]:
        """Yield the SHA-256 of the tensors that `device` sent last, or None.

        The file of these tensors stays during the block, even if the device sends other tensors.
        """
        with self._database.exclusively():
            sha256 = self.upload(device)
            self._held.append(sha256 or "")
        try:
            yield sha256
        finally:
            with self._database.exclusively():
                self._held.remove(sha256 or "")

    def add_update(self, round_: int, device: str, record: UpdateRecord) -> None:
        """Keep an update of `round_`."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO updates VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (round_, device, record.file.sha256, encode(record), *columns(record)),
            )
            db.execute("UPDATE selected SET samples = ? WHERE device = ?", (record.samples, device))

    def drop_damaged(self, round_: int) -> list[str]:
        """Remove the updates of `round_` with missing or damaged tensors; returns their devices."""
        damaged = [
            device for device, sha, _ in self.updates(round_) if not self.blobs.is_whole(sha)
        ]
        with self._database.transaction() as db:
            db.executemany(
                "DELETE FROM updates WHERE round = ? AND device = ?",
                [(round_, device) for device in damaged],
            )
        return damaged

    def updates(self, round_: int) -> list[tuple[str, str, bytes]]:
        """Updates of `round_` as (device, hash of the tensors, update.json), sorted by device."""
        with self._database.transaction() as db:
            return db.execute(
                "SELECT device, sha256, record FROM updates WHERE round = ? ORDER BY device",
                (round_,),
            ).fetchall()

    def add_result(
        self,
        result: RoundResult,
        model: bytes,
        received: FederatedEvaluation | None = None,
        reference: Reference | None = None,
        summed: Collection[str] = (),
    ) -> None:
        """Keep the global model after a round, with its quality.

        `received` is the devices' judgement of the model that they received in this round.
        `reference` is for the limits of the next round; None keeps the stored `Reference`. `summed`
        are the devices in secure sums, which have no records of updates.
        """
        with self._unnamed() as put:
            entry = put(model)
            with self._database.milestone() as db:
                before = db.execute(
                    "SELECT coalesce(target, round) FROM history LEFT JOIN rollbacks "
                    "ON after = round WHERE round = ?",
                    (result.round - 1,),
                ).fetchone()
                db.execute(
                    "INSERT OR REPLACE INTO history (round, accuracy, loss, updates, model, size, "
                    "left_out, started_from, held_out, asked, limited, staleness) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        result.round,
                        result.accuracy,
                        result.loss,
                        result.updates,
                        entry.sha256,
                        entry.size,
                        json.dumps(result.left_out),
                        before and before[0],
                        figures_text(result.held_out),
                        result.asked,
                        limited_text(result.limited),
                        json.dumps(result.staleness) if result.staleness else None,
                    ),
                )
                if reference is not None:
                    db.execute(
                        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                        (REFERENCE, encode(reference).decode()),
                    )
                if result.privacy is not None:
                    note_spent(db, result.round, result.privacy)
                if before is not None and received is not None:
                    judge(db, before[0], received)
                db.executemany(
                    "UPDATE devices SET past_updates = past_updates + 1 WHERE id = ?",
                    [(device,) for device in summed],
                )
                open_round.forget(db)
                retention.drop_models(db, self.keep)
                retention.shorten_records(db, result.round)

    def judge_last(self, figure: FederatedEvaluation | None) -> None:
        """Keep how the devices judge the model of the last round, and stop asking them."""
        with self._database.milestone() as db:
            if figure is not None:
                (last,) = db.execute("SELECT max(round) FROM history").fetchone()
                judge(db, last, figure)
                retention.drop_models(db, self.keep)
            final_evaluation.forget(db)

    def reference(self) -> Reference:
        """The medians of earlier updates, for the limits of the next round."""
        text = self.value(REFERENCE)
        return Reference() if text is None else msgspec.json.decode(text, type=Reference)

    def model(self) -> bytes | None:
        """The latest global model, or None. Raises InputError if its file is damaged."""
        with self._database.transaction() as db:
            current = Marker.of(db).model
        if current is None:
            return None
        path = self.blobs.path(current)
        if not self.blobs.is_whole(path.name):
            raise InputError(
                "{path}, the global model, was damaged or removed while the coordinator ran. Put "
                "a copy back, and restart `edgetailor serve`.",
                code="state.damaged-model",
                path=str(path),
            )
        return path.read_bytes()

    def earlier_model(self) -> int | None:
        """The last earlier round whose model is intact and led to the current model, or None."""
        with self._database.transaction() as db:
            (round_,) = db.execute(schema.CURRENT_ROUND).fetchone()
            rows = db.execute("SELECT round, started_from, kept, model FROM history").fetchall()
        origins: dict[int, int | None] = {number: origin for number, origin, _, _ in rows}
        intact = {number for number, _, kept, model in rows if kept and self.blobs.is_whole(model)}
        earlier = origins[round_]
        while earlier is not None and earlier not in intact:
            earlier = origins[earlier]
        return earlier

    def change_settings(
        self,
        round_: int,
        changes: Sequence[Change],
        checked: str,
        log: Iterable[Action],
        bundles: bool = False,
        loss: str | None = None,
    ) -> None:
        """Record that `changes` are in effect from `round_` on, with their audit entries.

        With `bundles`, forget the bundles of this round, because they have the earlier settings. If
        the model changes, also forget the round's updates and the reference of the limits. In this
        case `loss` is the description of the user's own loss.
        """
        with self._database.milestone() as db:
            self.settings.take_effect(db, round_, changes, checked)
            for action in log:
                self.operator_log.write(db, action)
            if bundles:
                db.execute("DELETE FROM bundles WHERE round = ?", (round_,))
            if changes_model(changes):
                db.execute("DELETE FROM meta WHERE key IN (?, ?)", (REFERENCE, LOSS))
                if loss is not None:
                    db.execute("INSERT INTO meta VALUES (?, ?)", (LOSS, loss))
                _forget_updates(db, round_)

    def rollback(
        self, target: int, suspect: Suspect | None = None, action: Action | None = None
    ) -> int:
        """Let the next round start from the model of `target`, and return the next round's number.

        Updates of the open round are lost. The device of `suspect` is left out from now on. If an
        operator decided so, `action` is the entry for the audit log.
        """
        with self._database.milestone() as db:
            if action is not None:
                self.operator_log.write(db, action)
            if suspect is not None:
                self.suspicions.leave_out(suspect, db)
            (last,) = db.execute("SELECT max(round) FROM history").fetchone()
            db.execute("INSERT OR REPLACE INTO rollbacks VALUES (?, ?)", (last, target))
            _forget_updates(db, last + 1)
        self.remove_unnamed()
        return int(last) + 1

    def remove_unnamed(self) -> None:
        """Remove the files that the database does not name any more.

        With thousands of updates this takes seconds: call it when nothing waits for the thread.
        """
        self._drop_files(self.blobs.names())

    @contextmanager
    def _unnamed(self) -> Iterator[Callable[[bytes], FileEntry]]:
        """Yield a function like `Blobs.put`. Its files stay during the block, even without a row.

        The database is not locked while the files are hashed and written.
        """
        put: list[str] = []

        def hold(data: bytes) -> FileEntry:
            entry = fingerprint(data)
            with self._database.exclusively():
                self._held.append(entry.sha256)
                put.append(entry.sha256)
            return self.blobs.put(data)

        try:
            yield hold
        finally:
            with self._database.exclusively():
                for sha256 in put:
                    self._held.remove(sha256)

    def _drop_files(self, names: Iterable[str]) -> None:
        """Remove the files in `names` that the database does not name.

        The database is not locked between two files, so other threads never wait long.
        """
        for sha256 in names:
            with self._database.exclusively():
                if sha256 not in self._held and not self._is_named(sha256):
                    self.blobs.path(sha256).unlink(missing_ok=True)

    def _is_named(self, sha256: str) -> bool:
        query = (
            f"SELECT EXISTS (SELECT 1 FROM ({REFERENCED} UNION ALL {KEPT_UPDATES}) "
            "WHERE sha256 = ?)"
        )
        with self._database.transaction() as db:
            return bool(db.execute(query, (sha256,)).fetchone()[0])


def _forget_updates(db: sqlite3.Connection, round_: int) -> None:
    """Forget everything that was received or offered in `round_`, in the transaction of `db`."""
    db.execute("DELETE FROM updates WHERE round >= ?", (round_,))
    for table in ("uploads", "bundles"):
        db.execute(f"DELETE FROM {table}")
    open_round.forget(db)
