"""The limits of a simulated round's updates; see `toolkit/aggregation/update_limits.py`.

Workers limit the updates of kinds that earlier rounds had. Updates of a new kind need the figures
of the whole round, so workers return them, and they are limited here.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from safetensors.numpy import load_file, save_file

from device_agent.formats.manifest import encode
from device_agent.formats.protocol.fleet import Limited
from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.rule_aggregation import RuleAggregation
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.update_limits import figures, limited_update


class ClientLimits:
    """The limits of one simulated round.

    Attributes:
        reference: The reference for the updates of this round.
        limited: What was limited of an update, by client.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.limited: dict[int, Limited] = {}
        self._figures: list[Figures] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._waiting: list[int] = []

    def note(self, own: list[Figures], limited: Mapping[int, Limited]) -> None:
        """Add what a worker found."""
        self._figures += own
        self.limited |= limited

    def keep(self, client: int, update: Received) -> None:
        """Keep an update of a new kind in a file until all clients have trained."""
        record, arrays = update
        self._folder = self._folder or tempfile.TemporaryDirectory()
        path = self._path(client)
        path.with_suffix(".json").write_bytes(encode(record))
        save_file(dict(arrays), path)
        self._waiting.append(client)

    def add_waiting(self, aggregation: Aggregation | RuleAggregation) -> None:
        """Add the updates that were kept to `aggregation`, within their limits."""
        model, policy = aggregation.model, aggregation.policy
        own = [figures(update, model, policy) for _, update in self._kept()]
        limits = RoundLimits(self.reference.completed(own))
        for client, update in self._kept():
            aggregation.add(*limited_update(update, limits, model, policy))
            if (limited := limits.limited[-1]) is not None:
                self.limited[client] = limited
        self._figures += limits.figures
        self.reference = limits.reference
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._waiting = None, []

    def next_reference(self) -> Reference:
        """The reference for the next round."""
        return self.reference.after(self._figures)

    def _kept(self) -> Iterator[tuple[int, Received]]:
        for client in sorted(self._waiting):
            path = self._path(client)
            record = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=UpdateRecord)
            yield client, (record, load_file(path))

    def _path(self, client: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{client}.safetensors"
