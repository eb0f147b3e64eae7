"""A Flower strategy that merges the partial aggregates of sites."""

import logging
import time
from collections.abc import Iterable

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from profiles.errors import UpdateError
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.partial_aggregates.partial import decode_partial
from toolkit.aggregation.partial_aggregates.partial_record import RECORD, TENSORS
from toolkit.aggregation.running_aggregation import Aggregation

logger = logging.getLogger(__name__)

TASK, PARTIAL = "edgetailor.task", "edgetailor.partial"
"""The names of the records in a message to a site and in its reply."""
POLL_S = 1.0


class SitesStrategy(Strategy):
    """In every round, sends the global model to all sites and merges their partial aggregates.

    A site that does not answer, or whose partial aggregate is refused, is left out of the round.
    If every site is left out, the global model stays unchanged.

    Args:
        federation: The global model.
        run: The name of this run. Sites need it to distinguish rounds of different runs.
        sites: A round begins only when this many sites are connected.
        timeout: How long a site may take for a round, in seconds.

    Attributes:
        merged: Two numbers for the last round: the sites whose partial aggregates were merged, and
            the updates in these partial aggregates.
    """

    def __init__(self, federation: Federation, run: str, sites: int, timeout: float) -> None:
        self.federation = federation
        self.merged = (0, 0)
        self._run, self._sites, self._timeout = run, sites, timeout

    def columns(self) -> dict[str, float]:
        """Map the names of two columns of the history to the numbers in `merged`."""
        sites, updates = self.merged
        return {"sites": sites, "updates": updates}

    def arrays(self) -> ArrayRecord:
        """The tensors of the global model."""
        tensors = self.federation.model.tensors
        return ArrayRecord({name: Array(value.numpy()) for name, value in tensors.items()})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait until enough sites are connected. Return for each site a message with the model."""
        while len(nodes := sorted(grid.get_node_ids())) < self._sites:
            time.sleep(POLL_S)
        task = ConfigRecord(
            {
                "name": f"{self._run}-{server_round}",
                "round": server_round,
                "model": self.federation.save(),
            }
        )
        return [
            Message(RecordDict({TASK: task}), dst_node_id=node, message_type=MessageType.TRAIN)
            for node in nodes
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the partial aggregates in `replies` into the next global model."""
        federation = self.federation
        whole = Aggregation(federation.model, federation.policy)
        merged, self.merged = 0, (0, 0)
        for reply in replies:
            site = f"site {reply.metadata.src_node_id}"
            if reply.has_error():
                logger.warning("Round %d without %s: %s", server_round, site, reply.error.reason)
                continue
            try:
                files = {name: bytes(reply.content[PARTIAL][name]) for name in (RECORD, TENSORS)}
                part = decode_partial(files, federation.model, federation.policy, origin=site)
                whole.merge(part)
                merged += 1
            except (UpdateError, KeyError, TypeError) as error:
                logger.warning("Round %d without %s: %s", server_round, site, error)
        if not merged:
            return None, None
        self.merged = merged, whole.updates
        federation.take(whole)
        return self.arrays(), MetricRecord({"sites": merged, "updates": self.merged[1]})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no message: sites evaluate on their own."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None: there are no replies to aggregate."""
        return None

    def summary(self) -> None:
        """Log the settings."""
        logger.info("%d sites, %g s a round", self._sites, self._timeout)
