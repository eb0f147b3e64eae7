"""Reads the rounds of a state folder, also while `serve` runs. Also goes back to a round."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place, write_file
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    HeldOutFigures,
    Limited,
    SpentPrivacy,
)
from profiles.errors import InputError
from toolkit.coordinator.database import schema
from toolkit.coordinator.database.database import BUSY_S
from toolkit.coordinator.database.round_history import (
    held_out_figures,
    judgement,
    limited_updates,
    spent_privacy,
)
from toolkit.coordinator.database.settings_log import changes_by_round
from toolkit.coordinator.storage import retention
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.coordinator.storage.database_check import check_version
from toolkit.coordinator.storage.folder_check import DATABASE
from toolkit.coordinator.storage.new_folder import check_apart
from toolkit.coordinator.storage.published_files import publish
from toolkit.coordinator.storage.recoverable import FILES, has_hash


@dataclass(frozen=True)
class SavedRound:
    """A round that is over.

    Attributes:
        round: Its number; 0 is the model before training.
        accuracy: Accuracy on held-out data; None for a regression.
        loss: Loss on held-out data; None without such data.
        updates: How many updates were aggregated.
        model: SHA-256 of the global model after the round.
        kept: Whether this model is kept. `keep` in the federation's file decides this.
        lost: Whether the model should be kept, but its file is missing.
        started_from: The round whose model was trained; None for round 0.
        best: Whether this is the best round so far.
        current: Whether the next round starts from its model.
        devices: How the devices that received this model judged it; None if they did not judge it.
        held_out: Further figures on held-out data, such as figures of each class, or None.
        changes: The settings that changed before the round.
        left_out: Why an update was not used, by device.
        limited: What the limits changed in an update, by device.
        privacy: The privacy budget that the rounds up to this one have spent, or None.
        staleness: In asynchronous rounds, how many updates had the staleness 0, 1, 2 and so on.
    """

    round: int
    accuracy: float | None
    loss: float | None
    updates: int
    model: str
    kept: bool
    lost: bool
    started_from: int | None
    best: bool
    current: bool
    devices: FederatedEvaluation | None
    held_out: HeldOutFigures | None
    asked: int | None
    changes: list[str]
    left_out: dict[str, str]
    limited: dict[str, Limited]
    staleness: list[int]
    privacy: SpentPrivacy | None


def saved_rounds(folder: Path) -> list[SavedRound]:
    """The rounds of the state folder `folder`. Raises InputError if it is not a state folder."""
    with reading(folder) as db:
        best = db.execute(retention.BEST).fetchone()
        current = db.execute(schema.CURRENT_ROUND).fetchone()
        rows = db.execute(
            "SELECT round, accuracy, loss, updates, model, kept, started_from, "
            "devices, held_out, asked, left_out, limited, staleness FROM history ORDER BY round"
        ).fetchall()
        spent = spent_privacy(db)
        changes = changes_by_round(db)
    return [
        SavedRound(
            round=round_,
            accuracy=accuracy,
            loss=loss,
            updates=updates,
            model=model,
            kept=bool(kept),
            lost=bool(kept) and not (folder / FILES / model).is_file(),
            started_from=start,
            best=best == (round_,),
            current=current == (round_,),
            devices=judgement(judged),
            held_out=held_out_figures(figures),
            asked=asked,
            changes=changes.get(round_, []),
            left_out=json.loads(out),
            limited=limited_updates(limited),
            staleness=json.loads(staleness or "[]"),
            privacy=spent.get(round_),
        )
        for (
            round_, accuracy, loss, updates, model, kept, start,
            judged, figures, asked, out, limited, staleness,
        ) in rows
    ]  # fmt: skip


def best_round(folder: Path) -> int:
    """The number of the best round.

    Raises InputError if `folder` is not a state folder, or if no round is judged.
    """
    best = next((saved.round for saved in saved_rounds(folder) if saved.best), None)
    if best is None:
        raise InputError(
            "No round in {folder} is judged yet, so there is no best round. Give the number of a "
            "round (`edgetailor rounds` lists all), or wait until one is judged.",
            code="round.none-judged",
            folder=str(folder),
        )
    return best


def compared_by(folder: Path) -> str | None:
    """The name of the figure that compares the rounds in `folder`; None if no round is judged."""
    with reading(folder) as db:
        row = db.execute(retention.BY_DEVICES).fetchone()
        if row is None:
            return None
        has_accuracy = db.execute(
            "SELECT 1 FROM history WHERE accuracy IS NOT NULL "
            "OR json_extract(devices, '$.accuracy') IS NOT NULL"
        ).fetchone()
    what = "accuracy" if has_accuracy else "loss"
    return f"{what} on the devices" if row[0] else f"held-out {what}"


def export_model(folder: Path, round_: int, out: Path, force: bool = False) -> None:
    """Write the global model after `round_` to `out`, a .safetensors file.

    Raises:
        InputError: The round is not over; its model is damaged or was not kept; `out` exists and
            `force` is not set; or `out` is a file of the state folder.
    """
    check_file_place(out, force)
    if out.exists():
        check_apart(folder, out)
    write_file(out, model_file(folder, round_).read_bytes())


def model_file(folder: Path, round_: int) -> Path:
    """The file of the global model after `round_`. Raises InputError if it does not exist."""
    rounds = saved_rounds(folder)
    wanted = known_round(rounds, round_, folder)
    path = folder / FILES / wanted.model
    if not wanted.kept:
        kept = [saved.round for saved in rounds if saved.kept]
        raise InputError(
            "The model of round {round} is not kept: `keep` in the federation's file limits the "
            "number of kept models, or this model was lost. Rounds with a kept model: "
            "{kept}.{initial}",
            code="round.not-kept",
            round=round_,
            kept=kept,
            initial="" if round_ else " Round 0 is the model before any training.",
        )
    if not has_hash(path, wanted.model):
        raise InputError(
            "{path}, the model of round {round}, is missing or damaged. Choose another round "
            "(`edgetailor rounds`), or restore a backup.",
            code="round.damaged-model",
            path=str(path),
            round=round_,
        )
    return path


def known_round(rounds: Sequence[SavedRound], round_: int, folder: Path) -> SavedRound:
    """The round `round_` of the state folder `folder`.

    Raises InputError if there is no such round.
    """
    known = {saved.round: saved for saved in rounds}
    if round_ not in known:
        last = f"The last round that is over is {max(known)}." if known else "No round is over."
        raise InputError(
            "{folder} has no round {round}. {last} `edgetailor rounds` lists all.",
            code="round.unknown",
            round=round_,
            folder=folder,
            last=last,
        )
    return known[round_]


def roll_back(folder: Path, target: int) -> int:
    """Let the next round of the federation in `folder` start from the model of round `target`.

    Returns:
        The number of that next round.

    Raises:
        InputError: If `serve` runs on the folder, or if the model of `target` does not exist.
    """
    model = model_file(folder, target)
    # The current model may be damaged: going back repairs this.
    store = Store(folder, needs_model=False)
    try:
        number = store.rollback(target)
        publish(folder, model.read_bytes(), store.history.results(), store.history.models())
    finally:
        store.close()
    return number


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to the database of `folder`, also while `serve` writes to it."""
    path = folder / DATABASE
    if not path.is_file():
        raise InputError(
            "{path} has no {database}: give the `state` folder of a federation.",
            code="state.no-federation",
            path=str(folder),
            database=DATABASE,
        )
    # Not read-only: after a kill SQLite first undoes the transaction that was cut off.
    uri = f"{path.resolve().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S)
    try:
        check_version(folder, connection)
        columns = connection.execute("SELECT name FROM pragma_table_info('history')").fetchall()
        absent = [
            name
            for name in ("devices", "held_out", "asked", "limited", "staleness")
            if (name,) not in columns
        ]
        # `serve` may not have upgraded the folder yet.
        if absent:
            new = ", ".join(f"NULL AS {name}" for name in absent)
            connection.execute(f"CREATE TEMP VIEW history AS SELECT *, {new} FROM main.history")
        known = "SELECT 1 FROM sqlite_master WHERE name = 'settings_changes'"
        if connection.execute(known).fetchone() is None:
            connection.execute("CREATE TEMP TABLE settings_changes (round, key, before, after)")
        yield connection
    except sqlite3.DatabaseError as error:
        raise InputError(
            "{path} cannot be read ({reason}). Start `edgetailor serve`: it says what can be "
            "recovered.",
            code="state.unreadable-database",
            path=str(path),
            reason=str(error),
        ) from None
    finally:
        connection.close()
