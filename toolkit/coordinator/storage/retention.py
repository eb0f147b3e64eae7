"""Decides which models and records of updates are kept. Each function is part of a transaction."""

import sqlite3
from typing import Literal

from toolkit.coordinator.database.settings_log import MODEL
from toolkit.coordinator.storage.blobs import Blobs

Keep = int | Literal["all", "best"]
"""How many of the last rounds keep their models. The best and the current model are always kept."""
FULL_RECORDS = 3
"""The updates of this many rounds keep their whole update.json, with the device's profile.

For older updates only a summary row is kept: samples, steps and losses, about 100 bytes.
"""
KEEP_UPDATES = "keep_updates"
"""The key in the table `meta` for the number of rounds whose updates keep their tensors."""
BY_DEVICES = """
SELECT loss IS NULL FROM history WHERE loss IS NOT NULL OR devices IS NOT NULL
ORDER BY round DESC LIMIT 1"""
"""The query gives 1 if rounds are compared by the figures on the devices, else 0. It gives no row
if no round is judged."""
MODEL_SINCE = f"""
SELECT coalesce(max(settings_changes.round), 0) FROM settings_changes
WHERE key = '{MODEL}' AND round <= (SELECT max(history.round) FROM history)"""
"""The query gives the first round of the present model."""
BEST = f"""
SELECT round FROM (
    SELECT round,
    CASE WHEN ({BY_DEVICES}) THEN json_extract(devices, '$.accuracy') ELSE accuracy END AS accuracy,
    CASE WHEN ({BY_DEVICES}) THEN json_extract(devices, '$.loss') ELSE loss END AS loss
    FROM history)
WHERE loss IS NOT NULL AND round >= ({MODEL_SINCE})
ORDER BY accuracy IS NULL, accuracy DESC, loss, round DESC LIMIT 1"""
"""The query gives the best round by the figure of `compared_rounds.compared`. It gives no row if no
round is judged."""


def drop_models(db: sqlite3.Connection, keep: Keep) -> None:
    """Mark all models that `keep` excludes as not kept. The next cleanup removes their files.

    The best round has the highest accuracy, or the lowest loss if there is no accuracy. Among equal
    rounds, the last is the best.
    """
    if keep == "all":
        return
    db.execute(
        "UPDATE history SET kept = 0 WHERE kept AND round NOT IN "
        f"(SELECT round FROM history ORDER BY round DESC LIMIT ?) AND round IS NOT ({BEST})",
        (1 if keep == "best" else keep,),
    )


def drop_lost(
    db: sqlite3.Connection, current: str | None, blobs: Blobs, read_all: bool
) -> list[int]:
    """Mark missing and damaged models of earlier rounds as not kept. Returns their rounds.

    Without the mark, every backup would fail. The models of the newest and the best round are
    compared with their hashes. All other models are compared only with their sizes. If a model is
    damaged, or with `read_all`, all models are compared with their hashes. The model with the hash
    `current` is checked in `folder_check.py` instead.
    """
    kept = db.execute(
        f"SELECT model, size, round IN ((SELECT max(round) FROM history), ({BEST})) FROM history "
        "WHERE kept AND model IS NOT ?",
        (current,),
    ).fetchall()
    damaged = {
        model
        for model, size, important in kept
        if not blobs.has_size(model, size) or (important and not blobs.is_whole(model))
    }
    if damaged or read_all:
        damaged |= {model for model, _, _ in kept if not blobs.is_whole(model)}
    rounds: list[int] = []
    for model in damaged:
        rows = db.execute("SELECT round FROM history WHERE kept AND model = ?", (model,))
        rounds += [round_ for (round_,) in rows]
        db.execute("UPDATE history SET kept = 0 WHERE model = ?", (model,))
    return sorted(rounds)


def shorten_records(db: sqlite3.Connection, round_: int) -> None:
    """Summarise the records of updates that are FULL_RECORDS or more rounds older than `round_`."""
    old = (round_ - FULL_RECORDS,)
    db.execute(
        "INSERT INTO past_updates SELECT round, device, samples, steps, loss_first, loss_last "
        "FROM updates WHERE round <= ?",
        old,
    )
    db.execute(
        "UPDATE devices SET past_updates = past_updates + more FROM "
        "(SELECT device, count(*) AS more FROM updates WHERE round <= ? GROUP BY device) "
        "WHERE id = device",
        old,
    )
    db.execute("DELETE FROM updates WHERE round <= ?", old)
