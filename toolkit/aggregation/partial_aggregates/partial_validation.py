"""Checks of a partial aggregate's record against the global model and the policy."""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import MOST_SAMPLES
from profiles.errors import UpdateError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.batch_counters import COUNTER, MOST_BATCHES
from toolkit.aggregation.partial_aggregates.partial_record import (
    RECORD,
    TENSORS,
    FactorsEntry,
    PartialRecord,
    SumEntry,
)
from toolkit.aggregation.update_validation import (
    check_factors,
    check_table,
    class_rows,
)
from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import TensorSlice, check_slice

MOST_RECORD_BYTES = 16 << 20
MOST_UPDATES = 10**9

COPIES = 16
"""By default the sums may have this many times the model's size: each tensor has two parts, and the
factors of several submodels also have two parts each."""
HEADROOM = 1 << 20
"""Bytes that are allowed above this limit, for the header and small models."""

COVERS = 100
"""How often the parts of a tensor may cover it: about once for each submodel."""

ROUNDING = 1e-9
"""The largest relative difference of equal weights that were summed in different orders."""


def check_sizes(
    record_bytes: int, tensor_bytes: int, model: GlobalModel, most_bytes: int | None, origin: str
) -> None:
    """Raise UpdateError for files above their limits; `most_bytes` limits the tensors."""
    if most_bytes is None:
        own = sum(tensor.numel() * tensor.element_size() for tensor in model.tensors.values())
        most_bytes = COPIES * own + HEADROOM
    limits = ((RECORD, record_bytes, MOST_RECORD_BYTES), (TENSORS, tensor_bytes, most_bytes))
    for name, size, limit in limits:
        if size > limit:
            raise UpdateError(
                "{origin}: {file} has {bytes} bytes; at most {limit_bytes} are read. If the model "
                "has very many submodels, raise `most_bytes`.",
                code="partial.too-large",
                file=name,
                bytes=size,
                limit_bytes=limit,
                origin=origin,
            )


def check_record(
    record: PartialRecord, model: GlobalModel, policy: AggregationPolicy, origin: str
) -> None:
    """Raise UpdateError unless `record` describes sums of updates of `model` under `policy`."""
    _check_origin(record, model, policy, origin)
    limits = _WeightLimits(record.updates, policy, origin)
    _check_names(record, model, origin)
    for entry in record.sums:
        _check_parts(entry, model.tensors[entry.name], limits)
    for factors in record.factors:
        _check_factors(factors, model, limits, origin)


def _check_origin(
    record: PartialRecord, model: GlobalModel, policy: AggregationPolicy, origin: str
) -> None:
    if record.base != (base := model.fingerprint()):
        raise UpdateError(
            "The updates of {origin} were trained from the global model {base!r}; this round's "
            "model is {expected_base!r}. Merge this partial aggregate into an aggregation of its "
            "own model.",
            code="partial.other-model",
            found=record.base[:64],
            expected=base,
            origin=origin,
            base=record.base[:12],
            expected_base=base[:12],
        )
    if record.policy != policy.fingerprint():
        raise UpdateError(
            "{origin} was made under another aggregation policy. Only partial aggregates with the "
            "same weights, temperature, factors and beta can be merged: use one [aggregation] "
            "table everywhere.",
            code="partial.other-policy",
            found=record.policy[:64],
            expected=policy.fingerprint(),
            origin=origin,
        )
    if record.updates > MOST_UPDATES:
        raise UpdateError(
            "{origin} claims to have {found} updates; it may have at most {most:,}. Leave this "
            "partial aggregate out.",
            code="partial.too-many-updates",
            found=record.updates,
            most=MOST_UPDATES,
            origin=origin,
        )


def _check_names(record: PartialRecord, model: GlobalModel, origin: str) -> None:
    """Raise UpdateError if a name is repeated, or if the model has no trainable tensor for it."""
    named = [("tensor", [entry.name for entry in record.sums])]
    named += [("submodel", [entry.submodel for entry in record.factors])]
    named += [("trained tensor", list(record.trained))]
    named += [("counter", [name for name, _ in record.batches])]
    for what, names in named:
        for name, times in Counter(names).items():
            if times > 1:
                raise UpdateError(
                    "{origin} lists the {what} {name!r} more than once. Each may be listed only "
                    "once.",
                    code="partial.repeated-name",
                    name=name,
                    origin=origin,
                    what=what,
                )
    for entry in record.sums:
        if entry.name not in model.tensors or not model.tensors[entry.name].is_floating_point():
            raise UpdateError(
                "{origin} has a sum of {parameter!r}, which is not a trainable tensor of the "
                "global model. Merge this partial aggregate into an aggregation of its own model.",
                code="partial.unknown-parameter",
                parameter=entry.name,
                origin=origin,
            )
    for name, count in record.batches:
        if name.rpartition(".")[2] != COUNTER or name not in model.tensors or count > MOST_BATCHES:
            raise UpdateError(
                "{origin} counts {count} batches for {name!r}. The global model has no such "
                "counter, or the number is above {most}. Merge this partial aggregate into an "
                "aggregation of its own model.",
                code="partial.wrong-batches",
                origin=origin,
                count=count,
                name=name[:80],
                most=MOST_BATCHES,
            )
    held = {entry.name for entry in record.sums}
    held |= {e.stands_for or "" for factors in record.factors for e in factors.tensors}
    if not held:
        raise UpdateError(
            "{origin} has no sum of any tensor. It must have the sums of the tensors of at least "
            "one update.",
            code="partial.empty",
            origin=origin,
        )
    for name in sorted(set(record.trained) - held):
        raise UpdateError(
            "{origin} lists {parameter!r} as trained, but has no sum of it. Leave this partial "
            "aggregate out.",
            code="partial.unknown-parameter",
            parameter=name,
            origin=origin,
        )


class _WeightLimits:
    """The range of the total weight that a number of updates can have under a policy."""

    def __init__(self, updates: int, policy: AggregationPolicy, origin: str) -> None:
        self.least = policy.weight(1, 0.0)
        self.most = updates * policy.weight(MOST_SAMPLES, 1.0)
        self.origin = origin

    def check(self, what: str, weights: Iterable[float]) -> None:
        """Raise UpdateError if a weight of `what` is outside this range."""
        for weight in weights:
            if not self.least <= weight <= self.most * (1 + ROUNDING):
                raise UpdateError(
                    "{origin}: {what} has the weight {weight:g}. Under this aggregation policy "
                    "the weight must be from {least:g} to {most:g}. Leave this partial aggregate "
                    "out.",
                    code="partial.wrong-weight",
                    weight=weight,
                    least=self.least,
                    most=self.most,
                    origin=self.origin,
                    what=what,
                )


def _check_parts(entry: SumEntry, tensor: Tensor, limits: _WeightLimits) -> None:
    """Check the parts of a tensor that the updates contain, and their weight at every element."""
    shape, name = tuple(tensor.shape), repr(entry.name)
    limits.check(name, (part.weight for part in entry.weights))
    for part in entry.weights:
        if part.part is not None:
            check_slice(
                TensorEntry(
                    name=entry.name,
                    role="parameter",
                    dtype="float32",
                    shape=shape,
                    stands_for=entry.name,
                    part=part.part,
                ),
                shape,
            )
    parts = [TensorSlice(shape, part.part) for part in entry.weights if part.part is not None]
    if (
        not entry.weights
        or len({part.part for part in entry.weights}) < len(entry.weights)
        or () in {part.part for part in entry.weights}
        or sum(math.prod(part.shape) for part in parts) > COVERS * tensor.numel()
    ):
        raise UpdateError(
            "{origin} must have weights for one or more parts of {name}, once for each part. All "
            "parts together may have at most {times} times the elements of the tensor. Leave this "
            "partial aggregate out.",
            code="partial.wrong-parts",
            parameter=entry.name,
            origin=limits.origin,
            name=name,
            times=COVERS,
        )
    share = torch.zeros(shape, dtype=torch.float64)
    for part in entry.weights:
        if part.part is None:
            share += part.weight
        else:
            TensorSlice(shape, part.part).add_to(share, 1.0, part.weight)
    limits.check(name, [float(share.max())])


def _check_factors(
    factors: FactorsEntry, model: GlobalModel, limits: _WeightLimits, origin: str
) -> None:
    origin = f"{origin}: {factors.submodel!r}"
    check_table(factors.submodel, factors.tensors, model.tensors, origin)
    spec = parse_spec(factors.submodel)
    if not recovering_family(spec).averages_factors or spec.head != factors.submodel:
        raise UpdateError(
            "{origin} has sums of factors for {submodel!r}. A partial aggregate has such sums only "
            "for families that average factors, and names the submodel by family and size alone, "
            "such as cp:2.0. Add these updates to the sums of the global tensors instead.",
            code="partial.unexpected-factors",
            submodel=factors.submodel,
            origin=origin,
        )
    check_factors(factors.submodel, factors.tensors, shapes_of(model.tensors))
    weights = [weight for _, weight in factors.classes]
    limits.check(origin, [factors.weight, *weights, factors.all_classes or factors.weight])
    classes, rows = [number for number, _ in factors.classes], class_rows(factors.tensors)
    others = factors.weight - factors.all_classes
    slack = ROUNDING * factors.weight
    fits = (
        -slack <= others <= factors.weight
        and (bool(classes) or others <= slack)
        and all(weight <= others + slack for weight in weights)
        and classes == sorted({number for number in classes if number < rows})
    )
    if not fits:
        raise UpdateError(
            "{origin} must list the weights of classes in ascending order of the classes, each "
            "class below {classes}. The weight of a class plus the weight for all classes must be "
            "at most the weight of all updates. Leave this partial aggregate out.",
            code="partial.wrong-classes",
            submodel=factors.submodel,
            classes=rows,
            origin=origin,
        )
