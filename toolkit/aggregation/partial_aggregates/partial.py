"""Writes a running aggregation as two files. Another machine can merge several aggregations.

`partial.safetensors` contains the sums, and `partial.json` contains the weights of the sums. The
size depends on the model and the submodels, not on the number of devices.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors.torch import save
from torch import Tensor

from device_agent.formats.atomic_files import fingerprint, refuse_existing, write_folder
from device_agent.formats.manifest import encode
from profiles.errors import InputError, UpdateError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.factor_mean import FactorMean
from toolkit.aggregation.partial_aggregates.partial_record import (
    RECORD,
    TENSORS,
    FactorsEntry,
    PartialRecord,
    PartWeight,
    SumEntry,
    decode_partial_record,
)
from toolkit.aggregation.partial_aggregates.partial_sums import (
    HIGH,
    LOW,
    check_sum,
    held_sums,
    read_sums,
)
from toolkit.aggregation.partial_aggregates.partial_validation import check_record, check_sizes
from toolkit.aggregation.running_aggregation import Aggregation, no_update
from toolkit.aggregation.running_sum import RunningSum
from toolkit.aggregation.update_weights import UpdateWeights
from toolkit.families import recovering_family
from toolkit.submodels.class_rows import ranges_of, rows_of
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Ranges
from toolkit.submodels.tensor_slices import TensorSlice


def write_partial(out: str | Path, aggregation: Aggregation, force: bool = False) -> None:
    """Write `aggregation` to the new folder `out`, atomically.

    More updates can be added afterwards.

    Use it if updates are added on several machines: each writes its aggregation, and one machine
    reads all of them with `read_partial`.

    Args:
        out: The folder to create.
        aggregation: An aggregation with at least one update.
        force: Replace a partial aggregate that exists at `out`.

    Raises:
        UpdateError: The aggregation has no update, or a sum is too large: training diverged.
        InputError: `out` exists and may not be replaced.

    Examples:
        >>> import edgetailor as et
        >>> site = et.Aggregation(model, et.AggregationPolicy())  # doctest: +SKIP
        >>> site.add(*et.read_update("update"))  # doctest: +SKIP
        >>> et.write_partial("site-1", site)  # doctest: +SKIP
    """
    out = Path(out)
    files = encode_partial(aggregation)
    refuse_existing(out, force)
    if out.exists() and not (out / RECORD).is_file():
        raise InputError(
            "{path} is not a partial aggregate, so it is not replaced: give another folder.",
            code="file.not-replaceable",
            path=str(out),
        )
    write_folder(out, files, force)


def read_partial(
    folder: str | Path,
    model: GlobalModel,
    policy: AggregationPolicy,
    most_bytes: int | None = None,
) -> Aggregation:
    """Read and check the partial aggregate in `folder`.

    Use it on the machine that merges the aggregations of other machines: `merge` all of them into
    one aggregation, and call its `result`.

    Args:
        folder: The folder that `write_partial` created.
        model: The global model that the updates were trained from.
        policy: The policy under which the updates were added.
        most_bytes: The largest allowed size of `partial.safetensors`, in bytes. Default: 16 times
            the model, plus 1 MiB.

    Returns:
        The aggregation. `Aggregation.merge` adds it to another aggregation.

    Raises:
        UpdateError: A file is missing, damaged or too large, or the partial aggregate does not fit
            the model and the policy.

    Examples:
        >>> import edgetailor as et
        >>> whole = et.Aggregation(model, et.AggregationPolicy())  # doctest: +SKIP
        >>> for site in ("site-1", "site-2"):  # doctest: +SKIP
        ...     whole.merge(et.read_partial(site, model, et.AggregationPolicy()))
        >>> new = whole.result()  # doctest: +SKIP
    """
    folder = Path(folder)
    try:
        about, sums = ((folder / name).stat().st_size for name in (RECORD, TENSORS))
        check_sizes(about, sums, model, most_bytes, str(folder))
        files = {name: (folder / name).read_bytes() for name in (RECORD, TENSORS)}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UpdateError(
            "{folder} is not a partial aggregate: {file} is missing. Give the folder that "
            "`write_partial` made.",
            code="partial.missing-file",
            file=Path(error.filename).name,
            folder=folder,
        ) from None
    return decode_partial(files, model, policy, most_bytes, str(folder))


def encode_partial(aggregation: Aggregation) -> dict[str, bytes]:
    """Write a running aggregation as two files in memory; returns each name with its content.

    Raises UpdateError if the aggregation has no update, or if a sum is too large.
    """
    if not aggregation.updates:
        raise no_update()
    tensors: dict[str, Tensor] = {}
    for held in held_sums(aggregation):
        check_sum(held, "This partial aggregate")
        low, high = held.mean.sums[held.name].parts()
        tensors[f"{LOW}{held.label}"], tensors[f"{HIGH}{held.label}"] = low, high
    data = save(tensors)
    record = PartialRecord(
        base=aggregation.model.fingerprint(),
        policy=aggregation.policy.fingerprint(),
        updates=aggregation.updates,
        trained=tuple(sorted(aggregation.trained)),
        sums=tuple(
            SumEntry(name=name, weights=tuple(_by_part(weights)))
            for name, weights in sorted(aggregation.mean.weights.items())
        ),
        factors=tuple(_entry(key, group) for key, group in sorted(aggregation.factors.items())),
        batches=tuple(sorted(aggregation.counters.advances.items())),
        file=fingerprint(data),
    )
    return {TENSORS: data, RECORD: encode(record)}


def decode_partial(
    files: Mapping[str, bytes],
    model: GlobalModel,
    policy: AggregationPolicy,
    most_bytes: int | None = None,
    origin: str = "The partial aggregate",
) -> Aggregation:
    """Decode the files of `encode_partial` to a running aggregation; see `read_partial`."""
    if files.keys() != {RECORD, TENSORS}:
        raise UpdateError(
            "{origin} must consist of {record} and {tensors}; it has {found}. Send both files.",
            code="partial.missing-file",
            origin=origin,
            record=RECORD,
            tensors=TENSORS,
            found=", ".join(sorted(files)) or "no file",
        )
    check_sizes(len(files[RECORD]), len(files[TENSORS]), model, most_bytes, origin)
    record = decode_partial_record(files[RECORD], f"{origin}: {RECORD}")
    check_record(record, model, policy, origin)
    if fingerprint(files[TENSORS]) != record.file:
        raise UpdateError(
            "{origin}: {file} is not the file that {record} describes (size or SHA-256 differ). "
            "Send it again.",
            code="partial.altered-file",
            file=TENSORS,
            origin=origin,
            record=RECORD,
        )
    aggregation = _without_sums(record, model, policy)
    sums = list(held_sums(aggregation))
    shapes = {held.label: held.shape for held in sums}
    tensors = read_sums(files[TENSORS], shapes, f"{origin}: {TENSORS}")
    for held in sums:
        low, high = (tensors.get(f"{part}{held.label}") for part in (LOW, HIGH))
        assert low is not None
        held.mean.sums[held.name] = RunningSum.of(low, high)
        check_sum(held, origin)
    return aggregation


def _without_sums(
    record: PartialRecord, model: GlobalModel, policy: AggregationPolicy
) -> Aggregation:
    """The aggregation that a checked record describes, with all weights and without tensors."""
    aggregation = Aggregation(model, policy)
    aggregation.updates, aggregation.trained = record.updates, set(record.trained)
    aggregation.counters.advances = dict(record.batches)
    for entry in record.sums:
        whole = aggregation.shapes[entry.name]
        aggregation.mean.weights[entry.name] = {
            None if part.part is None else TensorSlice(whole, part.part): part.weight
            for part in entry.weights
        }
    for factors in record.factors:
        family = recovering_family(parse_spec(factors.submodel))
        group = aggregation.group(factors.submodel, family, factors.tensors)
        by_class: dict[int | None, float] = dict(factors.classes)
        if factors.all_classes:
            by_class[None] = factors.all_classes
        group.weights = UpdateWeights(factors.weight, by_class)
        for tensor in factors.tensors:
            group.mean.weights[tensor.name] = (
                {_row_of(tensor.shape, row): weight for row, weight in by_class.items()}
                if tensor.by_class
                else {None: factors.weight}
            )
    return aggregation


def _row_of(shape: tuple[int, ...], row: int | None) -> TensorSlice | None:
    return None if row is None else TensorSlice(shape, rows_of(shape, ((row, row + 1),)))


def _entry(key: str, group: FactorMean) -> FactorsEntry:
    weights = group.weights
    return FactorsEntry(
        submodel=key,
        tensors=group.table,
        weight=weights.total,
        all_classes=weights.by_class.get(None, 0.0),
        classes=tuple(sorted((c, w) for c, w in weights.by_class.items() if c is not None)),
    )


def _by_part(weights: Mapping[TensorSlice | None, float]) -> Iterator[PartWeight]:
    """Yield the weight of each part of a tensor. Rows with the same total weight are one part.

    `weights` has an entry for each combination of rows that a device had. There can be many more
    combinations than rows, so the weights are added up row by row.
    """
    if None in weights:
        yield PartWeight(part=None, weight=weights[None])
    rows_by_rest: dict[Ranges, np.ndarray] = {}
    for part, weight in weights.items():
        if part is not None:
            rest = tuple(tuple(sorted(axis)) for axis in part.ranges[1:])
            rows = rows_by_rest.setdefault(rest, np.zeros(part.whole_shape[0]))
            for start, stop in part.ranges[0]:
                rows[start:stop] += weight
    for rest, rows in sorted(rows_by_rest.items()):
        for row_weight in np.unique(rows[rows > 0]).tolist():
            held = np.flatnonzero(rows == row_weight).tolist()
            yield PartWeight(part=(ranges_of(held), *rest), weight=row_weight)
