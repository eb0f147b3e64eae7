"""Rounds without a coordinator: aggregate update folders into a weights file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_agent.formats.atomic_files import check_file_place, write_file
from device_agent.formats.update import UpdateRecord, read_update
from profiles.errors import UpdateError
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.submodels import global_model

AGGREGATION_VERSION = 1


@dataclass(frozen=True)
class Aggregated:
    """What went into a new global model."""

    records: tuple[UpdateRecord, ...]
    out: Path


def aggregate_files(
    global_file: Path,
    updates: Sequence[Path],
    out: Path,
    force: bool = False,
    policy: AggregationPolicy | None = None,
) -> Aggregated:
    """Fold the update folders `updates` into the model of `global_file` and write it to `out`.

    One update is in memory at a time. Raises UpdateError for an update that was cut from another
    global model, InputError for files that cannot be used; then `out` is as it was.
    """
    check_file_place(out, force)
    model = global_model.from_file(global_file)
    base = model.fingerprint()
    records: list[UpdateRecord] = []
    seen: dict[str, Path] = {}

    def received() -> Iterator[Received]:
        for folder in updates:
            record, tensors = read_update(folder)
            if record.base != base:
                raise UpdateError(
                    f"{folder} was trained from another global model than {global_file}: it is of "
                    "another model or another round. Aggregate it into the weights that its bundle "
                    "was cut from."
                )
            if record.file.sha256 in seen:
                raise UpdateError(
                    f"{folder} is the same update as {seen[record.file.sha256]}: give each once."
                )
            seen[record.file.sha256] = folder
            records.append(record)
            yield record, tensors
            del tensors  # before the next update is read

    new = aggregate(model, received(), policy or AggregationPolicy())
    write_file(out, new.save())
    return Aggregated(tuple(records), out)


def as_json(aggregated: Aggregated) -> dict[str, object]:
    """The document that `aggregate --json` prints."""
    return {
        "version": AGGREGATION_VERSION,
        "out": str(aggregated.out),
        "updates": [{"submodel": r.submodel, "samples": r.samples} for r in aggregated.records],
    }
