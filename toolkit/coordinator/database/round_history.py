"""The results of the rounds that are over, and the models after these rounds."""

import json
import sqlite3
from collections.abc import Mapping

import msgspec

from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    HeldOutFigures,
    Limited,
    RoundResult,
    SpentPrivacy,
)
from toolkit.coordinator.database import schema
from toolkit.coordinator.database.database import Database
from toolkit.coordinator.database.settings_log import SettingsLog

SPENT = "privacy"
"""The key in the table `meta` of the privacy budget that rounds have spent."""


class RoundHistory:
    """Reads the table `history`, with the changes of settings in `settings`."""

    def __init__(self, database: Database, settings: SettingsLog) -> None:
        self._database, self._settings = database, settings

    def results(self) -> list[RoundResult]:
        """The results so far, from round 0."""
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT round, accuracy, loss, updates, left_out, devices, held_out, asked, "
                "limited, staleness FROM history ORDER BY round"
            ).fetchall()
            spent = spent_privacy(db)
        changes = self._settings.by_round()
        return [
            RoundResult(
                round=r,
                accuracy=a,
                loss=x,
                updates=n,
                left_out=json.loads(out),
                devices=judgement(devices),
                held_out=held_out_figures(held_out),
                asked=asked,
                changes=changes.get(r, []),
                limited=limited_updates(limited),
                staleness=json.loads(staleness or "[]"),
                privacy=spent.get(r),
            )
            for r, a, x, n, out, devices, held_out, asked, limited, staleness in rows
        ]

    def last_round(self) -> int | None:
        """The last round that is over; None before round 0."""
        with self._database.transaction() as db:
            row = db.execute("SELECT max(round) FROM history").fetchone()
        return None if row[0] is None else int(row[0])

    def current_round(self) -> int | None:
        """The round whose model the next round starts from; None before round 0."""
        with self._database.transaction() as db:
            row = db.execute(schema.CURRENT_ROUND).fetchone()
        return None if row is None else int(row[0])

    def models(self) -> dict[int, str]:
        """The SHA-256 of the global model after each round."""
        with self._database.transaction() as db:
            return dict(db.execute("SELECT round, model FROM history ORDER BY round").fetchall())

    def kept_rounds(self) -> set[int]:
        """The rounds whose models are kept."""
        with self._database.transaction() as db:
            return {round_ for (round_,) in db.execute("SELECT round FROM history WHERE kept")}

    def line(self, most: int) -> list[int]:
        """The last rounds that led to the current model: at most `most`, the newest first."""
        with self._database.transaction() as db:
            row = db.execute(schema.CURRENT_ROUND).fetchone()
            origins = dict(db.execute("SELECT round, started_from FROM history").fetchall())
        rounds: list[int] = []
        round_ = None if row is None else int(row[0])
        while round_ is not None and len(rounds) < most:
            rounds.append(round_)
            round_ = origins[round_]
        return rounds

    def origin(self) -> int | None:
        """The round that the current model was trained from; None if it was not trained."""
        with self._database.transaction() as db:
            (current,) = db.execute(schema.CURRENT_ROUND).fetchone()
            row = db.execute("SELECT started_from FROM history WHERE round = ?", (current,))
            (origin,) = row.fetchone()
        return None if origin is None else int(origin)


def note_spent(db: sqlite3.Connection, round_: int, spent: SpentPrivacy) -> None:
    """Store the privacy budget spent by the rounds up to `round_`, in the transaction of `db`."""
    text = msgspec.json.encode({**spent_privacy(db), round_: spent}).decode()
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (SPENT, text))


def spent_privacy(db: sqlite3.Connection) -> dict[int, SpentPrivacy]:
    """The budget spent up to each round; empty without differential privacy."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (SPENT,)).fetchone()
    return {} if row is None else msgspec.json.decode(row[0], type=dict[int, SpentPrivacy])


def judge(db: sqlite3.Connection, round_: int, figure: FederatedEvaluation) -> None:
    """Store how devices judge the model of `round_`, in the transaction of `db`."""
    text = msgspec.json.encode(figure).decode()
    db.execute("UPDATE history SET devices = ? WHERE round = ?", (text, round_))


def judgement(text: str | None) -> FederatedEvaluation | None:
    """Decode the column `devices` of the history."""
    return None if text is None else msgspec.json.decode(text, type=FederatedEvaluation)


def limited_updates(text: str | None) -> dict[str, Limited]:
    """Decode the column `limited` of the history."""
    return {} if text is None else msgspec.json.decode(text, type=dict[str, Limited])


def limited_text(limited: Mapping[str, Limited]) -> str | None:
    """Encode the column `limited` of the history."""
    return msgspec.json.encode(limited).decode() if limited else None


def figures_text(figures: HeldOutFigures | None) -> str | None:
    """Encode the column `held_out` of the history."""
    return None if figures is None else msgspec.json.encode(figures).decode()


def held_out_figures(text: str | None) -> HeldOutFigures | None:
    """Decode the column `held_out` of the history."""
    return None if text is None else msgspec.json.decode(text, type=HeldOutFigures)
