"""Checks of an update against the global model, before it may be aggregated.

An update that passes the checks can be aggregated, unless numbers become too large.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.manifest import UPLOADED, TensorEntry
from device_agent.formats.update import UpdateRecord, check_record, check_tensors
from profiles.errors import SpecError, UpdateError
from toolkit.families import check_spec, recovering_family
from toolkit.submodels.family import Family
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Shapes, shapes_of
from toolkit.submodels.tensor_slices import (
    check_slice,
    group_by_global_tensor,
    slice_shape,
    slice_shapes,
)

STATISTICS = ("running_mean", "running_var")
"""The names of batch norm's statistics."""


def check_update(
    record: UpdateRecord,
    arrays: Mapping[str, np.ndarray],
    model: Mapping[str, Tensor],
    origin: str | None = None,
) -> None:
    """Raise UpdateError unless an update fits the global tensors `model`.

    The update may come from anybody. The table is checked before the arrays, so that nothing is
    computed from factors of absurd size. `origin` names the update in errors.
    """
    origin = origin or f"The update of {record.submodel!r}"
    check_record(record, origin)
    check_table(record.submodel, record.tensors, model, origin)
    check_factors(record.submodel, record.tensors, shapes_of(model))
    _check_classes(record, origin)
    check_tensors(arrays, record.tensors, origin)
    _check_variances(record.tensors, arrays, origin)


def check_table(
    submodel: str, table: tuple[TensorEntry, ...], model: Mapping[str, Tensor], origin: str
) -> None:
    """Raise UpdateError unless an update of `submodel` may contain the tensors in `table`."""
    shapes = shapes_of(model)
    _check_spec(submodel)
    _check_names(table, origin, shapes)
    _check_roles_and_types(table, origin, model)
    for name, entries in group_by_global_tensor(table).items():
        for entry in entries:
            check_slice(entry, shapes[name])
        _check_group(name, entries, shapes[name], origin)


def class_rows(table: tuple[TensorEntry, ...]) -> int:
    """The number of classes, if tensors in `table` have one row for each class; otherwise 0."""
    marked = [entry for entry in table if entry.by_class]
    return min((entry.shape[0] if entry.shape else 0 for entry in marked), default=0)


def _check_classes(record: UpdateRecord, origin: str) -> None:
    """Raise UpdateError unless the record's classes are ascending and below `class_rows`."""
    if record.classes is None:
        return
    rows = class_rows(record.tensors)
    if not record.classes or list(record.classes) != sorted(
        {number for number in record.classes if 0 <= number < rows}
    ):
        raise UpdateError(
            "{origin} must list the classes of its samples in ascending order, each below "
            "{classes}, the number of rows of its classifier. Train the bundle again.",
            code="update.wrong-classes",
            classes=rows,
            origin=origin,
        )


def is_statistic(name: str) -> bool:
    """Whether the global tensor `name` is a statistic of batch norm, which has no gradient."""
    return name.rpartition(".")[2] in STATISTICS


def is_variance(name: str) -> bool:
    """Whether the global tensor `name` is a running variance of batch norm."""
    return name.rpartition(".")[2] == "running_var"


def _check_spec(submodel: str) -> None:
    """Raise UpdateError if no family has the spec `submodel`."""
    try:
        check_spec(submodel)
    except SpecError as error:
        raise UpdateError(
            "An update names an unknown submodel. {reason} Train the bundle again.",
            code="update.unknown-submodel",
            submodel=submodel,
            reason=str(error),
        ) from None


def _check_names(table: tuple[TensorEntry, ...], origin: str, shapes: Shapes) -> None:
    times = Counter(entry.name for entry in table)
    for entry in table:
        if times[entry.name] > 1:
            raise UpdateError(
                "{origin} lists the tensor {tensor!r} more than once.",
                code="update.repeated-tensor",
                tensor=entry.name,
                origin=origin,
            )
        if entry.stands_for is None:
            raise UpdateError(
                "{origin}: {tensor!r} stands for no global parameter.",
                code="update.unnamed-parameter",
                tensor=entry.name,
                origin=origin,
            )
        if entry.stands_for not in shapes:
            raise UpdateError(
                "{origin} trains {parameter!r}, which the global model does not have. The update "
                "belongs to another model.",
                code="update.unknown-parameter",
                parameter=entry.stands_for,
                origin=origin,
            )


def _check_roles_and_types(
    table: tuple[TensorEntry, ...], origin: str, model: Mapping[str, Tensor]
) -> None:
    """Raise UpdateError for roles and number types that no device sends."""
    for entry in table:
        if entry.role not in UPLOADED:
            raise UpdateError(
                "{origin}: {tensor!r} has the role {role!r}; an update contains only tensors of "
                "the roles {roles}.",
                code="update.wrong-role",
                tensor=entry.name,
                role=entry.role,
                origin=origin,
                roles=" and ".join(UPLOADED),
            )
        if entry.dtype != "float32":
            raise UpdateError(
                "{origin}: {tensor!r} is {dtype}; an update contains float32 only.",
                code="update.wrong-type",
                tensor=entry.name,
                dtype=entry.dtype,
                origin=origin,
            )
        if not model[entry.stands_for or ""].is_floating_point():
            raise UpdateError(
                "{origin} trains {parameter!r}, which contains integers in the global model; "
                "devices do not train integers.",
                code="update.integer-parameter",
                parameter=entry.stands_for,
                origin=origin,
            )


def _check_variances(
    table: tuple[TensorEntry, ...], arrays: Mapping[str, np.ndarray], origin: str
) -> None:
    for entry in table:
        name = entry.stands_for or ""
        if is_variance(name) and (arrays[entry.name] < 0).any():
            raise UpdateError(
                "{origin} gives {parameter!r} a variance below zero.",
                code="update.negative-variance",
                parameter=name,
                origin=origin,
            )


def _check_group(
    name: str, entries: list[TensorEntry], shape: tuple[int, ...], origin: str
) -> None:
    """Check the entries that stand for the global tensor `name` of `shape`."""
    labels = [entry.factor for entry in entries]
    if len(set(labels)) < len(labels) or (None in labels and len(labels) > 1):
        raise UpdateError(
            "{origin} contains {parameter!r} twice; an update may contain either the tensor or its "
            "factors, once.",
            code="update.repeated-parameter",
            parameter=name,
            origin=origin,
        )
    if any(entry.part != entries[0].part for entry in entries):
        raise UpdateError(
            "{origin}: the factors of {parameter!r} are for different parts of this tensor. All "
            "factors must be for the same part.",
            code="update.different-parts",
            parameter=name,
            origin=origin,
        )
    held = slice_shape(entries[0], shape)
    if None in labels:
        _check_shape(name, entries[0].shape, held, origin)
    else:
        _check_rank(name, entries, held, origin)


def _check_shape(name: str, came: tuple[int, ...], held: tuple[int, ...], origin: str) -> None:
    if came != held:
        raise UpdateError(
            "{origin} gives {parameter!r} the shape {shape}; the global model has "
            "{expected_shape} there.",
            code="update.wrong-shape",
            parameter=name,
            shape=came,
            expected_shape=held,
            origin=origin,
        )


def _check_rank(name: str, entries: list[TensorEntry], held: tuple[int, ...], origin: str) -> None:
    """Raise UpdateError for empty factors, and for more numbers than any useful rank needs.

    The rank of a tensor of shape `held` is at most its number of elements / its largest axis. CP
    factors have one row of `sum(held)` numbers for each rank. A useful matrix factorization has
    fewer numbers.
    """
    if len(held) < 2:
        raise UpdateError(
            "{origin} has factors of {parameter!r}, which has the shape {shape} in the global "
            "model; only tensors of two or more axes have factors.",
            code="update.unexpected-factors",
            parameter=name,
            shape=held,
            origin=origin,
        )
    numbers = sum(math.prod(entry.shape) for entry in entries)
    largest = math.prod(held) // max(held) * sum(held)
    if not 0 < numbers <= largest:
        raise UpdateError(
            "{origin}: all factors of {parameter!r} together have {numbers} elements; for a "
            "tensor of shape {held} they must have 1 to {most}.",
            code="update.wrong-rank",
            parameter=name,
            most=largest,
            origin=origin,
            numbers=numbers,
            held=held,
        )


def check_factors(submodel: str, table: Sequence[TensorEntry], whole: Shapes) -> None:
    """Raise UpdateError unless the family can recover the global tensors of a checked `table`.

    `whole` has the shapes of the global tensors. Nothing is computed: the tensors are on PyTorch's
    device `meta`.
    """
    family, shapes = recovering_family(parse_spec(submodel)), slice_shapes(table, whole)
    tensors = {entry.name: torch.empty(entry.shape, device="meta") for entry in table}
    try:
        recovered = family.recover(tensors, table, shapes)
    except KeyError as error:
        raise UpdateError(
            "An update lacks the factor {factor!r} of {parameter!r}.",
            code="update.missing-factor",
            factor=str(error.args[0]),
            parameter=_incomplete(family, tensors, table, shapes),
        ) from None
    except (RuntimeError, LookupError, ValueError) as error:
        raise UpdateError(
            "An update's factors do not fit the global model: {reason}.",
            code="update.wrong-factors",
            reason=str(error),
        ) from None
    stood_for = {entry.stands_for for entry in table}
    for name in sorted(map(str, stood_for ^ recovered.keys())):
        raise UpdateError(
            "An update has factors of {parameter!r}, but the family {family!r} does not factorize "
            "that tensor. The update is not of the submodel that it names.",
            code="update.unexpected-factors",
            parameter=name,
            family=family.form.family,
        )
    for name, value in recovered.items():
        if tuple(value.shape) != shapes[name]:
            raise UpdateError(
                "The factors of {parameter!r} in an update give the shape {shape}; the global "
                "model has {expected_shape}.",
                code="update.wrong-shape",
                parameter=name,
                shape=tuple(value.shape),
                expected_shape=shapes[name],
            )


def _incomplete(
    family: Family, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
) -> str | None:
    """The global tensor that `family` cannot recover because a factor is missing."""
    for name, entries in group_by_global_tensor(table).items():
        try:
            family.recover(tensors, entries, shapes)
        except KeyError:
            return name
    return None
