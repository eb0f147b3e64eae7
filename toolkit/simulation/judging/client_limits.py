"""The limits of a simulated round's updates; see `toolkit/aggregation/limits/update_limits.py`.

Workers limit the updates of kinds that earlier rounds had. The limits of a new kind need the
figures of the whole round. So workers return updates of new kinds, and this module limits them.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.limits.update_limits import figures, limited_update
from toolkit.aggregation.rules.rule_aggregation import RuleAggregation, limit_statistics
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.simulation.judging.update_files import UpdateFiles


class ClientLimits:
    """The limits of one simulated round.

    Attributes:
        reference: The reference for the updates of this round.
        limited: What the limits changed in an update, by client; known after `limit_statistics`.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.limited: dict[int, Limited] = {}
        self._figures: dict[int, Figures] = {}
        self._streamed: dict[int, Limited] = {}
        self._waiting: UpdateFiles | None = None

    def note(self, own: Mapping[int, Figures], limited: Mapping[int, Limited]) -> None:
        """Add the figures and limited updates of a worker, by client."""
        self._figures |= own
        self._streamed |= limited

    def weaken(self, clients: Iterable[int], share: float) -> None:
        """Count only this share of the changes of stale updates; see `Figures.share`."""
        for client in self._figures.keys() & set(clients):
            self._figures[client] = replace(self._figures[client], share=share)

    def keep(self, client: int, update: Received) -> None:
        """Keep a checked update of a new kind in a file until all clients have trained."""
        self._waiting = self._waiting or UpdateFiles()
        self._waiting.add(client, update)

    def add_waiting(self, aggregation: Aggregation | RuleAggregation) -> None:
        """Add the updates that were kept to `aggregation`, within their limits."""
        if self._waiting is None:
            return
        model, policy = aggregation.model, aggregation.policy
        own = [figures(update, model, policy) for _, update in self._waiting.read()]
        limits = RoundLimits(self.reference.completed(own))
        for client, update in self._waiting.read():
            aggregation.add_checked(*limited_update(update, limits, model, policy))
            self._figures[client] = limits.figures[-1]
            if (limited := limits.limited[-1]) is not None:
                self._streamed[client] = limited
        self.reference = limits.reference
        self._waiting.remove()
        self._waiting = None

    def limit_statistics(self, aggregation: Aggregation | RuleAggregation) -> None:
        """Limit the statistics of all updates of `aggregation`."""
        inside = sorted(self._figures)
        limits = RoundLimits(
            self.reference,
            [self._figures[client] for client in inside],
            [self._streamed.get(client) for client in inside],
        )
        limit_statistics(aggregation, limits)
        pairs = zip(inside, limits.limited, strict=True)
        self.limited = {client: own for client, own in pairs if own is not None}

    def next_reference(self) -> Reference:
        """The reference for the next round."""
        return self.reference.after([*self._figures.values()])
