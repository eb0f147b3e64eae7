"""The join tokens of a federation, and the links with which phones join."""

import ipaddress
import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from urllib.parse import quote, urlsplit

from device_agent.formats.signed_work import split_token
from profiles.errors import InputError
from toolkit.coordinator.database.device_registry import DAY_S, hashed
from toolkit.coordinator.database.join_tokens import JoinTokenState, listed
from toolkit.coordinator.storage.saved_rounds import reading
from toolkit.web.built_page import is_built

ADDRESS = "address"
"""The file of the state folder with the URL of the coordinator."""
MADE_SINCE = 10
"""Operators can make join tokens since this version of the database."""
NEEDS_HTTPS = "Phones need https for keys and storage: set tls_cert, or put a proxy in front."
NEEDS_AUTHORITY = "Browsers warn of this certificate: phones need a certificate of an authority."
NO_PAGE = "No page for phones: /join/ says how to get it (`make web`, or a release)."


@dataclass(frozen=True)
class JoinToken:
    """The join token of a kind of device.

    Attributes:
        kind: The name of the kind.
        submodel: The submodel that its devices train.
        count: How many devices may join; None if any number may.
        joined: How many devices have joined and not left.
        expires: The last day of the token, in UTC.
        file: The file of the token.
        link: The link by which a phone joins with the token.
    """

    kind: str
    submodel: str
    count: int | None
    joined: int
    expires: date
    file: Path
    link: str


def token_file(state: Path, kind: str) -> Path:
    """The path of the join token of a kind of device, in the state folder."""
    return state / "tokens" / f"{kind}.token"


def join_link(url: str, token: str = "") -> str:
    """The link to the page of the coordinator at `url`.

    The token is in the fragment, which no browser sends and no server logs.
    """
    return f"{url}/join/{'#' if token else ''}{quote(token, safe='')}"


def phones_accept(url: str) -> bool:
    """Whether browsers allow a page at `url` to use keys and storage: by https, or on localhost."""
    parsed = urlsplit(url)
    host = parsed.hostname or ""
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost" or host.endswith(".localhost")
    return parsed.scheme == "https" or here


def address(state: Path) -> str:
    """The URL at which the coordinator with the folder `state` listened last."""
    try:
        return (state / ADDRESS).read_text("utf-8").strip()
    except OSError:
        raise InputError(
            "{path} has no {file} file: start `edgetailor serve`, which writes it, or give the "
            "address with --url.",
            code="state.no-address",
            path=str(state),
            file=ADDRESS,
        ) from None


def join_tokens(state: Path, url: str) -> list[JoinToken]:
    """The join tokens of the federation in `state`, with links to the coordinator at `url`.

    Raises InputError if `state` contains no federation, or if a token was removed.
    """
    with reading(state) as db:
        settings = db.execute("SELECT value FROM meta WHERE key = 'federation'").fetchone()
        rows = db.execute(
            "SELECT kind, hash, count, made + days * ?, (SELECT count(*) FROM devices WHERE "
            "devices.kind = tokens.kind AND NOT has_left) FROM tokens",
            (DAY_S,),
        )
        known = {kind: rest for kind, *rest in rows}
    tokens = []
    for device_kind in json.loads(settings[0])["devices"] if settings else []:
        kind = device_kind["name"]
        digest, count, expires, joined = known[kind]
        tokens.append(
            JoinToken(
                kind,
                device_kind["submodel"],
                count,
                joined,
                expires=datetime.fromtimestamp(expires, UTC).date(),
                file=token_file(state, kind),
                link=join_link(url, _token(token_file(state, kind), digest)),
            )
        )
    return tokens


def made_tokens(state: Path) -> list[JoinTokenState]:
    """The join tokens that operators have made. Their text is not kept."""
    with reading(state) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        return [known for known in listed(db) if known.number] if version >= MADE_SINCE else []


def _token(path: Path, digest: str) -> str:
    """Read the token in the file `path`. Raises InputError unless its hash is `digest`."""
    token = path.read_text("utf-8", errors="replace").strip() if path.is_file() else ""
    if hashed(split_token(token)[0]) != digest:
        raise InputError(
            "{path} is missing or is not the token that `edgetailor serve` started with. Restart "
            "`edgetailor serve`.",
            code="state.other-token",
            path=str(path),
        )
    return token


def notes(url: str) -> list[str]:
    """The reasons why phones cannot join at `url`, as lines for the operator."""
    reasons = [] if phones_accept(url) else [NEEDS_HTTPS]
    return reasons if is_built() else [*reasons, NO_PAGE]
