"""A device that has joined: round after round until there are no more."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.federation.device_state import DeviceState
from device_agent.federation.owner_limits import OwnerLimits
from device_agent.federation.pauses import Pauses
from device_agent.federation.training_attempts import ENOUGH, Attempts, FailedError, wait_after
from device_agent.formats.protocol import FileOffer, Progress, Work
from device_agent.formats.update import RECORD, TENSORS
from device_agent.log_format import fields
from device_agent.system.interval_timer import IntervalTimer
from device_agent.training.bundle_training import train_bundle
from device_agent.training.local_data import check_source
from device_agent.training.memory_limits import Usage, ceilings, check_idle
from profiles.text_formatting import counted, have_joined, in_a_row

log = logging.getLogger(__name__)
FIRST_POLL_S = 0.25
LONGEST_POLL_S = 2.0
JITTER = 0.2
"""By which share waiting is drawn longer or shorter, so that a fleet does not ask all at once."""
GIVEN_UP_S = 3600.0
ASK_S = 60.0
"""How often a training asks whether its round is still open, in seconds."""
CLOSED = "Round %d closed before this device was done: its training is dropped."
NO_LIMITS = OwnerLimits()


def run(
    state: Path,
    data: str,
    *,
    threads: int = 0,
    seed: int = 0,
    validation: float = 0.0,
    max_memory: int | None = None,
    limits: OwnerLimits = NO_LIMITS,
    patience_s: float = float("inf"),
    sleep: Callable[[float], None] = time.sleep,
    alive: Callable[[], None] = lambda: None,
) -> int:
    """Train every round on `data` (see data.py) until the coordinator says it was the last.

    Returns how many updates were taken. A coordinator that is away is waited for, `patience_s`
    seconds at a time; `limits` pause it. A training that fails is tried again, until a smaller
    submodel is asked for. `alive` is called whenever work has gone on, and while waiting.
    `max_memory` is in bytes; `validation` see `train_bundle`.

    Raises InputError before joining, for limits that cannot be kept and where another agent is at
    work on `state`, LimitError for a `max_memory` that is taken already, and the errors of
    CoordinatorClient and of data that cannot be trained on, where no bundle could be at once.
    """
    folder = DeviceState(state)
    identity = folder.member()
    check_source(data)
    idle = Usage.now()
    check_idle(ceilings(max_memory, idle))

    def rest(seconds: float) -> None:
        alive()
        sleep(seconds * random.uniform(1 - JITTER, 1 + JITTER))

    link = CoordinatorClient(
        identity.url, identity.secret, patience_s=patience_s, sleep=rest, alive=alive
    )
    how = Training(data, threads, seed, validation, max_memory, idle)
    member = _Member(folder, link, how, Pauses(limits, link.progress, rest), rest, alive)
    alive()
    with folder.held():
        sent = member.all_rounds()
    updates = counted(sent, "update")
    log.info("The last round is over; %s sent since this agent started.", updates)
    return sent


@dataclass(frozen=True)
class Training:
    """What every round trains on and how: see `train_bundle`."""

    data: str
    threads: int
    seed: int
    validation: float
    max_memory: int | None
    idle: Usage


class _ClosedError(Exception):
    """The round that is being trained has closed."""


class _Member:
    """One device in its rounds; `rest` waits, `alive` is called in between."""

    def __init__(
        self,
        folder: DeviceState,
        link: CoordinatorClient,
        how: Training,
        pauses: Pauses,
        rest: Callable[[float], None],
        alive: Callable[[], None],
    ) -> None:
        self._folder, self._link, self._how, self._pauses = folder, link, how, pauses
        self._rest, self._alive = rest, alive
        self._attempts = Attempts(folder.attempts)
        self._given_up: int | None = None
        self._given_up_at = 0.0
        self._doing = Progress(state="waiting")
        self._round, self._ask = 0, IntervalTimer(ASK_S)

    def all_rounds(self) -> int:
        """Take part until the last round is over; returns how many updates were taken."""
        try:
            self._attempts.check_last()
        except FailedError as failed:
            self._cope(failed)
        sent, poll, joined = 0, FIRST_POLL_S, 0
        while True:
            self._pauses.wait()
            work = self._link.work()
            if work.joined != joined and work.expected:
                log.info("Waiting: %s.", have_joined(work.joined, work.expected))
            joined = work.joined
            if work.state == "finished":
                return sent
            if work.state == "train" and not self._gave_up(work.round):
                sent += self._take_part(work)
                poll = FIRST_POLL_S
            else:
                self._rest(poll)
                poll = min(2 * poll, LONGEST_POLL_S)

    def _take_part(self, work: Work) -> bool:
        """Fetch, train and send; False where the round went on without this device."""
        try:
            self._tell(Progress(state="downloading"))
            bundle = self._folder.collect(work.files, self._fetch)
            if self._folder.trained(bundle) is None:
                self._train(work.round)
            self._pauses.wait()
            self._send(work.round)
        except FailedError as failed:
            self._cope(failed)
            return False
        except RefusedError as refusal:
            if not refusal.round_over:
                raise
            text = "Round %d went on without this device. %s"
            log.info(text, work.round, refusal, extra=fields(round=work.round))
            return False
        except _ClosedError:
            log.info(CLOSED, work.round, extra=fields(round=work.round))
            return False
        log.info("Round %d: the update was taken.", work.round, extra=fields(round=work.round))
        return True

    def _fetch(self, offer: FileOffer, to: Path) -> None:
        log.info("Fetching %s (%d bytes)", offer.name, offer.size)
        self._link.download(offer, to)

    def _train(self, round_: int) -> None:
        log.info("Round %d: training", round_, extra=fields(round=round_))
        self._tell(Progress(state="training"))
        self._round, self._ask = round_, IntervalTimer(ASK_S)
        with self._attempts.attempt(self._folder.submodel(), round_):
            train_bundle(
                self._folder.bundle,
                self._how.data,
                self._folder.update,
                threads=self._how.threads,
                seed=self._how.seed * 100003 + round_,
                validation=self._how.validation,
                max_memory=self._how.max_memory,
                idle=self._how.idle,
                personal=self._folder.personal(),
                keep=self._folder.keep_personal,
                on_epoch=self._on_epoch,
                on_batch=self._on_batch,
                profiled=True,
            )

    def _on_batch(self) -> None:
        self._alive()
        self._pauses.between_batches(self._doing)
        if self._ask.due() and self._has_closed():
            raise _ClosedError

    def _has_closed(self) -> bool:
        """Whether an update of the round in training would come too late, as far as is known."""
        work = self._link.peek()
        if work is None or work.round < self._round:  # away, or started again and not open yet
            return False
        return work.round > self._round or work.state != "train"

    def _on_epoch(self, epoch: int, epochs: int, loss: float) -> None:
        self._tell(Progress(state="training", loss=loss))

    def _send(self, round_: int) -> None:
        self._tell(Progress(state="uploading"))
        self._link.send_tensors(round_, self._folder.update / TENSORS)
        self._link.send_update(round_, (self._folder.update / RECORD).read_bytes())

    def _tell(self, progress: Progress) -> None:
        self._doing = progress
        self._link.progress(progress)

    def _gave_up(self, round_: int) -> bool:
        """Whether this device lets the round go; not for ever, as no other may be in it."""
        return round_ == self._given_up and time.monotonic() < self._given_up_at + GIVEN_UP_S

    def _cope(self, failed: FailedError) -> None:
        """Wait before the next attempt, or ask for a smaller submodel and let the round go."""
        failure = failed.failure
        often = "" if failed.final else f" {in_a_row(failure.failures)}"
        about = fields(round=failed.round, submodel=failure.submodel)
        log.warning("Training %s failed%s: %s", failure.submodel, often, failed, extra=about)
        if failure.failures < ENOUGH and not failed.final:
            wait = wait_after(failure.failures)
            log.info("Trying again in %.0f s.", wait)
            self._rest(wait)
            return
        fallback = self._link.report(failure)
        self._attempts.forget()
        self._given_up, self._given_up_at = failed.round, time.monotonic()
        then = "It has no smaller submodel for this device; trying again in the next round."
        if fallback.submodel not in (None, failure.submodel):
            then = f"From round {fallback.round} on this device trains {fallback.submodel}."
            if fallback.round == failed.round:  # it opens anew
                self._given_up = None
        log.info("Told the coordinator. %s", then)
