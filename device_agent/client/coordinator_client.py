"""The agent's side of protocol.py: every request, every way it can fail, and waiting for better.

ClientError            cannot be reached within `patience_s`, or is no coordinator
  AuthorisationError it does not accept the token or the device's secret (401, 403)
RefusedError         an UpdateError: it answers and says no, with the reason
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, LocationValueError

from device_agent.client.addresses import check_secret, check_url
from device_agent.client.client_errors import (
    PreparingError,
    UnreachableError,
    permanent,
    reason,
    unanswered,
)
from device_agent.client.replies import (
    RefusedError,
    check_words,
    not_a_coordinator,
    read_reply,
    refuse,
)
from device_agent.formats.atomic_files import naming
from device_agent.formats.protocol import (
    API,
    Fallback,
    FileOffer,
    JoinReply,
    JoinRequest,
    Progress,
    Receipt,
    Status,
    SubmodelFailure,
    Work,
)
from profiles.errors import AuthorisationError, ClientError
from profiles.json_decoding import MalformedError, decode_json

log = logging.getLogger(__name__)
T = TypeVar("T")
CONNECT_S = 10.0
READ_S = 60.0
TIMEOUT = urllib3.Timeout(connect=CONNECT_S, read=READ_S)
PROGRESS_S = 5.0
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
TELL_S = 3600.0
PIECE = 1 << 18


class CoordinatorClient:
    """Requests to the coordinator at `url`, made with `secret` (a join token or a device's secret).

    While it cannot be reached, a request logs that and tries again after 1, 2, 4, ...
    60 s, for `patience_s` seconds in all; then it raises ClientError. Waits of 60 s are reported
    every hour. A coordinator that still prepares is asked as often as it says, and by a join for
    as long as that takes. `alive` is called as the bytes of a file come and go. Raises InputError
    for a URL or a secret that cannot be one.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        patience_s: float = float("inf"),
        sleep: Callable[[float], None] = time.sleep,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = check_url(url)
        self.join_unanswered = False
        self._alive = alive
        self._patience_s, self._sleep = patience_s, sleep
        self._pool = urllib3.PoolManager(
            headers={
                "Authorization": f"Bearer {check_secret(secret)}",
                "User-Agent": "edgetailor-agent",
            },
            retries=False,
        )

    def join(self, request: Callable[[], JoinRequest]) -> JoinReply:
        """Enrol with a request that is made, and signed, for each attempt.

        Not repeated once sent: whoever asked should know. Asking again with the same key is safe;
        `join_unanswered` says whether the coordinator may know that key after an error.
        """

        def attempt() -> JoinReply:
            self.join_unanswered = True
            try:
                body = msgspec.json.encode(request())
                return check_words(self._ask("POST", "/devices", JoinReply, body), self.url)
            except (AuthorisationError, RefusedError):
                self.join_unanswered = False
                raise
            except UnreachableError as trouble:
                self.join_unanswered = trouble.sent
                raise

        return self._persist(attempt, repeat=False)

    def leave(self) -> None:
        """Give up this device's place. An AuthorisationError: it has none any more."""
        self._persist(lambda: self._send("POST", "/leave").release_conn())

    def report(self, failure: SubmodelFailure) -> Fallback:
        """Tell that this device cannot train its submodel."""
        body = msgspec.json.encode(failure)
        return self._persist(lambda: self._ask("POST", "/problems", Fallback, body))

    def work(self) -> Work:
        """What to do now."""
        return self._persist(lambda: self._ask("GET", "/work", Work))

    def peek(self) -> Work | None:
        """What to do now, asked once: None where no answer comes, which training must not mind."""
        try:
            return self._ask("GET", "/work", Work, timeout=PROGRESS_S)
        except (UnreachableError, RefusedError, ClientError):
            return None  # as with progress

    def status(self) -> Status:
        """The whole fleet."""
        return self._persist(lambda: self._ask("GET", "/status", Status))

    def progress(self, progress: Progress) -> None:
        """Say what this device is doing; tried once, for training must not wait for it."""
        try:
            body = msgspec.json.encode(progress)
            self._send("POST", "/progress", body, timeout=PROGRESS_S).release_conn()
        except (UnreachableError, RefusedError, ClientError):
            return  # the next request that matters meets the same trouble and tells of it

    def download(self, offer: FileOffer, to: Path) -> None:
        """Fetch the offered file to the path `to`, which exists only once it is whole and right.

        Raises ClientError where size or SHA-256 are not as offered.
        """
        self._persist(lambda: self._download(offer, to))

    def send_tensors(self, round_: int, path: Path) -> None:
        """Send update.safetensors, streamed from the disk. Raises RefusedError."""
        self._persist(lambda: self._upload(f"/rounds/{round_}/tensors", path))

    def send_update(self, round_: int, record: bytes) -> Receipt:
        """Send update.json, after its tensors. Raises RefusedError."""
        return self._persist(lambda: self._ask("POST", f"/rounds/{round_}/update", Receipt, record))

    def _persist(self, attempt: Callable[[], T], repeat: bool = True) -> T:
        """Do `attempt`, again and again while the coordinator is not there."""
        wait, waited, told = FIRST_WAIT_S, 0.0, 0.0
        while True:
            try:
                return self._once_ready(attempt, self._patience_s if repeat else float("inf"))
            except UnreachableError as trouble:
                problem = f"Coordinator at {self.url} {trouble}"
                if trouble.sent and not repeat:
                    raise ClientError(
                        f"{problem} after the request was sent, so it may have been carried out; "
                        "try again: the same device comes of it."
                    ) from None
                if waited + wait > self._patience_s:
                    raise ClientError(
                        f"{problem}; gave up after {waited:.0f} s. Check the URL, and that "
                        "`edgetailor serve` runs there."
                    ) from None
            if wait < LONGEST_WAIT_S or waited - told >= TELL_S:
                log.info("%s; next try in %.0f s", problem, wait)
                told = waited
            self._sleep(wait)
            waited, wait = waited + wait, min(2 * wait, LONGEST_WAIT_S)

    def _once_ready(self, attempt: Callable[[], T], patience_s: float) -> T:
        """Do `attempt`, again while the coordinator prepares, which undoes nothing."""
        waited = 0.0
        while True:
            try:
                return attempt()
            except PreparingError as trouble:
                problem = f"Coordinator at {self.url} {trouble}"
                if waited + trouble.retry_s > patience_s:
                    raise ClientError(f"{problem}: try again in a few minutes.") from None
                if not waited:
                    log.info("%s; asking every %.0f s until it is ready", problem, trouble.retry_s)
                self._sleep(trouble.retry_s)
                waited += trouble.retry_s

    def _ask(
        self,
        method: str,
        path: str,
        reply: type[T],
        body: bytes | None = None,
        timeout: urllib3.Timeout | float = TIMEOUT,
    ) -> T:
        response = self._send(method, path, body, timeout=timeout)
        try:
            return decode_json(read_reply(response, self.url), reply)
        except MalformedError as error:
            raise not_a_coordinator(self.url, f"{method} {path}: {error}") from None

    def _upload(self, path: str, source: Path) -> None:
        with source.open("rb") as file:
            size = source.stat().st_size
            self._send("PUT", path, self._pieces(file), size=size).release_conn()

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(PIECE):
            self._alive()
            yield piece

    def _download(self, offer: FileOffer, to: Path) -> None:
        response = self._send("GET", f"/files/{offer.sha256}")
        to.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=to.parent, prefix=".part-")
        try:
            with naming(to), os.fdopen(handle, "wb") as file:
                self._receive(response, offer, file.write)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, to)
        finally:
            Path(part).unlink(missing_ok=True)
            response.close()

    def _receive(
        self,
        response: urllib3.BaseHTTPResponse,
        offer: FileOffer,
        write: Callable[[bytes], object],
    ) -> None:
        size, digest = 0, hashlib.sha256()
        try:
            for piece in response.stream(PIECE):
                size += len(piece)
                if size > offer.size:
                    break
                digest.update(piece)
                write(piece)
                self._alive()
        except HTTPError as error:
            raise UnreachableError(f"is not there ({reason(error)})", sent=True) from None
        if size != offer.size or digest.hexdigest() != offer.sha256:
            raise ClientError(
                f"{offer.name} from {self.url} is not what was offered: {offer.size} bytes with "
                f"SHA-256 {offer.sha256[:12]} were, {size} with {digest.hexdigest()[:12]} came. "
                "Something between this device and the coordinator alters files (a proxy?)."
            )

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        *,
        size: int | None = None,
        timeout: urllib3.Timeout | float = TIMEOUT,
    ) -> urllib3.BaseHTTPResponse:
        """One request; its answer is a success, with the body still to be read.

        `size` (bytes) goes with a body that comes in pieces.
        """
        headers = {"Content-Type": "application/json"}
        if size is not None:
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        try:
            response = self._pool.request(
                method,
                f"{self.url}{API}{path}",
                body=body,
                headers={**self._pool.headers, **headers},
                timeout=timeout,
                preload_content=False,
                redirect=False,
            )
        except (HTTPError, LocationValueError) as error:
            if permanent(error):
                raise ClientError(f"Coordinator at {self.url}: {reason(error)}.") from None
            raise UnreachableError(
                f"is not there ({reason(error)})", sent=not unanswered(error)
            ) from None
        if response.status >= 300:
            refuse(response, self.url, f"{method} {path}")
        return response
