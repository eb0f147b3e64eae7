"""Aggregates update folders into a weights file, for rounds without a coordinator."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place, write_file
from device_agent.formats.protocol.fleet import Limited
from device_agent.formats.update import RECORD, UpdateRecord, read_update
from profiles.errors import InputError, UpdateError
from profiles.progress import Report, silent
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import figures
from toolkit.aggregation.update_validation import check_update
from toolkit.submodels import global_model
from toolkit.submodels.global_model import GlobalModel

AGGREGATION_VERSION = 1


@dataclass(frozen=True)
class Aggregated:
    """The result of `aggregate_files`: the records of the updates, and the new weights file.

    `limited` says for each update what the limits changed; None if they changed nothing.
    """

    records: tuple[UpdateRecord, ...]
    out: Path
    limited: tuple[Limited | None, ...]


def aggregate_files(
    global_file: Path,
    updates: Sequence[Path],
    out: Path,
    force: bool = False,
    policy: AggregationPolicy | None = None,
    progress: Report = silent,
) -> Aggregated:
    """Aggregate update folders into a weights file. One update is in memory at a time.

    Args:
        global_file: The weights that the updates were trained from.
        updates: Update folders.
        out: The new weights file.
        force: Replace `out` if it exists.
        policy: The weights of updates and how far the model moves.
        progress: Called with the name of each stage when it begins.

    Returns:
        The records of the updates, `out`, and what the limits changed in each update.

    Raises:
        UpdateError: If an update was trained from other weights. `out` is then unchanged.
        InputError: If a file cannot be used. `out` is then unchanged.
    """
    check_file_place(out, force)
    if (global_file / RECORD).is_file():
        raise InputError(
            "{path} is an update folder, not a weights file: give the global weights first and "
            "the updates after them.",
            code="aggregate.wrong-order",
            path=str(global_file),
        )
    progress(f"reading {global_file}")
    model = global_model.from_file(global_file)
    base = model.fingerprint()
    records: list[UpdateRecord] = []
    seen: dict[str, Path] = {}

    def received() -> Iterator[Received]:
        for folder in updates:
            record, tensors = read_update(folder)
            if record.base != base:
                raise UpdateError(
                    "{path} was not trained from the global model {global_file}: it belongs to "
                    "another model or another round. Give the global weights that its bundle was "
                    "cut from.",
                    code="aggregate.other-model",
                    path=str(folder),
                    global_file=str(global_file),
                )
            if record.file.sha256 in seen:
                raise UpdateError(
                    "{path} is the same update as {other}: give each update once.",
                    code="aggregate.same-update",
                    path=str(folder),
                    other=str(seen[record.file.sha256]),
                )
            seen[record.file.sha256] = folder
            records.append(record)
            yield record, tensors
            del tensors  # freed before the next update is read

    policy = policy or AggregationPolicy()
    limits = None
    if policy.bounds:
        progress("measuring the updates")
        own = [figures(update, model, policy) for update in _checked(received(), model)]
        limits = RoundLimits(Reference().completed(own))
        records.clear()
        seen.clear()
    new = aggregate(model, received(), policy, limits=limits, progress=progress)
    progress(f"writing {out}")
    write_file(out, new.save())
    limited = [None] * len(records) if limits is None else limits.limited
    return Aggregated(tuple(records), out, tuple(limited))


def as_json(aggregated: Aggregated) -> dict[str, object]:
    """The document that `aggregate --json` prints."""
    return {
        "version": AGGREGATION_VERSION,
        "out": str(aggregated.out),
        "updates": [
            {
                "submodel": record.submodel,
                "samples": record.samples,
                "limited": None if limited is None else asdict(limited),
            }
            for record, limited in zip(aggregated.records, aggregated.limited, strict=True)
        ],
    }


def _checked(updates: Iterator[Received], model: GlobalModel) -> Iterator[Received]:
    for update in updates:
        check_update(*update, model.tensors)
        yield update
        del update  # otherwise two updates are in memory while the next one is read
