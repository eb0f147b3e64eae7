"""Telling systemd that the service is up, alive and at what (sd_notify), in plain Python."""

import os
import socket
import time

WATCHDOGS = 4
"""How many signs of life go out in the time that the watchdog allows."""


class Notifier:
    """Signs of life for the service manager named by NOTIFY_SOCKET; does nothing without one."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        self._pause_s = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6 / WATCHDOGS
        self._last: float | None = None

    def alive(self) -> None:
        """Work goes on. The first call says that the service is ready."""
        now = time.monotonic()
        if self._last is None:
            self._send("READY=1")
        elif not self._pause_s or now - self._last < self._pause_s:
            return
        self._last = now
        self._send("WATCHDOG=1")

    def status(self, line: str) -> None:
        """What `systemctl status` shows."""
        self._send(f"STATUS={' '.join(line.split())}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            try:
                out.connect(self._address)
                out.sendall(message.encode())
            except OSError:
                return  # without a listener there is nobody to tell
