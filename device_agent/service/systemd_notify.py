"""Notifications to systemd (sd_notify): ready, alive, status. Plain Python, without libsystemd."""

import os
import socket
import time

SIGNALS_PER_TIMEOUT = 4
"""How many watchdog messages are sent within the watchdog's timeout."""


class Notifier:
    """Sends messages to the service manager at NOTIFY_SOCKET.

    Does nothing if NOTIFY_SOCKET is not set.
    """

    def __init__(self) -> None:
        # An address that starts with @ is in the abstract namespace: @ stands for a null byte.
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._pause_s = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6 / SIGNALS_PER_TIMEOUT
        self._last: float | None = None

    def alive(self) -> None:
        """Report that work has progressed. The first call reports that the service is ready."""
        now = time.monotonic()
        if self._last is None:
            self._send("READY=1")
        elif not self._pause_s or now - self._last < self._pause_s:
            return
        self._last = now
        self._send("WATCHDOG=1")

    def status(self, line: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(f"STATUS={' '.join(line.split())}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            try:
                out.connect(self._address)
                out.sendall(message.encode())
            except OSError:
                return  # the service manager has closed the socket
