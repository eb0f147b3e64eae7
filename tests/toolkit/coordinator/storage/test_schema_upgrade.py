"""A state folder that an earlier version wrote goes on: `state_5.sql` is a dump of one.

In it the first round of three devices is over, and all have sent their updates of the second. That
version accepted steps below zero and repeated keys.
"""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from deployed_digits import JUDGED
from toolkit.coordinator.closing.round_worker import RoundWorker
from toolkit.coordinator.coordinator import restore
from toolkit.coordinator.database import content_digest, schema, schema_upgrade
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.database_check import check_database
from toolkit.coordinator.storage.saved_rounds import saved_rounds
from vector_fleet import TWO_KINDS, VectorModel, configured

DUMP = Path(__file__).with_name("state_5.sql")


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    earlier = configured(tmp_path, TWO_KINDS.format(2))
    (earlier.state / "files").mkdir(parents=True)
    connection = sqlite3.connect(earlier.state / "state.sqlite3")
    connection.executescript(DUMP.read_text())
    for round_, name in connection.execute("SELECT round, model FROM history").fetchall():
        model = VectorModel()
        model.weights += np.float32(round_ / 2)
        (earlier.state / "files" / name).write_bytes(model.save())
    connection.close()
    return earlier


def rows(folder: Path) -> dict[str, list[Any]]:
    connection = sqlite3.connect(folder / "state.sqlite3")
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    tables = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in names}
    tables["version"] = connection.execute("PRAGMA user_version").fetchall()
    connection.close()
    return tables


def test_what_is_counted_gets_columns_and_nothing_else_changes(config: CoordinatorConfig) -> None:
    before = rows(config.state)
    Store(config.state).close()
    after = rows(config.state)
    assert (before.pop("version"), after.pop("version")) == ([(5,)], [(schema.SCHEMA_VERSION,)])
    counted = {(round_, device): rest for round_, device, _, _, *rest in after.pop("updates")}
    assert counted == {
        **{(1, device): [10, 1, 2.0, 1.0] for device in ("desktop-1", "desktop-2", "board-1")},
        (2, "desktop-1"): [10, 1, 2.0, 1.0],
        (2, "board-1"): [9, 1, 2.0, 1.0],  # of the repeated keys the one that was used
        # desktop-2 said that it made -5 steps, and is asked again.
    }
    assert len(before.pop("updates")) == 6
    for changing in ("content_digest", "meta"):  # `meta`: the number of milestones
        del before[changing], after[changing]
    # No device has judged, there are no figures of classes, no round selected its devices, and no
    # update was limited or counted by its staleness.
    before["history"] = [(*row, None, None, None, None, None) for row in before["history"]]
    added = [table for tables in schema.NEW_TABLES.values() for table in tables]
    assert {"audit", "operators", "selected", "settings_changes"} < set(added)
    for new in added:
        assert after.pop(new) == []
    assert after == before
    marker = check_database(config.state / "state.sqlite3")  # the digest of all rows, among others
    assert marker is not None
    assert marker.round == 1


@pytest.mark.parametrize("version", [6, 7, 8, 9, 10, 11, 12])
def test_the_versions_before_get_the_tables_of_this_one(tmp_path: Path, version: int) -> None:
    connection = sqlite3.connect(tmp_path / "state.sqlite3")
    content_digest.install(connection)
    schema.create(connection, version)
    connection.execute(
        "INSERT INTO history (round, accuracy, loss, updates, model, size, left_out) "
        "VALUES (0, 0.5, 1.0, 0, 'm', 1, '{}')"
    )
    if version >= 7:
        connection.execute("UPDATE history SET devices = ?", (msgspec.json.encode(JUDGED),))
    connection.commit()
    judged = JUDGED if version >= 7 else None
    for _ in range(2):
        assert [(s.devices, s.held_out, s.asked, s.limited) for s in saved_rounds(tmp_path)] == [
            (judged, None, None, {})
        ]
        schema_upgrade.upgrade(connection)
        connection.commit()
    current = schema.expected_statements(schema.SCHEMA_VERSION)
    assert schema.statements(connection) == current
    assert content_digest.matches(connection)
    connection.close()


def test_the_open_round_goes_on(config: CoordinatorConfig) -> None:
    store = Store(config.state)
    coordinator = restore(config, store, lambda: 1.0)
    with store._database.transaction() as db:
        (closes,) = db.execute("SELECT closes_at FROM openings").fetchone()
    coordinator.wall_clock = lambda: closes - 60  # soon after the dump was made
    samples = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    worker = RoundWorker(coordinator, VectorModel(), samples, lambda: None)
    worker.resume()
    worker.turn()
    assert (coordinator.rounds.phase, coordinator.rounds.round) == ("training", 2)
    asked = [d.id for d in store.registry.members() if coordinator.rounds.waits_for(d.id)]
    # The tensors of the others are not in the dump: their devices send them again.
    assert "desktop-2" in asked
    assert store.records.rounds_trained()["desktop-1"] >= 1
    store.close()


def test_an_interrupted_upgrade_leaves_the_earlier_version(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(config.state)
    with monkeypatch.context() as patch:
        patch.setattr(content_digest, "renew", lambda connection: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Store(config.state)
    assert rows(config.state) == before
    assert [saved.round for saved in saved_rounds(config.state)] == [
        0,
        1,
    ]  # it changes nothing either
    assert rows(config.state) == before
    Store(config.state).close()


def test_an_altered_earlier_database_is_refused(config: CoordinatorConfig) -> None:
    connection = sqlite3.connect(config.state / "state.sqlite3")
    content_digest.install(connection)
    connection.execute("DROP TRIGGER history_insert")
    connection.commit()
    connection.close()
    with pytest.raises(Exception, match="its tables are not those of this program"):
        Store(config.state)
