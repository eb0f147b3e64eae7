"""The rounds of a device that has joined: download, train and upload until the last round."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from msgspec import UnsetType

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.client.retries import Outage
from device_agent.federation.default_state import default_state
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_secret import DeviceSecret
from device_agent.federation.identity.trusted_key import TrustedKey
from device_agent.federation.membership import consent
from device_agent.federation.offered_files import manifest_of
from device_agent.federation.owner_pauses import Pauses
from device_agent.federation.polling import ROUND_CHECK_S, Polling, jittered
from device_agent.federation.releases.release_fine_tuning import ReleaseFineTuning
from device_agent.federation.releases.releases import Releases
from device_agent.federation.round_log import NOT_KEPT, kept_log
from device_agent.federation.run_options import RunOptions
from device_agent.federation.secure_sending import SecureSending
from device_agent.federation.skipped_round import SkippedRound
from device_agent.federation.spent_privacy import add_spent, check_still_private
from device_agent.federation.start_checks import check_start
from device_agent.federation.stop_report import BY_OWNER, stop_report, without_folders
from device_agent.federation.training_attempts import (
    MAX_FAILURES,
    Attempts,
    TrainingFailedError,
    nothing_sent,
    wait_after,
)
from device_agent.formats.evaluation_counts import Judgement
from device_agent.formats.input_summary import far_off
from device_agent.formats.protocol.rounds import Progress, Work
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.update import RECORD, TENSORS, decode_record
from device_agent.inference.release_trial import TrialResult, try_release
from device_agent.log_format import fields
from device_agent.runtime.runtime_packages import unverified
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from device_agent.system.interval_timer import IntervalTimer
from device_agent.training.bundle_training import judge_bundle, train_bundle
from device_agent.training.memory_limits import Usage
from profiles.errors import LimitError, TrustError, UpdateError
from profiles.text_formatting import counted, have_joined, in_a_row, one_line

log = logging.getLogger(__name__)
LONGEST_NOTE = 300
"""The most characters of a coordinator's note that are logged."""
CLOSED = "Round %d closed before this device had finished: its training is dropped."

Trainer = Callable[..., object]
"""A function that is called like `train_bundle`; tests pass their own."""
TryRelease = Callable[..., TrialResult]
"""A function that is called like `try_release`; tests pass their own."""


def run(
    options: RunOptions,
    *,
    train: Trainer = train_bundle,
    judge: Callable[..., Judgement | None] = judge_bundle,
    try_release: TryRelease = try_release,
    patience_s: float = float("inf"),
    sleep: Callable[[float], None] = time.sleep,
    alive: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Take part in every round until the coordinator says that the last round is over.

    The agent waits while the coordinator cannot be reached, pauses when the owner's limits require
    it, and repeats a training that failed. After three failures in a row it asks for a smaller
    submodel.

    Args:
        options: Data, state folder, training options and the owner's limits.
        train: Trains a bundle, as `train_bundle` does.
        judge: Evaluates a bundle, as `judge_bundle` does.
        try_release: Compares a release with the present model, as `try_release` does.
        patience_s: How long each request waits if the coordinator cannot be reached, and how long
            the agent waits for work that it can trust, in seconds.
        sleep: Waits for a number of seconds.
        alive: Called whenever work has progressed, and before each wait.
        clock: The device's clock.

    Returns:
        How many updates the coordinator accepted.

    Raises:
        InputError: The device has not joined, this machine cannot enforce a limit, or another agent
            uses the state folder.
        DataError: No bundle could be trained on these data.
        LimitError: The agent alone already uses `max_memory`. Or no update was accepted by the end
            of the last round, and the last training failed for lack of memory.
        UpdateError: No update was accepted by the end of the last round, and the last training
            failed for another reason.
        ClientError: The coordinator cannot be reached for `patience_s`, or does not accept this
            device.
        TrustError: For `patience_s`, all work was too old or not signed by the coordinator, or the
            clock was wrong.
    """
    folder = DeviceState(options.state or default_state())
    identity = folder.member()

    def rest(seconds: float) -> None:
        alive()
        sleep(jittered(seconds))

    client = CoordinatorClient(
        identity.url,
        identity.secret,
        patience_s=patience_s,
        sleep=rest,
        alive=alive,
        certificate=identity.certificate,
    )
    alive()
    # Lock before any request: while another agent uses the folder, this agent must not report.
    with folder.locked(), kept_log(folder.log):
        rounds = _Rounds(
            folder,
            client,
            options,
            _Hooks(train, judge, try_release, rest, alive, clock, patience_s),
        )
        try:
            sent = rounds.all_rounds()
        except BaseException as error:
            if (report := stop_report(error, rounds.current)) is not None:
                # If the owner stops the agent, do not try twice: the owner waits for the end.
                client.stopped(report, again=report.code != BY_OWNER)
            raise
    if not sent and rounds.failed is not None:
        raise nothing_sent(rounds.failed)
    updates = counted(sent, "update")
    log.info("The last round is over; %s sent since this agent started.", updates)
    return sent


class _RoundClosedError(Exception):
    """The round that is being trained has closed."""


@dataclass(frozen=True)
class _Hooks:
    """The functions and values that a caller of `run` may replace."""

    train: Trainer
    judge: Callable[..., Judgement | None]
    try_release: TryRelease
    rest: Callable[[float], None]
    alive: Callable[[], None]
    clock: Clock
    patience_s: float


class _Rounds:
    """The state of one device in its rounds.

    Attributes:
        current: The round that the device works on; 0 while it waits.
        failed: The last training that failed.
    """

    def __init__(
        self,
        folder: DeviceState,
        client: CoordinatorClient,
        options: RunOptions,
        hooks: _Hooks,
    ) -> None:
        self._folder, self._client, self._options, self._hooks = folder, client, options, hooks
        self._pauses = Pauses(options.limits, client.progress, hooks.rest)
        self._secret = DeviceSecret(folder, client)
        self._key = TrustedKey(folder, client, hooks.clock)
        trial = partial(hooks.try_release, options.data, options.training)
        tune = ReleaseFineTuning(
            folder, client, options, hooks.train, self._tell, self._fetch, self._wait_if_paused
        )
        self._releases = Releases(
            folder.releases,
            folder.bundle,
            client,
            self._key.check,
            trial,
            tune if options.fine_tune else None,
            lambda: folder.secure_promise.exists or folder.is_private,
        )
        self._distrust = self._no_distrust()
        self._idle: Usage | None = None
        self._attempts = Attempts(folder.attempts)
        self._skipped = SkippedRound()
        self._told_inputs: str | None = None
        self._told_evaluation = False
        self._progress = Progress(state="waiting")
        self.current, self._round_check = 0, IntervalTimer(ROUND_CHECK_S)
        self.failed: TrainingFailedError | None = None
        self._manifest = ""

    def all_rounds(self) -> int:
        """Take part until the last round is over. Returns how many updates were accepted."""
        _, self._idle = check_start(self._options)
        if (remark := unverified(version("onnxruntime"))) is not None:
            log.info("%s.", remark)
        try:
            self._attempts.check_last()
        except TrainingFailedError as failed:
            self._handle_failure(failed)
        sent, joined, stays, polling = 0, 0, False, Polling(self._hooks.rest)
        note: str | None = None
        while True:
            self._pauses.wait()
            work = self._secret.work()
            # Each number of joined devices is logged once, not at every poll.
            if work.joined != joined and work.expected:
                log.info("Waiting: %s.", have_joined(work.joined, work.expected))
            joined = work.joined
            if work.note != note and work.note:
                log.info("Waiting: %s", one_line(work.note, LONGEST_NOTE))
            note = work.note
            self.current = 0
            if work.state in ("wait", "finished"):
                self._releases.follow(work.release)
            if work.state == "finished":
                if work.ask_again_s <= 0:
                    return sent
                if not stays:
                    log.info("The last round is over; this device stays for releases.")
                stays = True
                polling.wait_for_release(work.ask_again_s)
            elif work.state == "wait" or self._skipped.has(work):
                polling.wait(work.ask_again_s)
            elif self._is_trusted(work):
                if work.state == "judge":
                    self._judge(work)
                else:
                    sent += self._take_part(work)
                polling.restart()

    def _no_distrust(self) -> Outage:
        hooks = self._hooks
        return Outage(
            "The coordinator sends work that can be trusted again", hooks.rest, hooks.patience_s
        )

    def _is_trusted(self, work: Work) -> bool:
        """Whether `work` can be trusted. If not, wait, because network or clock may change."""
        try:
            self._key.check(lambda key: self._folder.check_work(work, key, self._hooks.clock))
            self._folder.secure_promise.check_kept(work)
        except TrustError as error:
            if self._distrust.over_patience:
                raise
            self._tell(Progress(state="paused", note=str(error)))
            self._distrust.wait(str(error).rstrip("."))
            return False
        self._distrust.over()
        self._distrust = self._no_distrust()
        return True

    def _take_part(self, work: Work) -> bool:
        """Download, train and send. Returns whether the update was accepted."""
        about, self.current = fields(round=work.round), work.round
        self._manifest = manifest_of(work.files)
        try:
            self._tell(Progress(state="downloading"))
            bundle = self._folder.collect(work.files, self._fetch)
            if not self._protects_samples(work):
                return False
            # After a restart the update may already exist. Then it only has to be sent.
            if self._folder.trained(bundle) is None:
                self._train(work)
            self._compare_inputs(work)
            self._pauses.wait()
            if not self._send(work):
                return False
        except TrainingFailedError as failed:
            self._handle_failure(failed)
            return False
        except RefusedError as refusal:
            if not refusal.round_over:
                raise
            text = "Round %d continued without this device. %s"
            log.info(text, work.round, refusal, extra=about)
            return False
        except _RoundClosedError:
            log.info(CLOSED, work.round, extra=about)
            return False
        except TrustError as error:  # the coordinator broke a rule of secure sums
            log.warning("Round %d: %s", work.round, error, extra=about)
            self._tell(Progress(state="paused", note=str(error)))
            return False
        log.info("Round %d: the update was accepted.", work.round, extra=about)
        return True

    def _protects_samples(self, work: Work) -> bool:
        """Whether the bundle protects samples as earlier ones did. If not, skip the round."""
        try:
            check_still_private(self._folder.privacy, self._folder.sample_privacy())
        except TrustError as error:
            log.warning("Round %d: %s", work.round, error, extra=fields(round=work.round))
            self._tell(Progress(state="paused", note=str(error)))
            self._skipped.skip(work.round, self._manifest)
            return False
        return True

    def _judge(self, work: Work) -> None:
        """Evaluate the new model of a round, and send the counts. Skip it if that fails."""
        self.current, self._manifest = work.round, manifest_of(work.files)
        log.info("Evaluating the new model of round %d", work.round)
        try:
            self._tell(Progress(state="downloading"))
            self._folder.collect(work.files, self._fetch)
            if not self._protects_samples(work):
                return
            self._tell(Progress(state="evaluating"))
            judgement = self._hooks.judge(
                self._folder.bundle,
                self._options.data,
                self._folder.update,
                replace(
                    self._options.training, evaluation=self._options.evaluation(work.evaluation)
                ),
                on_batch=self._wait_if_paused,
                idle=self._idle,
            )
            if judgement is not None:
                self._client.send_judgement(work.round, judgement)
                return
        except (LimitError, UpdateError) as error:
            if isinstance(error, RefusedError) and not error.round_over:
                raise
            log.warning("The new model of round %d was not evaluated: %s", work.round, error)
        self._skipped.skip(work.round, self._manifest)

    def _wait_if_paused(self) -> None:
        self._hooks.alive()
        self._pauses.between_batches(self._progress)

    def _fetch(self, offer: FileOffer, to: Path) -> None:
        log.info("Fetching %s (%d bytes)", offer.name, offer.size, extra=NOT_KEPT)
        self._client.download(offer, to)

    def _compare_inputs(self, work: Work) -> None:
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

    def _train(self, work: Work) -> None:
        round_ = work.round
        log.info("Round %d: training", round_, extra=fields(round=round_))
        self._say_what_is_kept_apart(work)
        self._tell(Progress(state="training"))
        self._round_check = IntervalTimer(ROUND_CHECK_S)
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
                on_batch=self._on_batch,
                profiled=True,
                summarized=work.inputs is not None,
                idle=self._idle,
                form_checks=self._folder.form_checks,
            )

    def _say_what_is_kept_apart(self, work: Work) -> None:
        """Tell the owner once that the federation is judged by its devices."""
        if work.evaluation is not None and not self._told_evaluation:
            self._told_evaluation = True
            log.info("Evaluation: %s", consent(work.evaluation))

    def _on_batch(self) -> None:
        self._wait_if_paused()
        if self._round_check.due() and self._round_has_closed():
            raise _RoundClosedError

    def _round_has_closed(self) -> bool:
        """Ask whether an update of the current round would be too late. False without an answer."""
        work = self._client.peek()
        # A coordinator in an earlier round was restarted and has not reopened this round yet.
        if work is None or work.round < self.current:
            return False
        return work.round > self.current or work.state != "train"

    def _on_epoch(self, epoch: int, epochs: int, loss: float) -> None:
        # With secure sums or private samples, nobody learns the loss of a single device.
        secret = self._folder.secure_promise.exists or self._folder.sample_privacy() is not None
        self._tell(Progress(state="training", loss=None if secret else loss))

    def _send(self, work: Work) -> bool:
        """Send the update. Returns False if a secure sum was completed without it."""
        round_ = work.round
        log.info("Sending the update of round %d", round_, extra=fields(round=round_))
        self._tell(Progress(state="uploading"))
        if work.secure is not None:
            seed = self._options.training.seed
            sending = SecureSending(self._folder, self._client, self._key, self._hooks.rest, seed)
            return sending.add(work)
        self._client.send_tensors(round_, self._folder.update / TENSORS)
        self._client.send_update(round_, (self._folder.update / RECORD).read_bytes())
        return True

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        self._client.progress(progress)

    def _handle_failure(self, failed: TrainingFailedError) -> None:
        """Wait before the next attempt, or ask for a smaller submodel and skip the round."""
        self.failed, failure = failed, failed.failure
        often = "" if failed.final else f" {in_a_row(failure.failures)}"
        about = fields(round=failed.round, submodel=failure.submodel)
        log.warning("Training %s failed%s: %s", failure.submodel, often, failed, extra=about)
        if failure.failures < MAX_FAILURES and not failed.final:
            wait = wait_after(failure.failures)
            log.info("Trying again in %.0f s.", wait)
            self._hooks.rest(wait)
            return
        told = replace(failure, reason=without_folders(failure.reason))
        fallback = self._client.report(told)
        self._attempts.forget()
        self._skipped.skip(failed.round, self._manifest)
        then = "There is no smaller submodel for this device; trying again in the next round."
        if fallback.submodel not in (None, failure.submodel):
            then = f"From round {fallback.round} on this device trains {fallback.submodel}."
            # The coordinator reopened this round for the smaller submodel.
            if fallback.round == failed.round:
                self._skipped.forget()
        log.info("Told the coordinator. %s", then)
