"""The agent's requests to the coordinator (see `formats/protocol/`).

ClientError             The coordinator cannot be reached, or is another program.
  AuthorisationError    The coordinator does not accept the token or the device's secret (401, 403).
RefusedError            The coordinator refused the request, with a reason. This is an UpdateError.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from device_agent.client.client_errors import UnreachableError
from device_agent.client.replies import RefusedError, check_words
from device_agent.client.request_sender import RequestSender
from device_agent.client.transfers import Download, UploadOfFile
from device_agent.formats.manifest import encode
from device_agent.formats.protocol.fleet import Status
from device_agent.formats.protocol.joining import Invitation, JoinReply, JoinRequest, NewSecret
from device_agent.formats.protocol.key_changes import KeyChange, KeyChanges
from device_agent.formats.protocol.problems import KEY_CHANGES, SKEWED_CLOCK, USED_JOIN
from device_agent.formats.protocol.rounds import (
    Fallback,
    Progress,
    Receipt,
    Stopped,
    SubmodelFailure,
    Work,
)
from device_agent.formats.protocol.secure_sums import SUM_ROUTES, SecureMessage, SecureStep
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from profiles.errors import AuthorisationError, ClientError

if TYPE_CHECKING:
    from device_agent.formats.evaluation_counts import Judgement
    from device_agent.formats.protocol.releases import ReleaseReport

log = logging.getLogger(__name__)
PROGRESS_TIMEOUT_S = 5.0
"""Timeout of requests during a training, which must not wait long for them."""
STOPPED_AGAIN_S = 1.0
"""Wait before the device reports a second time that it stops."""


class CoordinatorClient(RequestSender):
    """Makes requests to a coordinator. `RequestSender` sends and repeats them.

    Args:
        url: The coordinator's URL.
        secret: A join token or a device's secret.
        patience_s: How long a request is repeated before ClientError is raised, in seconds. If the
            coordinator is still starting, a join waits without a limit.
        sleep: Waits for a number of seconds.
        alive: Called whenever a piece of a file has been sent or received.
        certificate: SHA-256 of the coordinator's certificate, in hexadecimal digits. Without it,
            the certificate must be signed by an authority that this device trusts.
        clock: The device's clock.

    Attributes:
        url: The coordinator's URL, without a slash at its end.
        join_unanswered: Whether a failed join may have reached the coordinator, which then may have
            enrolled the device.

    Raises:
        InputError: The URL or the secret is malformed.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        patience_s: float = float("inf"),
        sleep: Callable[[float], None] = time.sleep,
        alive: Callable[[], None] = lambda: None,
        certificate: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(
            url, secret, patience_s=patience_s, sleep=sleep, certificate=certificate, clock=clock
        )
        self.join_unanswered = False
        self._alive = alive

    def join(self, request: Callable[[], JoinRequest]) -> JoinReply:
        """Enrol this device.

        A join that may have reached the coordinator is not repeated: the error is raised, and the
        user decides. Joining again with the same key is safe.

        Args:
            request: Makes and signs the request. It is called for each attempt, because the
                signature contains the time.
        """

        def attempt() -> JoinReply:
            # Stays True if the process is interrupted between sending and the answer.
            self.join_unanswered = True
            try:
                body = msgspec.json.encode(request())
                return check_words(self._ask("POST", "/devices", JoinReply, body), self.url)
            except RefusedError:
                self.join_unanswered = False
                raise
            except AuthorisationError as refusal:
                self.join_unanswered = False
                if refusal.code == SKEWED_CLOCK:
                    problem = f"refuses this device's clock, {self._clock}"
                    raise UnreachableError(
                        problem, sent=False, error=refusal, lasting=True, clock=True
                    ) from None
                if refusal.code == USED_JOIN:  # another join in the same second
                    problem = "has already accepted this request"
                    raise UnreachableError(problem, sent=False, error=refusal) from None
                raise
            except UnreachableError as failure:
                self.join_unanswered = failure.sent
                raise

        return self._with_retries(attempt, repeat=False)

    def invitation(self) -> Invitation | None:
        """Ask for the description of the federation. Returns None if there is no answer.

        Coordinators of earlier versions cannot answer this request.
        """
        try:
            return self._ask("GET", "/invitation", Invitation, timeout=PROGRESS_TIMEOUT_S)
        except (UnreachableError, RefusedError, ClientError):
            return None

    def key_changes(self) -> list[KeyChange]:
        """Ask once for the changes of the coordinator's key.

        The list is empty if there is no answer. Coordinators of earlier versions cannot answer this
        request.
        """
        try:
            asked = self._ask("GET", KEY_CHANGES, KeyChanges, timeout=PROGRESS_TIMEOUT_S)
        except (UnreachableError, RefusedError, ClientError):
            return []
        return asked.changes

    def renew_secret(self, new: NewSecret) -> None:
        """Replace this device's secret: the old secret is then void. Call `use_secret` afterwards.

        Raises:
            RefusedError: Nobody has asked for a new secret, or `new` cannot be used.
            AuthorisationError: The old secret is void already.
        """
        body = msgspec.json.encode(new)
        self._with_retries(lambda: self._order("POST", "/secret", body))

    def leave(self) -> None:
        """Give up this device's place.

        Raises:
            AuthorisationError: The device is no longer a member.
        """
        self._with_retries(lambda: self._order("POST", "/leave"))

    def report(self, failure: SubmodelFailure) -> Fallback:
        """Report that this device cannot train its submodel. Returns the submodel to train."""
        body = msgspec.json.encode(failure)
        return self._with_retries(lambda: self._ask("POST", "/problems", Fallback, body))

    def work(self) -> Work:
        """Ask what to do now."""
        return self._with_retries(lambda: self._ask("GET", "/work", Work))

    def peek(self) -> Work | None:
        """Ask once what to do now. Returns None if there is no answer: training must not wait."""
        try:
            return self._ask("GET", "/work", Work, timeout=PROGRESS_TIMEOUT_S)
        except (UnreachableError, RefusedError, ClientError):
            return None

    def status(self) -> Status:
        """Ask for the status of the fleet."""
        return self._with_retries(lambda: self._ask("GET", "/status", Status))

    def progress(self, progress: Progress) -> None:
        """Report progress. The request is not repeated, because training must not wait."""
        try:
            body = msgspec.json.encode(progress)
            self._order("POST", "/progress", body, timeout=PROGRESS_TIMEOUT_S)
        except (UnreachableError, RefusedError, ClientError):
            return  # the next request that must succeed reports the same problem

    def stopped(self, stopped: Stopped, *, again: bool) -> None:
        """Report that this device stops. If `again`, a failed report is repeated once."""
        body = msgspec.json.encode(stopped)
        for wait in (0.0, STOPPED_AGAIN_S) if again else (0.0,):
            self._sleep(wait)
            with suppress(UnreachableError, RefusedError, ClientError):
                self._order("POST", "/stopped", body, timeout=PROGRESS_TIMEOUT_S)
                return

    def report_release(self, report: "ReleaseReport") -> bool:
        """Report what was done with a release. The request is not repeated.

        Returns:
            False if the coordinator did not answer, so that the report should be sent again.
        """
        body = msgspec.json.encode(report)
        try:
            path = f"/releases/{report.number}"
            self._order("POST", path, body, timeout=PROGRESS_TIMEOUT_S)
        except RefusedError as refusal:
            log.info(
                "The coordinator did not take the report about release %d. %s",
                report.number,
                refusal,
            )
        except (UnreachableError, ClientError):
            return False
        return True

    def download(self, offer: FileOffer, to: Path, patience_s: float | None = None) -> None:
        """Download a file. `to` appears only when the file is complete and correct.

        Args:
            offer: Name, size and SHA-256 of the file.
            to: Where to write it. Missing folders are created.
            patience_s: How long the download is tried without progress, in seconds (default: the
                `patience_s` of this client).

        Raises:
            ClientError: Size or SHA-256 differ from the offer.
        """
        download = Download(self._send, self.url, offer, to, self._alive)
        self._with_retries(download.attempt, done=lambda: download.done, patience_s=patience_s)

    def send_tensors(self, round_: int, path: Path) -> None:
        """Upload update.safetensors, streamed from the disk.

        Raises:
            RefusedError: The coordinator does not accept the file.
        """
        upload = UploadOfFile(
            self._order, self._ask, f"/rounds/{round_}/tensors", path, self._alive
        )
        self._with_retries(upload.attempt, done=lambda: upload.done)

    def send_update(self, round_: int, record: bytes) -> Receipt:
        """Upload update.json. Its tensors must have been sent before.

        Raises:
            RefusedError: The coordinator does not take the update.
        """
        return self._with_retries(
            lambda: self._ask("POST", f"/rounds/{round_}/update", Receipt, record)
        )

    def secure_step(self, round_: int) -> SecureStep:
        """Ask what this device does next in the secure sum of `round_`."""
        return self._with_retries(lambda: self._ask("GET", f"/rounds/{round_}/sum", SecureStep))

    def send_to_sum(self, round_: int, message: SecureMessage) -> None:
        """Send this device's answer to a step of the secure sum of `round_`.

        Raises:
            RefusedError: The coordinator does not take it.
        """
        path = f"/rounds/{round_}/sum/{SUM_ROUTES[type(message)]}"
        body = msgspec.json.encode(message)
        self._with_retries(lambda: self._order("POST", path, body))

    def send_judgement(self, round_: int, judgement: "Judgement") -> Receipt:
        """Send this device's evaluation of the final model, which the last round `round_` produced.

        Raises:
            RefusedError: The coordinator does not take the judgement.
        """
        body = encode(judgement)
        return self._with_retries(
            lambda: self._ask("POST", f"/rounds/{round_}/evaluation", Receipt, body)
        )
