"""What a device does in one round: it downloads, trains and sends, or evaluates the new model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import UnsetType

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.trusted_key import TrustedKey
from device_agent.federation.membership import consent
from device_agent.federation.owner_pauses import Pauses
from device_agent.federation.polling import ROUND_CHECK_S
from device_agent.federation.round_log import NOT_KEPT
from device_agent.federation.run_options import RunOptions
from device_agent.federation.secure_sending import SecureSending
from device_agent.federation.spent_privacy import add_spent
from device_agent.federation.training_attempts import Attempts
from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.input_summary import far_off
from device_agent.formats.protocol.rounds import Progress, Work
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.update import RECORD, TENSORS, decode_record
from device_agent.inference.release_trial import TrialResult
from device_agent.log_format import fields
from device_agent.system.clock import Clock
from device_agent.system.interval_timer import IntervalTimer
from device_agent.training.memory_limits import Usage

log = logging.getLogger(__name__)
Trainer = Callable[..., object]
"""A function that is called like `train_bundle`; tests pass their own."""
TryRelease = Callable[..., TrialResult]
"""A function that is called like `try_release`; tests pass their own."""


class RoundClosedError(Exception):
    """The round that is being trained has closed."""


@dataclass(frozen=True)
class Hooks:
    """The functions and values that a caller of `run` may replace."""

    train: Trainer
    judge: Callable[..., Judgement | None]
    try_release: TryRelease
    rest: Callable[[float], None]
    alive: Callable[[], None]
    clock: Clock
    patience_s: float


class RoundSteps:
    """The steps of one round.

    Args:
        folder: The device's state.
        client: The coordinator.
        options: Data and training options.
        hooks: Train and evaluate.
        key: The coordinator's key.
        pauses: The owner's pauses.
        attempts: Records each training.

    Attributes:
        idle: The memory of this process before its first training.
    """

    def __init__(
        self,
        folder: DeviceState,
        client: CoordinatorClient,
        options: RunOptions,
        hooks: Hooks,
        key: TrustedKey,
        pauses: Pauses,
        attempts: Attempts,
    ) -> None:
        self._folder, self._client, self._options, self._hooks = folder, client, options, hooks
        self._key, self._pauses, self._attempts = key, pauses, attempts
        self._progress = Progress(state="waiting")
        self._told_inputs: str | None = None
        self._told_evaluation = False
        self.idle: Usage | None = None

    def download(self, work: Work) -> str:
        """Download the bundle of `work`. Returns the SHA-256 of its manifest."""
        self.tell(Progress(state="downloading"))
        return self._folder.collect(work.files, self.fetch)

    def train(self, work: Work) -> None:
        """Train the bundle, and store the update in the state folder.

        Raises:
            TrainingFailedError: The training failed. The failure is recorded.
            RoundClosedError: The round has closed meanwhile.
        """
        round_ = work.round
        log.info("Round %d: training", round_, extra=fields(round=round_))
        self._say_what_is_kept_apart(work)
        self.tell(Progress(state="training"))
        options = self._options.for_round(work, self._folder.secure_promise.masked_updates(round_))
        with self._attempts.attempt(self._folder.submodel(), round_):
            self._hooks.train(
                self._folder.bundle,
                self._options.data,
                self._folder.update,
                options=options,
                personal=self._folder.personal(),
                keep=self._folder.keep_personal,
                spend=partial(add_spent, self._folder.privacy),
                on_epoch=self._on_epoch,
                on_batch=partial(self._on_batch, round_, IntervalTimer(ROUND_CHECK_S)),
                profiled=True,
                summarized=work.inputs is not None,
                idle=self.idle,
                form_checks=self._folder.form_checks,
            )

    def _say_what_is_kept_apart(self, work: Work) -> None:
        """Tell the owner once that the federation is judged by its devices."""
        if work.evaluation is not None and not self._told_evaluation:
            self._told_evaluation = True
            log.info("Evaluation: %s", consent(work.evaluation))

    def _on_batch(self, round_: int, check: IntervalTimer) -> None:
        self.wait_if_paused()
        if check.due() and self._has_closed(round_):
            raise RoundClosedError

    def _has_closed(self, round_: int) -> bool:
        """Ask whether an update of `round_` would be too late. False without an answer."""
        work = self._client.peek()
        # A coordinator in an earlier round was restarted and has not reopened this round yet.
        if work is None or work.round < round_:
            return False
        return work.round > round_ or work.state != "train"

    def _on_epoch(self, epoch: int, epochs: int, loss: float) -> None:
        # With secure sums or private samples, nobody learns the loss of a single device.
        secret = self._folder.secure_promise.exists or self._folder.sample_privacy() is not None
        self.tell(Progress(state="training", loss=None if secret else loss))

    def compare_inputs(self, work: Work) -> None:
        """Warn the owner once if the inputs differ much from those of the coordinator's samples."""
        own = decode_record((self._folder.update / RECORD).read_bytes(), RECORD).inputs
        if work.inputs is None or isinstance(own, UnsetType):
            return
        difference = far_off(own, work.inputs)
        if difference is not None and difference != self._told_inputs:
            log.warning(
                "The inputs of this device differ much from the federation's: %s. Check the unit "
                "of the sensor, or how the data are prepared.",
                difference,
            )
        self._told_inputs = difference

    def send(self, work: Work) -> bool:
        """Send the update. Returns False if a secure sum was completed without it."""
        round_ = work.round
        log.info("Sending the update of round %d", round_, extra=fields(round=round_))
        self.tell(Progress(state="uploading"))
        if work.secure is not None:
            seed = self._options.training.seed
            sending = SecureSending(self._folder, self._client, self._key, self._hooks.rest, seed)
            return sending.add(work)
        self._client.send_tensors(round_, self._folder.update / TENSORS)
        self._client.send_update(round_, (self._folder.update / RECORD).read_bytes())
        return True

    def judge(self, work: Work) -> bool:
        """Evaluate the new model of a round, and send the counts.

        Returns False if there is nothing to send.
        """
        self.tell(Progress(state="evaluating"))
        judgement = self._hooks.judge(
            self._folder.bundle,
            self._options.data,
            self._folder.update,
            replace(self._options.training, evaluation=self._options.evaluation(work.evaluation)),
            on_batch=self.wait_if_paused,
            idle=self.idle,
        )
        if judgement is None:
            return False
        self._client.send_judgement(work.round, judgement)
        return True

    def tell(self, progress: Progress) -> None:
        """Tell the coordinator the progress. After a pause it is told again."""
        self._progress = progress
        self._client.progress(progress)

    def wait_if_paused(self) -> None:
        """Wait while the owner's limits require a pause. Call it between batches."""
        self._hooks.alive()
        self._pauses.between_batches(self._progress)

    def fetch(self, offer: FileOffer, to: Path) -> None:
        """Download an offered file."""
        log.info("Fetching %s (%d bytes)", offer.name, offer.size, extra=NOT_KEPT)
        self._client.download(offer, to)
