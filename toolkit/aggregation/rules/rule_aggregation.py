"""Aggregates a round by another rule than the weighted mean.

Let v_p be the values of update p, recovered to full shapes. Let r_p be the values that the device
received: the global model itself, or for factors the model that they compose. Training has changed
the model by v_p - r_p. P_i are the updates that contain element i. Then

    new_i = mean_{p in P_i} r_pi  +  rule_{p in P_i} (v_pi - r_pi)

So a rule compares the changes that training made, without the approximation errors of submodels. If
all devices received the model itself, the result is the rule applied to the values. All updates
have the same weight, because a device may lie about its number of samples. Only `fltrust` weighs
updates, by their trust; then both terms are weighted means. Factors that are kept between rounds
(`cp`) move by the rule in the same way, if no other update contains the tensor that they compose.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from device_agent.formats.update import UpdateRecord
from profiles.errors import InputError
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.factor_mean import check_factors
from toolkit.aggregation.limits.reference import RoundLimits
from toolkit.aggregation.recover import as_tensors
from toolkit.aggregation.rules.robust_rules import (
    Alignment,
    Pairs,
    disagreeing,
    krum_choice,
    mean,
    trimmed_mean,
)
from toolkit.aggregation.rules.spooled_changes import Piece, SpooledChanges
from toolkit.aggregation.running_aggregation import Aggregation, no_update
from toolkit.aggregation.update_validation import check_update, is_statistic
from toolkit.aggregation.weighted_mean import Mean
from toolkit.families import recovering_family
from toolkit.submodels.class_rows import own_rows, row_places
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import Spec, parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import TensorSlice, slice_shapes, slices_by_tensor

Table = tuple[TensorEntry, ...]


class _Held(NamedTuple):
    """What an update contains.

    Attributes:
        tensors: The names of its global tensors.
        places: The slice of each tensor that it contains only in part.
        spec: Its submodel.
        factors: Its entries that are factors.
        classes: The classes of its device; None for all.
        keeps: Whether the model keeps the factors for the next round.
    """

    tensors: frozenset[str]
    places: Mapping[str, TensorSlice]
    spec: Spec
    factors: Table
    classes: tuple[int, ...] | None
    keeps: bool


class RuleAggregation:
    """The aggregation of one round by `policy.rule`. The module's docstring has the formula.

    The changes of each update are in a file until `result`; see `SpooledChanges`. Memory contains
    one update, three models in float64, and a fixed number of changes (about 40 MB with the results
    of the rules). The needed memory does not grow with the number of updates.

    The result does not depend on the order of the updates, except for rounding.

    Args:
        model: The global model that the updates were trained from.
        policy: The rule, and how far the model moves. The weights of the policy are not used.
        trusted: For `fltrust`: how training on held-out samples changes the parameters of `model`,
            by global tensor.

    Raises:
        InputError: The rule is `fltrust`, and `trusted` is missing.
    """

    def __init__(
        self,
        model: GlobalModel,
        policy: AggregationPolicy,
        trusted: Mapping[str, Tensor] | None = None,
    ) -> None:
        if policy.rule == "fltrust" and not trusted:
            raise InputError(
                'rule = "fltrust" compares updates with a change that comes from training on '
                "held-out samples. There is no such change: either it was not given, or the model "
                "cannot be trained on these samples. Use `serve` or `simulate` with `held_out`, or "
                "another rule.",
                code="aggregate.no-trusted-change",
            )
        self.model, self.policy, self._trusted = model, policy, trusted or {}
        self._shapes = shapes_of(model.tensors)
        self._changes = SpooledChanges()
        self._held: list[_Held] = []
        self._received: dict[tuple[str, Table], Mapping[str, Tensor]] = {}
        self._result = Aggregation(model, replace(policy, rule="mean"))
        self._trust = self._scales = np.empty(0)

    @property
    def updates(self) -> int:
        """How many updates were added."""
        return len(self._held)

    def add(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add one update. Raises UpdateError if it does not fit the model."""
        check_update(record, arrays, self.model.tensors)
        self.add_checked(record, arrays)

    def add_checked(self, record: UpdateRecord, arrays: Mapping[str, np.ndarray]) -> None:
        """Add an update that `check_update` has accepted.

        Raises UpdateError if the update's factors differ from the factors that the model keeps.
        """
        spec, tensors = parse_spec(record.submodel), as_tensors(arrays)
        factors = tuple(entry for entry in record.tensors if entry.factor is not None)
        values = self._recovered(spec, tensors, record.tensors, record.classes)
        table, _ = own_rows(record.tensors, tensors, record.classes, self._shapes)
        held = _Held(
            frozenset(values),
            slices_by_tensor(table, self._shapes),
            spec,
            factors,
            record.classes,
            recovering_family(spec).averages_factors and bool(factors),
        )

        def blocks() -> Iterator[tuple[str, np.ndarray]]:
            for name, old in self._received_tensors(held):
                yield name, _spread(values[name].double() - old.double(), held.places.get(name))
            if held.keeps:
                yield from self._factor_changes(held, tensors)

        self._changes.add(blocks())
        self._held.append(held)
        self._result.note_tensors(record)

    def result(self) -> GlobalModel:
        """The next global model. The aggregation cannot be used afterwards.

        Raises UpdateError if there is no update, or a number is too large.
        """
        if not self._held:
            raise no_update()
        among = self._chosen()
        if not among:  # no update is trusted
            self._changes.close()
            return self.model
        self._add_factors(among)
        alone = self._held_by_factors_alone(among)
        for name, old in self._received_means(among).items():
            if name not in alone:
                new = self._new(name, old, among, is_statistic(name))
                self._result.mean.add({name: new}, 1.0)
        self._changes.close()
        return self._result.finished(self._result.moved_factors())

    def disagreeing(self) -> list[int]:
        """The numbers of the updates that point against most others; see `disagreeing`.

        The aggregation cannot be used afterwards.
        """
        out = disagreeing(self._pairs().cosines())
        self._changes.close()
        return out

    def _chosen(self) -> list[int]:
        """The updates that take part: all, or those that Krum keeps or FLTrust trusts."""
        count = len(self._held)
        self._trust = self._scales = np.ones(count)
        match self.policy.rule:
            case "krum":
                return krum_choice(self._pairs().distances())
            case "fltrust":
                alignment = Alignment(count)
                for name, piece in self._parameters():
                    if name in self._trusted:
                        direction = self._trusted[name].flatten()[piece.start : piece.stop]
                        alignment.add(piece.changes, piece.rows, direction.double().numpy())
                self._trust, self._scales = alignment.trust(), alignment.scales()
                return np.flatnonzero(self._trust).tolist()
            case _:
                return [*range(count)]

    def _pairs(self) -> Pairs:
        """All updates, compared by their changes of parameters."""
        pairs = Pairs(len(self._held))
        for _, piece in self._parameters():
            pairs.add(piece.changes, piece.rows)
        return pairs

    def _parameters(self) -> Iterator[tuple[str, Piece]]:
        """Yield the changes of all updates of each parameter, with its name."""
        names = {name for held in self._held for name in held.tensors & self._result.trained}
        for name in sorted(names):
            if not is_statistic(name):
                for piece in self._changes.pieces(name, range(len(self._held))):
                    yield name, piece

    def _add_factors(self, among: list[int]) -> None:
        """Move the factors of each submodel that keeps factors by the rule."""
        for row in among:
            held = self._held[row]
            if held.keeps:
                self._result.group(held.spec.head, recovering_family(held.spec), held.factors)
        for key, group in self._result.factors.items():
            received = self._received[key, group.table]
            for entry in group.table:
                new = self._new(f"{key}|{entry.name}", received[entry.name], among)
                group.mean.add({entry.name: new}, 1.0)

    def _held_by_factors_alone(self, among: list[int]) -> set[str]:
        """The tensors that only factors of one submodel contain.

        For these, the factors move instead.
        """
        if self.policy.factors != "afm":
            return set()
        holders: dict[str, set[str]] = {}
        for row in among:
            held = self._held[row]
            factorized = {entry.stands_for for entry in held.factors if held.keeps}
            for name in held.tensors:
                holders.setdefault(name, set()).add(held.spec.head if name in factorized else "")
        return {name for name, own in holders.items() if len(own) == 1 and "" not in own}

    def _received_means(self, among: list[int]) -> dict[str, Tensor]:
        """The mean of each tensor as devices received it; the old value if no device did."""
        means = Mean()
        for row in among:
            held = self._held[row]
            for name, old in self._received_tensors(held):
                means.add({name: old}, float(self._trust[row]), held.places)
        return {name: means.take(name, self.model.tensors[name]) for name in [*means.sums]}

    def _new(self, key: str, old: Tensor, among: list[int], statistic: bool = False) -> Tensor:
        """`old` moved by the rule, float32. Elements that no update in `among` holds do not change.

        Krum and FLTrust compare only parameters, so they may keep an update with wrong statistics.
        Therefore they take the median of statistics.
        """
        compares = self.policy.rule in ("krum", "fltrust")
        rule = "median" if statistic and compares else self.policy.rule
        new = old.detach().double().numpy().ravel().copy()
        for piece in self._changes.pieces(key, among):
            match rule:
                case "trimmed":
                    change = trimmed_mean(piece.changes)
                case "median":
                    change = trimmed_mean(piece.changes, share=0.5)
                case _:
                    scaled = piece.changes * self._scales[piece.rows, None]
                    change = mean(scaled, self._trust[piece.rows])
            new[piece.start : piece.stop] += np.nan_to_num(change, nan=0.0)
        return torch.from_numpy(new.reshape(old.shape).astype(np.float32))

    def _factor_changes(
        self, held: _Held, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the change of each factor, NaN in rows of classes that the device does not have."""
        received = self._received_factors(held.spec, held.factors)
        rows = row_places(held.factors, held.classes)
        for entry in held.factors:
            change = tensors[entry.name].double() - received[entry.name].double()
            part = rows.get(entry.name)
            own = change if part is None else change[part.index]
            yield f"{held.spec.head}|{entry.name}", _spread(own, part)

    def _received_tensors(self, held: _Held) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of an update as its device received it."""
        received = self._received_factors(held.spec, held.factors)
        composed = self._recovered(held.spec, received, held.factors, held.classes)
        for name in sorted(held.tensors):
            part, whole = held.places.get(name), self.model.tensors[name]
            yield name, composed.get(name, whole if part is None else whole[part.index])

    def _received_factors(self, spec: Spec, factors: Table) -> Mapping[str, Tensor]:
        """The factors that devices received; made once for all updates of a submodel."""
        if not factors:
            return {}
        key = spec.head, factors
        if key not in self._received:
            received = recovering_family(spec).received(spec.head, factors, self.model)
            check_factors(spec.head, factors, received)
            self._received[key] = received
        return self._received[key]

    def _recovered(
        self,
        spec: Spec,
        tensors: Mapping[str, Tensor],
        table: Table,
        classes: tuple[int, ...] | None,
    ) -> dict[str, Tensor]:
        """The parts of global tensors that `tensors` make, without rows of other classes."""
        own, left = own_rows(table, tensors, classes, self._shapes)
        recovered = recovering_family(spec).recover(left, own, slice_shapes(own, self._shapes))
        return {n: v.dense() if isinstance(v, Product) else v for n, v in recovered.items()}


def new_aggregation(
    model: GlobalModel, policy: AggregationPolicy, trusted: Mapping[str, Tensor] | None = None
) -> Aggregation | RuleAggregation:
    """The aggregation of one round that `policy.rule` needs; see `RuleAggregation`."""
    if policy.rule == "mean":
        return Aggregation(model, policy)
    return RuleAggregation(model, policy, trusted)


def limit_statistics(
    aggregation: Aggregation | RuleAggregation, limits: RoundLimits | None
) -> None:
    """Limit the statistics of a round's updates, if there are `limits` and the rule is the mean.

    The other rules do not follow extreme statistics.
    """
    if limits is not None and isinstance(aggregation, Aggregation):
        aggregation.limit_statistics(limits)


def _spread(change: Tensor, part: TensorSlice | None) -> np.ndarray:
    """`change` in the shape of the whole tensor, NaN outside its part."""
    if part is None:
        return change.detach().numpy()
    whole = torch.full(part.whole_shape, float("nan"), dtype=change.dtype)
    whole[part.index] = change
    return whole.numpy()
