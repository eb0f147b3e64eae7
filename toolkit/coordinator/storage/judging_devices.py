"""Reads how each device judges the model of a round, from the records of updates."""

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import UnsetType

from device_agent.formats.update import UpdateRecord
from toolkit.coordinator.storage.saved_rounds import reading


@dataclass(frozen=True)
class JudgingDevice:
    """How a device predicts its own held-out samples.

    Attributes:
        device: Its id.
        name: Its name.
        kind: The name of its kind.
        labels: How many of its labels count.
        accuracy: Accuracy with the received model; None for a regression.
        loss: Loss with the received model.
        trained_accuracy: Accuracy with its own model after local training.
        trained_loss: Loss with its own model after local training.
    """

    device: str
    name: str
    kind: str
    labels: int
    accuracy: float | None
    loss: float
    trained_accuracy: float | None
    trained_loss: float


def judging_devices(folder: Path, round_: int) -> list[JudgingDevice]:
    """How the devices judge the model of `round_`, the device with the worst figure first.

    The counts came with the updates of the next round that started from this model. The records of
    updates are kept for three rounds; later the list is empty. Devices whose update was left out
    are not in the list.

    Raises InputError if `folder` is not a state folder.
    """
    with reading(folder) as db:
        rows = db.execute(
            "SELECT updates.device, name, kind, record, left_out FROM updates "
            "JOIN history ON history.round = updates.round JOIN devices ON id = updates.device "
            "WHERE updates.round = (SELECT max(round) FROM history WHERE started_from = ?)",
            (round_,),
        ).fetchall()
    judging = []
    for device, name, kind, body, left_out in rows:
        evaluation = msgspec.json.decode(body, type=UpdateRecord).evaluation
        if isinstance(evaluation, UnsetType) or device in json.loads(left_out):
            continue
        before, after = evaluation.before, evaluation.after
        if before.counted:
            judging.append(
                JudgingDevice(
                    device=device,
                    name=name,
                    kind=kind,
                    labels=before.counted,
                    accuracy=before.accuracy,
                    loss=before.means().loss,
                    trained_accuracy=after.accuracy,
                    trained_loss=after.means().loss,
                )
            )
    return sorted(
        judging, key=lambda own: (-own.loss if own.accuracy is None else own.accuracy, own.device)
    )
