"""Checks the connection in steps: host name, TCP, TLS, coordinator, clock and membership.

If the check of host name, TCP, TLS or coordinator fails, the later checks are left out.
"""

import hashlib
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import urllib3
from urllib3.exceptions import HTTPError

from device_agent.client.addresses import check_secret, check_url
from device_agent.client.client_errors import reason, tls_reason
from device_agent.client.connections import connections
from device_agent.client.coordinator_client import CoordinatorClient
from device_agent.client.replies import REPLY_LIMIT
from device_agent.doctor.finding import Finding, isolated
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.identity.trusted_key import new_key
from device_agent.federation.identity.valid_secret import with_next_secret
from device_agent.formats.protocol.fleet import Status
from device_agent.formats.protocol.problems import (
    API,
    JOIN_TOKEN,
    NOT_AUTHORISED,
    PREPARING,
    UNKNOWN_TOKEN,
    Problem,
)
from device_agent.formats.signed_work import key_fingerprint, split_token
from profiles.errors import InputError, TrustError
from profiles.json_decoding import MalformedError, decode_json

TIMEOUT_S = 5.0
PLAIN = Finding.skip("TLS", "the URL is plain http")
SKEW_S = 60.0
"""Seconds by which the clocks may differ. The coordinator refuses joins above 5 minutes."""


def check_connection(
    url: str | None, identity: Identity | None, token: str | None
) -> Iterator[Finding]:
    """Check the connection. If no coordinator answers, clock and token are not checked.

    Args:
        url: The coordinator's URL (default: that of `identity`).
        identity: The device's identity, if it has joined.
        token: A join token. If it is given, the token is checked instead of the membership.

    Returns:
        The findings.

    Raises:
        InputError: `url` is malformed.
    """
    target = check_url(url if url is not None else identity.url if identity else "")
    parsed = urllib3.util.parse_url(target)
    host = (parsed.host or "").strip("[]")
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    # The secret of another coordinator must not be sent to this one.
    if identity is not None and identity.url != target:
        identity = None
    known = identity
    secure = parsed.scheme == "https"
    # Each check needs the previous checks to pass.
    for check, make in (
        ("name", lambda: _name(host, port)),
        ("TCP", lambda: _tcp(host, port)),
        ("TLS", lambda: _tls(host, port, known) if secure else PLAIN),
    ):
        for finding in isolated(check, make):
            yield finding
            if finding.result == "FAIL":
                return
    yield from isolated("coordinator", lambda: _coordinator(target, known, token))


def _name(host: str, port: int) -> Finding:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding.fail(
            "name",
            f"{host} cannot be resolved ({error.strerror})",
            "check the URL and this device's DNS server (`resolvectl status`), or use its IP",
        )
    return Finding.ok("name", f"{host} is {', '.join(sorted({str(a[4][0]) for a in addresses}))}")


def _tcp(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return Finding.fail(
            "TCP",
            f"{host} port {port}: {why.lower()}",
            "check that `edgetailor serve` runs there, that its `host` can be reached from other "
            "machines, and that no firewall blocks the port",
        )
    return Finding.ok("TCP", f"{host} port {port} is open")


def _tls(host: str, port: int, known: Identity | None) -> Finding:
    context = ssl.create_default_context()
    pin = known.certificate if known else None
    if pin is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            if pin is not None:
                came = hashlib.sha256(connection.getpeercert(True) or b"").hexdigest()
                if came == pin:
                    return Finding.ok(
                        "TLS", f"{connection.version()}, the same certificate as at the join"
                    )
                return Finding.fail(
                    "TLS",
                    "the certificate differs from the certificate at the join",
                    "join again with --certificate",
                )
            until = (connection.getpeercert() or {}).get("notAfter")
            return Finding.ok("TLS", f"{connection.version()}, certificate valid until {until}")
    except ssl.SSLError as error:
        # tls_reason puts the remedy after a semicolon.
        detail, _, remedy = tls_reason(error).partition("; ")
        return Finding.fail("TLS", detail, remedy or "check the server's TLS settings")
    except OSError as error:
        return Finding.fail("TLS", str(error), "check the server's TLS settings")


def _coordinator(url: str, known: Identity | None, token: str | None) -> Iterator[Finding]:
    """Check whether a coordinator answers, what its clock says and whether it knows this device."""
    secret = known.secret if known else None
    if token is not None:
        try:
            secret = check_secret(split_token(token)[0])
        except InputError as error:
            yield Finding.fail("token", str(error), "give the file unaltered")
            return
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    try:
        answer = connections(headers, known.certificate if known else None).request(
            "GET", f"{url}{API}/status", timeout=TIMEOUT_S, redirect=False, preload_content=False
        )
        data = answer.read(REPLY_LIMIT)
    except HTTPError as error:
        yield Finding.fail("coordinator", reason(error), "check the URL")
        return
    try:
        said = _decoded(data, answer.status)
    except MalformedError:
        detail = f"{url} answers (HTTP {answer.status}), but not like a coordinator"
        yield Finding.fail("coordinator", detail, "check the URL, and which program runs there")
        return
    unknown = isinstance(said, Problem) and said.code == NOT_AUTHORISED
    if token is None and unknown and known is not None and known.next_secret is not None:
        yield from _coordinator(url, with_next_secret(known, known.next_secret), None)
        return
    yield Finding.ok("coordinator", f"answers at {url}")
    yield from isolated("clock", lambda: _clock(answer.headers.get("Date"), time.time()))
    if isinstance(said, Problem) and said.code == PREPARING:
        what = "membership" if token is None else "token"
        yield Finding.skip(what, "the coordinator is still preparing", "try again in a few minutes")
        return
    yield _token(said) if token is not None else _membership(said, known)


NO_JOIN_TOKEN = "This is not a join token, but the operator's token or the secret of a device."


def _decoded(data: bytes, status: int) -> Problem | Status:
    return decode_json(data, Problem) if status >= 300 else decode_json(data, Status)


def _token(said: Problem | Status) -> Finding:
    if isinstance(said, Problem) and said.code == JOIN_TOKEN:
        return Finding.ok("token", said.message)
    if isinstance(said, Problem) and said.code == NOT_AUTHORISED:
        message = UNKNOWN_TOKEN  # the coordinator treated it as a device's secret
    else:
        message = said.message if isinstance(said, Problem) else NO_JOIN_TOKEN
    return Finding.fail("token", message, "ask the operator of the coordinator for a join token")


def _membership(said: Problem | Status, known: Identity | None) -> Finding:
    if known is None:
        return Finding.skip("membership", "not joined there", "edgetailor-agent join URL")
    if isinstance(said, Problem):
        return Finding.fail("membership", said.message, "join again with a token and --replace")
    if said.key and known.key is not None and known.key != said.key:
        return _other_key(said.key, known.key, known)
    return Finding.ok("membership", f"known there as {known.device}")


def _other_key(key: str, trusted: str, known: Identity) -> Finding:
    """Whether the coordinator's `key` has replaced the key that this device has `trusted`."""
    client = CoordinatorClient(known.url, known.secret, patience_s=0, certificate=known.certificate)
    try:
        new = new_key(key_fingerprint(trusted), client.key_changes(), known.url)
    except TrustError as error:
        return Finding.fail("membership", str(error), "join again with a new token")
    if new != key:
        return Finding.fail(
            "membership",
            "the coordinator's key differs from the key at the join, so its work is not trusted",
            "ask the operator whether the key is new. If it is, join again with a new token",
        )
    return Finding.ok(
        "membership", f"known there as {known.device}; the agent will follow a new key"
    )


def _clock(date: str | None, now: float) -> Finding:
    """Compare the header Date with this device's clock, in seconds since 1970."""
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return Finding.skip("clock", "the coordinator does not report the time")
    ahead = now - theirs
    if abs(ahead) > SKEW_S:
        side = "ahead of" if ahead > 0 else "behind"
        return Finding.fail(
            "clock",
            f"{abs(ahead):.0f} s {side} the coordinator's",
            "set the clock: `timedatectl set-ntp true`",
        )
    return Finding.ok("clock", f"within {SKEW_S:.0f} s of the coordinator's")
