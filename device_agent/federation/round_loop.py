"""A device that has joined asks for work and takes part in rounds, until the last round is over.

The steps of one round are in `round_steps.py`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import RefusedError
from device_agent.client.retries import Outage
from device_agent.federation.default_state import default_state
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.device_secret import DeviceSecret
from device_agent.federation.identity.trusted_key import TrustedKey
from device_agent.federation.offered_files import manifest_of
from device_agent.federation.owner_pauses import Pauses
from device_agent.federation.polling import Polling, jittered
from device_agent.federation.releases.release_fine_tuning import ReleaseFineTuning
from device_agent.federation.releases.releases import Releases
from device_agent.federation.round_log import kept_log
from device_agent.federation.round_steps import (
    Hooks,
    RoundClosedError,
    RoundSteps,
    Trainer,
    TryRelease,
)
from device_agent.federation.run_options import RunOptions
from device_agent.federation.skipped_round import SkippedRound
from device_agent.federation.spent_privacy import check_still_private
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
from device_agent.formats.protocol.rounds import Progress, Work
from device_agent.inference.release_trial import try_release
from device_agent.log_format import fields
from device_agent.runtime.runtime_packages import unverified
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from device_agent.training.bundle_training import judge_bundle, train_bundle
from profiles.errors import LimitError, TrustError, UpdateError
from profiles.text_formatting import counted, have_joined, in_a_row, one_line

log = logging.getLogger(__name__)
LONGEST_NOTE = 300
"""The most characters of a coordinator's note that are logged."""
CLOSED = "Round %d closed before this device had finished: its training is dropped."


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
            Hooks(train, judge, try_release, rest, alive, clock, patience_s),
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
        hooks: Hooks,
    ) -> None:
        self._folder, self._client, self._options, self._hooks = folder, client, options, hooks
        self._pauses = Pauses(options.limits, client.progress, hooks.rest)
        self._secret = DeviceSecret(folder, client)
        self._key = TrustedKey(folder, client, hooks.clock)
        self._attempts = Attempts(folder.attempts)
        self._steps = steps = RoundSteps(
            folder, client, options, hooks, self._key, self._pauses, self._attempts
        )
        trial = partial(hooks.try_release, options.data, options.training)
        tune = ReleaseFineTuning(
            folder, client, options, hooks.train, steps.tell, steps.fetch, steps.wait_if_paused
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
        self._skipped = SkippedRound()
        self.current, self._manifest = 0, ""
        self.failed: TrainingFailedError | None = None

    def all_rounds(self) -> int:
        """Take part until the last round is over. Returns how many updates were accepted."""
        _, self._steps.idle = check_start(self._options)
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
            self._steps.tell(Progress(state="paused", note=str(error)))
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
            bundle = self._steps.download(work)
            if not self._protects_samples(work):
                return False
            # After a restart the update may already exist. Then it only has to be sent.
            if self._folder.trained(bundle) is None:
                self._steps.train(work)
            self._steps.compare_inputs(work)
            self._pauses.wait()
            if not self._steps.send(work):
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
        except RoundClosedError:
            log.info(CLOSED, work.round, extra=about)
            return False
        except TrustError as error:  # the coordinator broke a rule of secure sums
            log.warning("Round %d: %s", work.round, error, extra=about)
            self._steps.tell(Progress(state="paused", note=str(error)))
            return False
        log.info("Round %d: the update was accepted.", work.round, extra=about)
        return True

    def _protects_samples(self, work: Work) -> bool:
        """Whether the bundle protects samples as earlier ones did. If not, skip the round."""
        try:
            check_still_private(self._folder.privacy, self._folder.sample_privacy())
        except TrustError as error:
            log.warning("Round %d: %s", work.round, error, extra=fields(round=work.round))
            self._steps.tell(Progress(state="paused", note=str(error)))
            self._skipped.skip(work.round, self._manifest)
            return False
        return True

    def _judge(self, work: Work) -> None:
        """Evaluate the new model of a round, and send the counts. Skip it if that fails."""
        self.current, self._manifest = work.round, manifest_of(work.files)
        log.info("Evaluating the new model of round %d", work.round)
        try:
            self._steps.download(work)
            if not self._protects_samples(work):
                return
            if self._steps.judge(work):
                return
        except (LimitError, UpdateError) as error:
            if isinstance(error, RefusedError) and not error.round_over:
                raise
            log.warning("The new model of round %d was not evaluated: %s", work.round, error)
        self._skipped.skip(work.round, self._manifest)

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
