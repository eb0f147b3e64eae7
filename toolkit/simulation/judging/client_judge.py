"""The judge of a simulated round's model; see `toolkit/aggregation/model_judge.py`.

The judge aggregates a round several times, so the updates of a round are kept in files.
"""

import logging
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from device_agent.formats.protocol.fleet import Limited
from profiles.errors import EdgeTailorError
from toolkit.aggregation.committee import DISAGREES
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.influence import influences, mean_gradient
from toolkit.aggregation.limits.reference import Reference, RoundLimits
from toolkit.aggregation.model_judge import (
    Verdict,
    counted_samples,
    judge_updates,
    judged_text,
    suspects,
    with_part,
)
from toolkit.aggregation.recover import Received
from toolkit.evaluation_sums import Evaluation
from toolkit.simulation.judging.update_files import UpdateFiles

logger = logging.getLogger(__name__)


@dataclass
class ClientJudge:
    """Aggregates the updates of a round, so that no update makes the model clearly worse.

    Attributes:
        federation: The global model.
        before: The model that the clients trained from, as bytes of `Federation.save`.
        held_out: Samples and labels.
        files: The updates of the round.
        reference: The reference for their limits; None for no limits. After `aggregate`, it is the
            reference for the next round.
        limited: What the limits changed in an update, by client.
        left_out: Why an update was left out, by client.
        judges: Whether updates are left out that make the model worse on the held-out samples.
    """

    federation: Federation
    before: bytes
    held_out: tuple[np.ndarray, np.ndarray]
    files: UpdateFiles
    reference: Reference | None
    limited: dict[int, Limited] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    judges: bool = True
    _limits: RoundLimits | None = None
    _weakened: frozenset[int] = frozenset()

    def aggregate(self) -> Evaluation:
        """Make the next global model. Without updates, the model does not change."""
        self._complete_reference()
        whole = self._fold(frozenset())
        new, limits, limited = self.federation.model, self._limits, self.limited
        found = suspects(self._influences()) if self.judges else []
        suspected = [int(client) for client in found]
        if suspected:
            logger.info("Suspected of raising the loss on the held-out samples: %s", suspected)
        verdict = Verdict()
        if suspected:
            self.federation.load(self.before)
            before = self.federation.evaluation(*self.held_out)
            verdict = judge_updates([*map(str, suspected)], before, whole, self._candidate)
        evaluation = whole
        if any(verdict):
            self._weakened = frozenset(_clients(verdict.weakened))
            evaluation = self._fold(_clients(verdict.left_out), self._weakened)
            reason = judged_text(evaluation, whole)
            self.left_out = {int(client): reason for client in verdict.left_out}
        else:
            self.federation.model, self._limits, self.limited = new, limits, limited
        if self._limits is not None:
            self.reference = self._limits.reference.after(self._limits.figures)
        return evaluation

    def without_disagreeing(self, reason: str) -> Evaluation | None:
        """Make the model again without the updates that point against most others.

        These updates are left out because of the votes in `reason`. If there are no such updates,
        returns None, and nothing changes.
        """
        inside = [client for client in self.files.clients if client not in self.left_out]
        new, self.federation.model = self.federation.model, self.federation.saved(self.before)
        updates = (update for client, update in self.files.read() if client in inside)
        out = [inside[number] for number in self.federation.disagreeing(updates)]
        if not out:
            self.federation.model = new
            return None
        if self._limits is not None:
            self.reference = self._limits.reference
        self.left_out |= dict.fromkeys(out, f"{DISAGREES} {reason}")
        logger.warning("Left out the updates that point against the others: %s", out)
        evaluation = self._fold(self.left_out.keys(), self._weakened)
        if self._limits is not None:
            self.reference = self._limits.reference.after(self._limits.figures)
        return evaluation

    def _complete_reference(self) -> None:
        """Take the limits of new kinds from the updates of this round."""
        if self.reference is None:
            return
        own = [
            self.federation.figures(update)
            for _, update in self.files.read()
            if update[0].submodel not in self.reference.kinds
        ]
        self.reference = self.reference.completed(own)

    def _fold(self, out: Set[int], weakened: Set[int] = frozenset()) -> Evaluation:
        """The evaluation of the model without the updates of the clients in `out`.

        Updates of the clients in `weakened` count with a part of their weight.
        """
        self.federation.load(self.before)
        inside = [client for client in self.files.clients if client not in out]
        limits = None if self.reference is None else RoundLimits(self.reference)
        self.limited, parts = {}, dict[int, tuple[int, int]]()

        def updates() -> Iterator[Received]:
            for client, (record, arrays) in self.files.read():
                if client in weakened:
                    known = self.reference
                    most = None if known is None else known.most_samples(record.submodel)
                    part = counted_samples(record.samples, most)
                    parts[client] = record.samples, part
                    record = structs.replace(record, samples=part)
                if client not in out:
                    yield record, arrays

        if inside:
            self.federation.fold_checked(updates(), limits)
        if limits is not None:
            pairs = zip(inside, limits.limited, strict=True)
            self.limited = {client: limited for client, limited in pairs if limited is not None}
        for client, part in parts.items():
            self.limited[client] = with_part(self.limited.get(client), *part)
        self._limits = limits
        return self.federation.evaluation(*self.held_out)

    def _candidate(self, out: Set[str], weakened: Set[str]) -> Evaluation | None:
        try:
            return self._fold(_clients(out), _clients(weakened))
        except EdgeTailorError:
            return None

    def _influences(self) -> dict[str, float]:
        """How much each update raises the loss. Restores the model before the round."""
        after = self.federation.gradient(*self.held_out)
        self.federation.load(self.before)
        gradient = mean_gradient(self.federation.gradient(*self.held_out), after)
        return influences(
            {
                str(client): self.federation.influence(update, gradient, self.reference)
                for client, update in self.files.read()
            }
        )


def _clients(keys: Iterable[str]) -> set[int]:
    return {int(key) for key in keys}
