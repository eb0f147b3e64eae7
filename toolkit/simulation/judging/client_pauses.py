"""Clients that the judge pauses, as `serve` pauses devices. No operator resumes them."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from device_agent.formats.protocol.fleet import Limited
from toolkit.aggregation.pause_rule import LAST, Harm, add_round


class ClientPauses:
    """The last rounds of each client, and the rounds in which its update did harm."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=LAST))
        self._harm: dict[str, Harm] = {}

    def after(
        self,
        round_: int,
        present: Iterable[int],
        left_out: Mapping[str, str] | None,
        limited: Mapping[str, Limited] | None,
    ) -> list[int]:
        """Note a finished round, and return the clients that the judge pauses after it.

        Args:
            round_: The number of the round. Rounds come in their order.
            present: The clients of the round.
            left_out: Why updates were left out, by the client's number.
            limited: What the limits changed in updates, by the client's number.
        """
        add_round(self._harm, round_, left_out or {}, limited or {})
        paused = []
        for client in present:
            self._sent[client].append(round_)
            harm = self._harm.get(str(client), Harm())
            if harm.to_pause_for(self._sent[client]):
                paused.append(client)
        return paused
