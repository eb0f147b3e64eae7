"""A device that has joined: round after round until there are no more."""

import time
from collections.abc import Callable
from pathlib import Path

from device_agent.device_state import DeviceState
from device_agent.link import Link, RefusedError
from device_agent.protocol import FileOffer, Progress, Work
from device_agent.training import train_bundle
from device_agent.update import RECORD, TENSORS
from device_agent.wording import counted

Say = Callable[[str], None]
FIRST_POLL_S = 0.25
LONGEST_POLL_S = 2.0


def run(
    state: Path,
    data: str,
    say: Say,
    *,
    threads: int = 0,
    seed: int = 0,
    patience_s: float = float("inf"),
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Train every round on `data` (see data.py) until the coordinator says it was the last.

    Returns how many updates were taken. A coordinator that is away is waited for, `patience_s`
    seconds at a time. Raises InputError before joining, and the errors of Link and training.
    """
    folder = DeviceState(state)
    identity = folder.member()
    link = Link(identity.url, identity.secret, say, patience_s=patience_s, sleep=sleep)
    member = _Member(folder, link, data, say, threads, seed)
    sent, poll = 0, FIRST_POLL_S
    while (work := link.work()).state != "finished":
        if work.state == "train":
            sent += member.take_part(work)
            poll = FIRST_POLL_S
        else:
            sleep(poll)
            poll = min(2 * poll, LONGEST_POLL_S)
    say(f"The last round is over; {counted(sent, 'update')} sent since this agent started.")
    return sent


class _Member:
    """What one device needs to take part in a round."""

    def __init__(
        self, folder: DeviceState, link: Link, data: str, say: Say, threads: int, seed: int
    ) -> None:
        self._folder, self._link, self._data, self._say = folder, link, data, say
        self._threads, self._seed = threads, seed

    def take_part(self, work: Work) -> bool:
        """Fetch, train and send; False where the round went on without this device."""
        try:
            self._link.progress(Progress(state="downloading"))
            bundle = self._folder.collect(work.files, self._fetch)
            if self._folder.trained(bundle) is None:
                self._train(work.round)
            self._send(work.round)
        except RefusedError as refusal:
            if not refusal.round_over:
                raise
            self._say(f"Round {work.round} went on without this device: {refusal}")
            return False
        self._say(f"Round {work.round}: the update was taken.")
        return True

    def _fetch(self, offer: FileOffer, to: Path) -> None:
        self._say(f"Fetching {offer.name} ({offer.size} bytes)")
        self._link.download(offer, to)

    def _train(self, round_: int) -> None:
        self._say(f"Round {round_}: training")
        self._link.progress(Progress(state="training"))
        train_bundle(
            self._folder.bundle,
            self._data,
            self._folder.update,
            threads=self._threads,
            seed=self._seed * 100003 + round_,
            personal=self._folder.personal(),
            keep=self._folder.keep_personal,
            say=self._say,
            on_epoch=self._on_epoch,
            profiled=True,
        )

    def _on_epoch(self, epoch: int, epochs: int, loss: float) -> None:
        self._say(f"  epoch {epoch} of {epochs}: loss {loss:.4f}")
        self._link.progress(Progress(state="training", loss=loss))

    def _send(self, round_: int) -> None:
        self._link.progress(Progress(state="uploading"))
        self._link.send_tensors(round_, self._folder.update / TENSORS)
        self._link.send_update(round_, (self._folder.update / RECORD).read_bytes())
