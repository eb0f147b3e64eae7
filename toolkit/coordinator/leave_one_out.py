"""Aggregates a round again without each of its devices, to find devices that harm the model."""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from safetensors import SafetensorError

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.tensor_files import tensors_in
from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError
from profiles.json_decoding import decode_json
from profiles.text_formatting import counted
from toolkit.aggregation.limits.update_bounds import most_samples
from toolkit.coordinator.rounds.upload_validation import Update
from toolkit.coordinator.storage.blobs import Blobs
from toolkit.coordinator.storage.recoverable import FILES
from toolkit.coordinator.storage.saved_rounds import known_round, model_file, reading, saved_rounds

if TYPE_CHECKING:
    from toolkit.aggregation.federation import Federation
    from toolkit.coordinator.closing.round_models import Samples
    from toolkit.evaluation_sums import Evaluation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptUpdate:
    """An update of a finished round. Its tensors are kept.

    Attributes:
        device: The id of its device.
        name: The device's name.
        kind: The name of the device's kind.
        record: The content of `update.json`.
        sha256: The hash of its tensors.
    """

    device: str
    name: str
    kind: str
    record: UpdateRecord
    sha256: str


@dataclass(frozen=True)
class WithoutDevice:
    """An update of a round, and how good the round's model would be without this update."""

    left_out: KeptUpdate
    evaluation: "Evaluation"


def leave_one_out(
    federation: "Federation", folder: Path, round_: int, samples: "Samples"
) -> tuple["Evaluation", list[WithoutDevice]]:
    """Aggregate the updates of a round again: all of them, and without each of the devices.

    A round with n updates is aggregated n + 1 times, with one update in memory at a time.

    Args:
        federation: The federation's model and settings. Its weights are replaced.
        folder: The state folder; `edgetailor serve` may run on it.
        round_: The number of the round.
        samples: Samples and labels to evaluate the models.

    Returns:
        The evaluation of the model with all updates, and one evaluation without each device, sorted
        from the best model to the worst.

    Raises:
        InputError: The round has no updates, its updates or the model before it are not kept, or
            one of these files is damaged.
    """
    start, updates = kept_updates(folder, round_)
    federation.held_out = samples
    before = model_file(folder, start).read_bytes()
    rounds = saved_rounds(folder)
    ages = {saved.model: round_ - 1 - saved.round for saved in rounds if saved.round < round_}
    ages[fingerprint(before).sha256] = 0

    def evaluated(used: Sequence[KeptUpdate]) -> "Evaluation":
        federation.load(before)
        most = most_samples([update.record.samples for update in used]) if used else 0
        # In asynchronous rounds, updates may be of earlier models.
        by_age: dict[int, list[KeptUpdate]] = {}
        for update in used:
            by_age.setdefault(ages.get(update.record.base, 0), []).append(update)
        blobs, newest = Blobs(folder / FILES), by_age.pop(0, [])
        stale = (
            (age, model_file(folder, round_ - 1 - age).read_bytes(), _updates(blobs, same, most))
            for age, same in by_age.items()
        )
        if by_age:
            federation.fold_versions(_updates(blobs, newest, most), stale)
        elif newest:
            federation.fold_checked(_updates(blobs, newest, most))
        return federation.evaluation(*samples)

    logger.info("aggregating %s of round %d", counted(len(updates), "update"), round_)
    every = evaluated(updates)
    without = []
    for number, update in enumerate(updates, 1):
        logger.info("without %s (%d of %d)", update.device, number, len(updates))
        rest = [other for other in updates if other is not update]
        without.append(WithoutDevice(update, evaluated(rest)))
    return every, sorted(without, key=_best_first)


def kept_updates(folder: Path, round_: int) -> tuple[int, list[KeptUpdate]]:
    """The round that `round_` started from, and the updates that it aggregated, by device.

    Raises InputError if the round has no updates, or if their tensors are not kept.
    """
    saved = known_round(saved_rounds(folder), round_, folder)
    if not saved.updates or saved.started_from is None:
        raise InputError(
            "Round {round} aggregated no updates, so no device can be left out. Give another "
            "round; `edgetailor rounds` lists all.",
            code="round.no-updates",
            round=round_,
        )
    with reading(folder) as db:
        rows = db.execute(
            "SELECT updates.device, name, kind, record, sha256, left_out FROM updates "
            "JOIN history ON history.round = updates.round JOIN devices ON id = updates.device "
            "WHERE updates.round = ? ORDER BY updates.device",
            (round_,),
        ).fetchall()
    updates = [
        KeptUpdate(device, name, kind, decode_json(body, UpdateRecord), sha256)
        for device, name, kind, body, sha256, left_out in rows
        if device not in json.loads(left_out)
    ]
    blobs = Blobs(folder / FILES)
    if len(updates) < saved.updates or not _all_there(blobs, updates):
        raise InputError(
            "The updates of round {round} are not kept. Set `keep_updates` in the federation's "
            "file to a number from 1 to 3 and start `edgetailor serve` again, which then keeps the "
            "updates of that many rounds.",
            code="round.updates-not-kept",
            round=round_,
        )
    return saved.started_from, updates


def _all_there(blobs: Blobs, updates: Collection[KeptUpdate]) -> bool:
    return all(blobs.has_size(own.sha256, own.record.file.size) for own in updates)


def _updates(blobs: Blobs, used: Sequence[KeptUpdate], most: int) -> Iterator[Update]:
    """Yield updates with at most `most` samples. Raises InputError if a file is damaged."""
    for update in used:
        data = blobs.read(update.sha256)
        try:
            tensors = None if data is None else tensors_in(data)
        except SafetensorError:
            tensors = None
        if tensors is None:
            raise InputError(
                "{path}, the update of {device}, is missing or damaged. Choose another round.",
                code="round.damaged-update",
                path=str(blobs.path(update.sha256)),
                device=update.device,
            )
        del data
        yield replace(update.record, samples=min(update.record.samples, most)), tensors
        del tensors  # otherwise two updates are in memory while the next one is read


def _best_first(without: WithoutDevice) -> tuple[float, float, str]:
    evaluation = without.evaluation
    return -(evaluation.accuracy or 0.0), evaluation.loss, without.left_out.device
