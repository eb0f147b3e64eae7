"""The tables of the coordinator's database."""

import sqlite3

from toolkit.coordinator.database import content_digest

SCHEMA_VERSION = 13
"""The version of the tables, which the file keeps as `PRAGMA user_version`. Raise it with every
change of TABLES, and add the change of existing databases to `schema_upgrade.py`."""
UPDATES = """CREATE TABLE updates (
    round INTEGER, device TEXT, sha256 TEXT NOT NULL, record BLOB NOT NULL,
    samples INTEGER NOT NULL, steps INTEGER NOT NULL,  -- these four are in the record, too
    loss_first REAL NOT NULL, loss_last REAL NOT NULL,
    PRIMARY KEY (round, device))"""
UPDATES_5 = """CREATE TABLE updates (
    round INTEGER, device TEXT, sha256 TEXT NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (round, device))"""
"""The table `updates` in version 5."""
HISTORY_10 = """CREATE TABLE history (
    round INTEGER PRIMARY KEY, accuracy REAL,
    loss REAL,  -- on held-out samples; NULL without them
    updates INTEGER NOT NULL, model TEXT NOT NULL,
    size INTEGER NOT NULL,  -- bytes of the model
    left_out TEXT NOT NULL,  -- JSON: why an update was not used, by device
    started_from INTEGER,  -- the round whose model was trained
    kept INTEGER NOT NULL DEFAULT 1,  -- whether the file of the model is there
    -- JSON: how devices judge the model
    devices TEXT,
    -- JSON: further figures on held-out samples, such as those of each class
    held_out TEXT)"""
"""The table `history` in versions 8 to 10."""
HISTORY_11 = f"""{HISTORY_10.removesuffix(")")},
    -- how many devices were selected, NULL if the round asked all
    asked INTEGER)"""
"""The table `history` in version 11."""
HISTORY_12 = f"""{HISTORY_11.removesuffix(")")},
    -- JSON: what was limited of an update, by device; NULL if nothing
    limited TEXT)"""
"""The table `history` in version 12."""
HISTORY = f"""{HISTORY_12.removesuffix(")")},
    -- JSON: how many updates had the staleness 0, 1, ...; NULL unless rounds are asynchronous
    staleness TEXT)"""
HISTORY_7 = """CREATE TABLE history (
    round INTEGER PRIMARY KEY, accuracy REAL,
    loss REAL,  -- on held-out samples; NULL without them
    updates INTEGER NOT NULL, model TEXT NOT NULL,
    size INTEGER NOT NULL,  -- bytes of the model
    left_out TEXT NOT NULL,  -- JSON: why an update was not used, by device
    started_from INTEGER,  -- the round whose model was trained
    kept INTEGER NOT NULL DEFAULT 1,  -- whether the file of the model is there
    -- JSON: how devices judge the model
    devices TEXT);"""
"""The table `history` in version 7."""
HISTORY_6 = """CREATE TABLE history (
    round INTEGER PRIMARY KEY, accuracy REAL, loss REAL NOT NULL,
    updates INTEGER NOT NULL, model TEXT NOT NULL,
    size INTEGER NOT NULL,  -- bytes of the model
    left_out TEXT NOT NULL,  -- JSON: why an update was not used, by device
    started_from INTEGER,  -- the round whose model was trained
    kept INTEGER NOT NULL DEFAULT 1);"""
"""The table `history` up to version 6."""
_OPERATION = (
    """CREATE TABLE decisions (
    device TEXT PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    public_key TEXT NOT NULL,
    member INTEGER NOT NULL  -- whether it was a member before
    )""",
    """CREATE TABLE audit (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,  -- seconds since 1970
    who TEXT NOT NULL, action TEXT NOT NULL,
    target TEXT NOT NULL,  -- the id of a device, or a round
    reason TEXT NOT NULL)""",
    """CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END""",
    """CREATE TRIGGER audit_is_not_cut BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END""",
)
_TOKENS = (
    """CREATE TABLE operators (
    name TEXT PRIMARY KEY, hash TEXT NOT NULL, role TEXT NOT NULL,
    made REAL NOT NULL,  -- seconds since 1970
    revoked REAL)""",
    """CREATE TABLE join_tokens (
    number INTEGER PRIMARY KEY, hash TEXT NOT NULL, kind TEXT NOT NULL,
    count INTEGER,  -- NULL: any number of devices
    joined INTEGER NOT NULL,  -- how many have joined with it
    expires REAL NOT NULL, revoked REAL)""",
)
_FLEETS = (
    """CREATE TABLE selected (
    device TEXT PRIMARY KEY,
    round INTEGER NOT NULL,  -- the last round that asked it
    draw INTEGER NOT NULL,  -- counts the openings of that round, from 1
    samples INTEGER  -- of its last update
    )""",
    """CREATE TABLE settings_changes (
    round INTEGER, key TEXT,  -- from this round on, `key` of the federation's file is `after`
    before TEXT NOT NULL, after TEXT NOT NULL,  -- JSON
    PRIMARY KEY (round, key))""",
)
ADDED = {9: _OPERATION, 10: _TOKENS, 11: _FLEETS}
"""The statements that each version has added."""
NEW_TABLES = {
    9: ("decisions", "audit"),
    10: ("operators", "join_tokens"),
    11: ("selected", "settings_changes"),
}
"""The tables that each version has added."""
TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE tokens (
    kind TEXT PRIMARY KEY, hash TEXT NOT NULL,
    count INTEGER,  -- NULL: any number of devices
    made REAL NOT NULL,  -- seconds since 1970
    days REAL NOT NULL);
CREATE TABLE devices (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, secret TEXT NOT NULL,
    public_key TEXT NOT NULL,
    machine TEXT NOT NULL,  -- JSON
    submodel TEXT,  -- NULL if the kind of device names it
    has_left INTEGER NOT NULL DEFAULT 0,
    forgotten INTEGER NOT NULL DEFAULT 0,  -- it has left because it was not seen
    fallback_from INTEGER,  -- the first round with the kind's fallback
    trouble TEXT,
    past_updates INTEGER NOT NULL DEFAULT 0,  -- how many it has in the table of that name
    bytes_down INTEGER NOT NULL DEFAULT 0, bytes_up INTEGER NOT NULL DEFAULT 0);
CREATE TABLE bundles (
    round INTEGER, submodel TEXT, name TEXT, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (round, submodel, name));
CREATE TABLE uploads (device TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
{UPDATES};
CREATE TABLE past_updates (
    round INTEGER, device TEXT, samples INTEGER, steps INTEGER, loss_first REAL, loss_last REAL,
    PRIMARY KEY (round, device)) WITHOUT ROWID;
CREATE TABLE openings (
    round INTEGER PRIMARY KEY,
    closes_at REAL NOT NULL);  -- seconds since 1970
CREATE TABLE failures (round INTEGER, device TEXT, PRIMARY KEY (round, device));
{HISTORY};
CREATE TABLE rollbacks (
    after INTEGER PRIMARY KEY,
    target INTEGER NOT NULL);  -- the round after `after` starts from the model of `target`
CREATE INDEX uploads_by_file ON uploads (sha256);
CREATE INDEX updates_by_file ON updates (sha256);
CREATE INDEX history_by_file ON history (model);
"""
CURRENT_MODEL = """
SELECT last.round, coalesce(target.model, last.model) FROM history AS last
LEFT JOIN rollbacks ON rollbacks.after = last.round
LEFT JOIN history AS target ON target.round = rollbacks.target
ORDER BY last.round DESC LIMIT 1"""
"""The last round that is over, and the model that the next round starts from."""
CURRENT_ROUND = """
SELECT coalesce(target, round) FROM history LEFT JOIN rollbacks ON after = round
ORDER BY round DESC LIMIT 1"""
"""The round whose model the next round starts from."""


def create(connection: sqlite3.Connection, version: int = SCHEMA_VERSION) -> None:
    """Make all tables in one transaction. A process that is killed leaves all tables or none."""
    added = [statement for since, all_ in ADDED.items() if since <= version for statement in all_]
    wanted = TABLES + "".join(f"{statement};\n" for statement in added)
    if version < SCHEMA_VERSION:
        earlier = {6: HISTORY_6, 7: HISTORY_7, 11: f"{HISTORY_11};", 12: f"{HISTORY_12};"}
        wanted = wanted.replace(f"{HISTORY};", earlier.get(max(version, 6), f"{HISTORY_10};"))
    if version < 6:
        wanted = wanted.replace(UPDATES, UPDATES_5)
    tables = sqlite3.connect(":memory:")
    tables.executescript(wanted)
    triggers = content_digest.schema(tables)
    tables.close()
    connection.executescript(
        f"BEGIN; {wanted} {triggers} PRAGMA user_version={version}; "
        "INSERT INTO meta VALUES ('id', lower(hex(randomblob(16)))), ('generation', '0'); COMMIT;"
    )


def statements(connection: sqlite3.Connection) -> list[tuple[str, str, str, str]]:
    """The tables and triggers of `connection`: type, name, table and the SQL that made them."""
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    ).fetchall()


def expected_statements(version: int) -> list[tuple[str, str, str, str]]:
    """The result of `statements` for a new database of `version`."""
    connection = sqlite3.connect(":memory:")
    content_digest.install(connection)
    create(connection, version)
    expected = statements(connection)
    connection.close()
    return expected
