"""Which models and records of updates are kept. Each function takes part in a transaction."""

import sqlite3
from collections.abc import Callable
from typing import Literal

Keep = int | Literal["all", "best"]
"""The models of how many of the last rounds are kept. The best one always is, and the current."""
FULL_RECORDS = 3
"""Rounds whose updates keep their whole update.json, with the device's measured profile.

Of older updates one row stays: samples, steps and losses, about 100 bytes.
"""
BEST = (
    "SELECT round FROM history ORDER BY accuracy IS NULL, accuracy DESC, loss, round DESC LIMIT 1"
)


def drop_models(db: sqlite3.Connection, keep: Keep) -> None:
    """Mark the models that `keep` does not include. Their files are removed with the next cleanup.

    The best round has the highest accuracy, or the lowest loss if there is no accuracy; of equal
    ones it is the last.
    """
    if keep == "all":
        return
    db.execute(
        "UPDATE history SET kept = 0 WHERE kept AND round NOT IN "
        f"(SELECT round FROM history ORDER BY round DESC LIMIT ?) AND round != ({BEST})",
        (1 if keep == "best" else keep,),
    )


def drop_lost(
    db: sqlite3.Connection, current: str | None, is_whole: Callable[[str], bool]
) -> list[int]:
    """Mark the models of earlier rounds that are missing or damaged; returns their rounds.

    Otherwise no backup could be made any more. The model `current` is left to `folder_check.py`.
    """
    kept = db.execute("SELECT round, model FROM history WHERE kept").fetchall()
    lost = [round_ for round_, model in kept if model != current and not is_whole(model)]
    db.executemany("UPDATE history SET kept = 0 WHERE round = ?", [(round_,) for round_ in lost])
    return lost


def shorten_records(db: sqlite3.Connection, round_: int) -> None:
    """Replace the records of updates that are FULL_RECORDS rounds older than `round_`."""
    old = (round_ - FULL_RECORDS,)
    db.execute(
        "INSERT INTO past_updates SELECT round, device, "
        + ", ".join(
            f"json_extract(CAST(record AS TEXT), '$.{field}')"
            for field in ("samples", "steps", "loss_first", "loss_last")
        )
        + " FROM updates WHERE round <= ?",
        old,
    )
    db.execute(
        "UPDATE devices SET past_updates = past_updates + more FROM "
        "(SELECT device, count(*) AS more FROM updates WHERE round <= ? GROUP BY device) "
        "WHERE id = device",
        old,
    )
    db.execute("DELETE FROM updates WHERE round <= ?", old)
