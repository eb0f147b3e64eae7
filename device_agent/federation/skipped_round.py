"""The round that a device skips because its training has failed permanently."""

import time

from device_agent.federation.offered_files import manifest_of
from device_agent.formats.protocol.rounds import Work

SKIP_ROUND_S = 3600.0
"""Seconds until a skipped round is tried again: it may wait for this device alone."""


class SkippedRound:
    """Remembers the last round that was skipped, until the agent restarts."""

    def __init__(self) -> None:
        self._round: tuple[int, str] | None = None
        self._since = 0.0

    def skip(self, round_: int, manifest: str) -> None:
        """Skip the round while it offers this manifest. An unknown manifest is an empty text."""
        self._round, self._since = (round_, manifest), time.monotonic()

    def forget(self) -> None:
        """Do not skip any round."""
        self._round = None

    def has(self, work: Work) -> bool:
        """Whether the round of `work` is skipped. A round may reopen with another model."""
        if self._round is None:
            return False
        round_, manifest = self._round
        same = round_ == work.round and manifest in ("", manifest_of(work.files))
        return same and time.monotonic() < self._since + SKIP_ROUND_S
