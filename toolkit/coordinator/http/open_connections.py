"""Chooses which connections are closed when there are too many.

Connections without a request are closed first, connections of devices with a valid secret last (see
Rank). Among connections of equal rank, the address with the most connections loses its oldest one.
Behind a proxy all connections have one address, so only rank and age decide.
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
"""How long an idle connection stays open, in seconds. Agents wait less between two requests, so
that no connection is closed just when it is used again."""
SHORTEST_KEEP_ALIVE_S = 5.0
MOST_BUSY = 16
"""The most requests of one device at a time, each on its own connection."""
CLOSED = "Closed {more} connections, because there are too many."


class Rank(IntEnum):
    """What a connection does. Connections with a lower rank are closed first."""

    SILENT = 0
    """It waits for a request, and its last request was not a device's."""
    STRANGER = 1
    """It has a request whose credentials are not known to be valid."""
    IDLE = 2
    """It waits for a device's next request."""
    BUSY = 3
    """It has a request with valid credentials."""


class Held(Protocol):
    """The interface of a connection that the server may close if too many are open."""

    def drop(self) -> None:
        """Close the connection at once."""


class _Address:
    """The connections of one address, by rank; the oldest of each rank is the first."""

    def __init__(self) -> None:
        self.by_rank: tuple[dict[Held, None], ...] = tuple({} for _ in Rank)

    @property
    def used(self) -> int:
        """The number of connections of this address; busy connections count twice."""
        return sum(map(len, self.by_rank)) + len(self.by_rank[Rank.BUSY])


@dataclass(frozen=True)
class _Entry:
    """What is known of a connection: its address, its rank, and the device that it serves."""

    address: str
    rank: Rank
    device: str | None = None


class OpenConnections:
    """All open connections of a server.

    Attributes:
        most: A function that returns how many may be open. A busy connection counts twice, because
            it may have a file open.
        closed: How many connections were closed since the start because too many were open.
    """

    def __init__(self, log: MinuteLog, most: Callable[[], int]) -> None:
        self._log, self.most = log, most
        self._addresses: dict[str, _Address] = {}
        self._entries: dict[Held, _Entry] = {}
        self._busy: dict[str, dict[Held, None]] = {}
        self._files = 0
        self.closed = 0

    @property
    def keep_alive_s(self) -> float:
        """How many seconds a connection may wait for a request; fewer if many are open."""
        free = 1 - self._used / self.most()
        return max(min(2 * free, 1) * KEEP_ALIVE_S, SHORTEST_KEEP_ALIVE_S)

    @property
    def _used(self) -> int:
        return len(self._entries) + self._files

    def add(self, connection: Held, address: str) -> None:
        """Add a new connection. If there are too many, close some, perhaps this one."""
        network = network_of(address)
        while self._used >= self.most():
            victim = self._victim(network)
            self._close(victim or connection, network)
            if victim is None:
                return
        self._put(connection, _Entry(network, Rank.SILENT))

    def rank(self, connection: Held, rank: Rank, device: str | None = None) -> None:
        """Record the new rank of `connection`, and the device for which it is busy."""
        held = self._entries.get(connection)
        if held is None or (held.rank, held.device) == (rank, device):
            return
        self.remove(connection)
        self._put(connection, _Entry(held.address, rank, device))
        if device is not None and len(self._busy[device]) > MOST_BUSY:
            self._close(next(iter(self._busy[device])), held.address)
        while self._used > self.most() and connection in self._entries:
            self._close(self._victim(held.address) or connection, held.address)

    def remove(self, connection: Held) -> None:
        """Forget a connection that has ended. Repeating it changes nothing."""
        held = self._entries.pop(connection, None)
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

    def _put(self, connection: Held, held: _Entry) -> None:
        self._entries[connection] = held
        self._files += held.rank is Rank.BUSY
        self._addresses.setdefault(held.address, _Address()).by_rank[held.rank][connection] = None
        if held.device is not None:
            self._busy.setdefault(held.device, {})[connection] = None

    def _victim(self, newcomer: str) -> Held | None:
        """The connection to close for a new one from `newcomer`; None to close the new one."""
        for rank in Rank:
            having = [name for name, entry in self._addresses.items() if entry.by_rank[rank]]
            if not having:
                continue
            network = max(having, key=lambda name: self._addresses[name].used)
            address = self._addresses[network]
            # A busy connection is closed only if another address has more than half of all
            # connections.
            if rank is Rank.BUSY and (network == newcomer or 2 * address.used <= self.most()):
                return None
            return next(iter(address.by_rank[rank]))
        return None

    def _close(self, connection: Held, network: str) -> None:
        """Close `connection`. `network` is its address if the connection is not listed yet."""
        self.closed += 1
        if self._log.begins("", CLOSED):
            held = self._entries.get(connection)
            logger.warning(
                "There are too many connections for the limit of %s open files: closed one from "
                "%s. If these are your devices, raise the limit of open files (`ulimit -n`, or "
                "LimitNOFILE of the service).",
                f"{self.most():,}",
                network if held is None else held.address,
            )
        self.remove(connection)
        connection.drop()


def network_of(address: str) -> str:
    """Return the 64-bit network of an IPv6 address; an IPv4 address is returned unchanged.

    One sender can use all IPv6 addresses of such a network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
