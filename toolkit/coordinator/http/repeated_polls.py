"""Answers a poll (a request for work) that repeats an earlier one, without parsing it.

A device sends the same bytes in each poll. If these bytes come while the connection waits for a
request, they are the same request, which is answered without a parser and a route. Other requests
take the usual way, for example the first poll and a poll with a wrong secret.
"""

from toolkit.coordinator.coordinator import Coordinator
from toolkit.coordinator.database.device_registry import hashed

LONGEST = 1024
"""The most bytes of a remembered request. One request of each member is remembered."""
_BEARER = b"bearer "
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class RepeatedPolls:
    """Remembers the bytes of each member's last poll."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._secrets: dict[bytes, str] = {}
        self._by_device: dict[str, bytes] = {}

    def learn(self, request: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Remember `request`, the bytes of a whole poll, if `headers` have a member's secret."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(request) > LONGEST or len(given) != 1 or not given[0].lower().startswith(_BEARER):
            return
        secret = hashed(given[0][len(_BEARER) :].decode("latin-1"))
        device = self._coordinator.store.registry.device_with_hash(secret)
        if device is None or device.has_left:
            return
        if len(self._by_device) > 2 * len(self._coordinator.rounds.devices):
            # Most remembered polls belong to devices that have left. Members will send theirs
            # again.
            self._secrets.clear()
            self._by_device.clear()
        self._secrets.pop(self._by_device.pop(device.id, b""), None)
        self._secrets[request], self._by_device[device.id] = secret, request

    def answer(self, request: bytes) -> bytes | None:
        """The whole answer to `request`; None if the request has to be parsed as usual."""
        secret = self._secrets.get(request)
        if secret is None:
            return None
        device = self._coordinator.store.registry.device_with_hash(secret)
        if device is None or device.has_left:
            return None
        body = self._coordinator.work_at_once(device)
        if body is None:
            return None
        self._coordinator.note_seen(device)
        return _HEAD % len(body) + body
