"""Which connections are closed when there are too many: those that say nothing, and the oldest.

An address that has many gives way first. The connections of devices, whose secret was accepted,
stay as long as there are others. Behind a proxy all have one address: then only what they say
decides.
"""

import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from toolkit.coordinator.minute_log import MinuteLog

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""Idle connections live longer than agents wait between two requests, so that none is closed just
when it is used again."""
SHORTEST_KEEP_ALIVE_S = 5.0
MOST_BUSY = 16
"""Requests of one device at a time, each on a connection of its own."""
CLOSED = "Closed {more} connections, because there are too many."


class Rank(IntEnum):
    """What a connection does, in the order in which it may be closed."""

    SILENT = 0
    """It waits for a request, and brought none with valid credentials last."""
    STRANGER = 1
    """It is answered without credentials."""
    IDLE = 2
    """It waits for a device's next request."""
    BUSY = 3
    """It is answered, and its credentials are valid."""


class Held(Protocol):
    """A connection that may be closed."""

    def drop(self) -> None:
        """Close it at once."""


class _Address:
    """The connections of one address, by rank; the oldest of each rank is the first."""

    def __init__(self) -> None:
        self.by_rank: tuple[dict[Held, None], ...] = tuple({} for _ in Rank)

    @property
    def used(self) -> int:
        """How many of all connections these are, as OpenConnections counts."""
        return sum(map(len, self.by_rank)) + len(self.by_rank[Rank.BUSY])


@dataclass(frozen=True)
class _Place:
    """Where a connection is listed: its address, its rank, and the device that it is busy for."""

    address: str
    rank: Rank
    device: str | None = None


class OpenConnections:
    """All connections.

    Attributes:
        most: How many there may be. One that answers a device counts twice, for the file that it
            may have open.
        closed: How many were closed since the start because there were too many.
    """

    def __init__(self, log: MinuteLog, most: Callable[[], int]) -> None:
        self._log, self.most = log, most
        self._addresses: dict[str, _Address] = {}
        self._places: dict[Held, _Place] = {}
        self._busy: dict[str, dict[Held, None]] = {}
        self._files = 0
        self.closed = 0

    @property
    def keep_alive_s(self) -> float:
        """How long a connection may wait for its next request: shorter as the limit comes near."""
        free = 1 - self._used / self.most()
        return max(min(2 * free, 1) * KEEP_ALIVE_S, SHORTEST_KEEP_ALIVE_S)

    @property
    def _used(self) -> int:
        return len(self._places) + self._files

    def add(self, connection: Held, address: str) -> None:
        """Take the new connection `one`. If there are too many, close some, perhaps this one."""
        network = network_of(address)
        while self._used >= self.most():
            victim = self._victim(network)
            self._close(victim or connection, network)
            if victim is None:
                return
        self._put(connection, _Place(network, Rank.SILENT))

    def rank(self, connection: Held, rank: Rank, device: str | None = None) -> None:
        """Note what `one` does now, and for which device it is busy."""
        held = self._places.get(connection)
        if held is None or (held.rank, held.device) == (rank, device):
            return
        self.remove(connection)
        self._put(connection, _Place(held.address, rank, device))
        if device is not None and len(self._busy[device]) > MOST_BUSY:
            self._close(next(iter(self._busy[device])), held.address)
        while self._used > self.most() and connection in self._places:
            self._close(self._victim(held.address) or connection, held.address)

    def remove(self, connection: Held) -> None:
        """Forget a connection that has ended. Repeating it changes nothing."""
        held = self._places.pop(connection, None)
        if held is None:
            return
        self._files -= held.rank is Rank.BUSY
        address = self._addresses[held.address]
        del address.by_rank[held.rank][connection]
        if not address.used:
            del self._addresses[held.address]
        if held.device is not None:
            del self._busy[held.device][connection]
            if not self._busy[held.device]:
                del self._busy[held.device]

    def _put(self, connection: Held, held: _Place) -> None:
        self._places[connection] = held
        self._files += held.rank is Rank.BUSY
        self._addresses.setdefault(held.address, _Address()).by_rank[held.rank][connection] = None
        if held.device is not None:
            self._busy.setdefault(held.device, {})[connection] = None

    def _victim(self, newcomer: str) -> Held | None:
        """The connection to close for one of the address `newcomer`; None: rather the new one."""
        for rank in Rank:
            having = [name for name, entry in self._addresses.items() if entry.by_rank[rank]]
            if not having:
                continue
            network = max(having, key=lambda name: self._addresses[name].used)
            address = self._addresses[network]
            # A request of a device is cut off only where one address has most of all connections.
            if rank is Rank.BUSY and (network == newcomer or 2 * address.used <= self.most()):
                return None
            return next(iter(address.by_rank[rank]))
        return None

    def _close(self, connection: Held, network: str) -> None:
        """Close `one`; `network` is its address if it is not listed yet."""
        self.closed += 1
        if self._log.begins("", CLOSED):
            held = self._places.get(connection)
            logger.warning(
                "There are too many connections for %s open files: closed one from %s. If these "
                "are your devices, raise the limit of open files (`ulimit -n`, or LimitNOFILE of "
                "the service).",
                f"{self.most():,}",
                network if held is None else held.address,
            )
        self.remove(connection)
        connection.drop()


def network_of(address: str) -> str:
    """What counts as one address: in IPv6, where everybody has many, the network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
