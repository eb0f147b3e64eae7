"""A digest of all rows of the database. Triggers update it in the transaction of each change.

SQLite's database file has no checksums, so SQLite does not notice a flipped bit in a value, or a
transaction that was written only in part. The digest is the sum of one CRC-32 for each row, so the
cost of a change does not depend on the number of rows. The digest is compared with the rows when
the database is opened.
"""

import sqlite3
import zlib

FUNCTION = "row_digest"
TABLE = "content_digest"


def install(connection: sqlite3.Connection) -> None:
    """Define the SQL function that the triggers call.

    Call it for every connection that writes or checks.
    """
    connection.create_function(FUNCTION, -1, _row_digest, deterministic=True)
    # Without this setting, a row that INSERT OR REPLACE replaces would not be subtracted.
    connection.execute("PRAGMA recursive_triggers=ON")


def schema(connection: sqlite3.Connection) -> str:
    """The SQL of the digest and of its triggers, for the tables that `connection` has."""
    statements = [
        f"CREATE TABLE {TABLE} (total INTEGER NOT NULL)",
        f"INSERT INTO {TABLE} VALUES (0)",
    ]
    for table in _tables(connection):
        statements += triggers(connection, table)
    return "".join(f"{statement};\n" for statement in statements)


def triggers(connection: sqlite3.Connection, table: str) -> list[str]:
    """The SQL of the triggers of one table."""
    added, removed = _call(connection, table, "new."), _call(connection, table, "old.")
    changes = {
        "INSERT": f"+ {added}",
        "DELETE": f"- {removed}",
        "UPDATE": f"+ {added} - {removed}",
    }
    return [
        f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} "
        f"BEGIN UPDATE {TABLE} SET total = total {change}; END"
        for event, change in changes.items()
    ]


def matches(connection: sqlite3.Connection) -> bool:
    """Whether the stored digest matches the rows."""
    kept = connection.execute(f"SELECT total FROM {TABLE}").fetchall()
    return kept == [(_total(connection),)]


def renew(connection: sqlite3.Connection) -> None:
    """Compute the digest again from the rows, after a change that no trigger has seen."""
    connection.execute(f"UPDATE {TABLE} SET total = ?", (_total(connection),))


def _total(connection: sqlite3.Connection) -> int:
    return sum(_digest_of(connection, table) for table in _tables(connection))


def _digest_of(connection: sqlite3.Connection, table: str) -> int:
    query = f"SELECT coalesce(sum({_call(connection, table)}), 0) FROM {table}"
    return int(connection.execute(query).fetchone()[0])


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return sorted(name for (name,) in connection.execute(query) if name != TABLE)


def _call(connection: sqlite3.Connection, table: str, row: str = "") -> str:
    columns = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
    return f"{FUNCTION}('{table}', {', '.join(row + name for (name,) in columns)})"


def _row_digest(*values: str | bytes | float | None) -> int:
    digest = 0
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), digest))
    return digest
