"""Sends requests to the coordinator, and repeats them while it does not answer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import urllib3
from urllib3.exceptions import HTTPError

from device_agent.client.addresses import check_secret, check_url
from device_agent.client.client_errors import (
    PreparingError,
    UnreachableError,
    is_lasting,
    is_outside_validity,
    nothing_was_sent,
    reason,
)
from device_agent.client.connections import connections
from device_agent.client.replies import check_not_cut, not_a_coordinator, raise_refusal, read_reply
from device_agent.client.retries import Outage
from device_agent.formats.protocol.problems import API
from device_agent.system.clock import Clock
from profiles.errors import ClientError
from profiles.json_decoding import MalformedError, decode_json

log = logging.getLogger(__name__)
T = TypeVar("T")
TIMEOUT = urllib3.Timeout(connect=10.0, read=60.0)
NO_CONTENT = 204
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RequestSender:
    """Sends requests to a coordinator.

    While the coordinator cannot be reached, or another program answers, a request is repeated after
    1, 2, 4, ... 60 s. A coordinator that is still starting tells when to ask again.

    `CoordinatorClient`, which has the requests, explains the arguments.

    Raises:
        InputError: The URL or the secret is malformed.
    """

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        patience_s: float,
        sleep: Callable[[float], None],
        certificate: str | None,
        clock: Clock,
    ) -> None:
        self.url = check_url(url)
        self._clock, self._patience_s, self._sleep = clock, patience_s, sleep
        # This class repeats requests: it waits longer than urllib3 does, and logs each wait.
        self._pool = connections(
            {
                "Authorization": f"Bearer {check_secret(secret)}",
                "User-Agent": "edgetailor-agent",
            },
            certificate,
        )

    def use_secret(self, secret: str) -> None:
        """Make the next requests with this `secret`."""
        bearer = {"Authorization": f"Bearer {check_secret(secret)}"}
        self._pool.headers = {**self._pool.headers, **bearer}

    def _with_retries(
        self,
        attempt: Callable[[], T],
        repeat: bool = True,
        done: Callable[[], int] = lambda: 0,
        patience_s: float | None = None,
    ) -> T:
        """Repeat `attempt` until the coordinator answers, or for `patience_s` seconds.

        `done` counts the bytes of a transfer that need not be sent again. Whenever this number
        grows, the next wait is the shortest again.
        """
        most, ended = done(), f"Coordinator at {self.url} answers again"
        patience_s = self._patience_s if patience_s is None else min(patience_s, self._patience_s)
        outage = Outage(ended, self._sleep, patience_s)
        while True:
            try:
                answer = self._when_ready(attempt, patience_s if repeat else float("inf"))
            except UnreachableError as failure:
                if done() > most:
                    outage.progressed()
                    most = done()
                patiently = failure.clock and not self._clock.is_believable()
                if not patiently:
                    self._check_patience(failure, outage, repeat)
                problem = f"Coordinator at {self.url} {failure}"
            else:
                outage.over()
                return answer
            outage.wait(problem, patiently=patiently)

    def _check_patience(self, failure: UnreachableError, outage: Outage, repeat: bool) -> None:
        """Raise ClientError if the request must not be repeated after `failure`."""
        if failure.error is not None:
            # The clock is not set yet: the system may set it soon.
            soon = failure.clock and not self._clock.synchronised()
            if outage.over_patience or (failure.lasting and not repeat and not soon):
                raise failure.error
        elif failure.sent and not repeat:
            raise ClientError(
                "Coordinator at {url} {problem} after the request was sent, so the coordinator "
                "may have accepted the device. Try again: joining twice is safe.",
                code="client.no-answer-to-join",
                url=self.url,
                problem=str(failure),
            )
        elif outage.over_patience:
            raise ClientError(
                "Coordinator at {url} {problem}; gave up after {waited_s:.0f} s. Check the URL, "
                "and that `edgetailor serve` runs there.",
                code="client.unreachable",
                url=self.url,
                problem=str(failure),
                waited_s=outage.waited_s,
            )

    def _when_ready(self, attempt: Callable[[], T], patience_s: float) -> T:
        """Repeat `attempt` while the coordinator is starting."""
        waited = 0.0
        while True:
            try:
                return attempt()
            except PreparingError as failure:
                problem = f"Coordinator at {self.url} {failure}"
                if waited + failure.retry_s > patience_s:
                    raise ClientError(
                        "{problem}. Try again in a few minutes.",
                        code="client.preparing",
                        url=self.url,
                        problem=problem,
                    ) from None
                if not waited:
                    log.info("%s; asking every %.0f s until it is ready", problem, failure.retry_s)
                self._sleep(failure.retry_s)
                waited += failure.retry_s

    def _ask(
        self,
        method: str,
        path: str,
        reply: type[T],
        body: bytes | None = None,
        timeout: urllib3.Timeout | float = TIMEOUT,
    ) -> T:
        response = self._send(method, path, body, timeout=timeout)
        data = read_reply(response, self.url)
        try:
            return decode_json(data, reply)
        except MalformedError as error:
            check_not_cut(response, data)
            raise not_a_coordinator(self.url, f"{method} {path}: {error}") from None

    def _order(self, method: str, path: str, *arguments: Any, **options: Any) -> None:
        """Make a request with `_send`. The answer must have no content."""
        response = self._send(method, path, *arguments, **options)
        if response.status != NO_CONTENT:
            response.close()
            answer = f"{method} {path} returned HTTP {response.status}"
            raise not_a_coordinator(self.url, answer)
        response.release_conn()

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        *,
        size: int | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout: urllib3.Timeout | float = TIMEOUT,
    ) -> urllib3.BaseHTTPResponse:
        """Make one request and return its successful answer. The body is not read yet.

        If the coordinator refuses the request, the error of this refusal is raised. All other
        failures, such as the answer of a proxy, raise UnreachableError.

        Args:
            method: The HTTP method.
            path: The path below the API's root.
            body: The body, or its pieces.
            size: Size of a body in pieces, in bytes.
            headers: More headers.
            timeout: Timeout of the request.
        """
        about = {"Content-Type": "application/json"}
        if size is not None:
            about = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        try:
            response = self._pool.request(
                method,
                f"{self.url}{API}{path}",
                body=body,
                headers={**self._pool.headers, **about, **headers},
                timeout=timeout,
                preload_content=False,
                # A redirect would send the secret to another address.
                redirect=False,
            )
        except HTTPError as error:
            why = reason(error)
            failed = ClientError(
                "Coordinator at {url}: {reason}.",
                code="client.connection-failed",
                url=self.url,
                reason=why,
            )
            lasting = is_lasting(error)
            raise UnreachableError(
                f"cannot be reached ({why})",
                sent=not (lasting or nothing_was_sent(error)),
                error=failed if lasting else None,
                lasting=lasting,
                clock=is_outside_validity(error),
            ) from None
        if response.status >= 300:
            raise_refusal(response, self.url, f"{method} {path}")
        return response
