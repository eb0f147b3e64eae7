"""The coordinators that `edgetailor login` saved, for commands on other machines."""

import ipaddress
import os
import stat
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from device_agent.client.addresses import check_url
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct
from profiles.errors import InputError

MOST = 50
"""The logins of at most this many coordinators are kept in addition to the last login."""


class Login(Struct, frozen=True, kw_only=True):
    """A coordinator's URL, the operator's token, and the fingerprint of its certificate."""

    version: Literal[1] = 1
    url: str
    token: str
    certificate: str | None = None


class Logins(Login, frozen=True, kw_only=True):
    """The content of the file: the last login, and earlier logins at other coordinators."""

    others: tuple[Login, ...] = ()


def login_file() -> Path:
    """The file of the login, below $XDG_CONFIG_HOME or ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "edgetailor" / "login.json"


def is_loopback(url: str) -> bool:
    """Whether `url` is on this machine.

    Examples:
        >>> is_loopback("http://127.0.0.1:8123"), is_loopback("http://fleet.example.org")
        (True, False)
    """
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def save_login(login: Login) -> Path:
    """Write `login` to the file, which only its owner can read. Returns the path.

    Logins of other coordinators stay in the file, unless it is damaged or others can read it.
    """
    path = login_file()
    others = tuple(other for other in _known(path) if other.url != login.url)
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = Logins(**msgspec.structs.asdict(login), others=others[:MOST])
    write_file(path, msgspec.json.encode(saved) + b"\n", mode=0o600)
    return path


def saved_login(url: str | None = None) -> Login:
    """Read the saved login of the coordinator at `url`; without `url`, the last login.

    Raises InputError if there is no login, if it is damaged, or if others can read its file.
    """
    if url is None or not login_file().exists():
        return _saved(login_file())
    last, wanted = _saved(login_file()), check_url(url)
    found = [login for login in (last, *last.others) if login.url == wanted]
    if not found:
        raise InputError(
            "No login is saved for {url}. Run `edgetailor login {url} --token-file FILE` first. "
            "Logins are saved for {known}.",
            code="login.unknown",
            url=wanted,
            known=", ".join(login.url for login in (last, *last.others)),
        )
    return found[0]


def _known(path: Path) -> list[Login]:
    """The logins in the file `path`, the last one first; empty if it cannot be used."""
    try:
        last = _saved(path)
    except InputError:
        return []
    return [Login(url=last.url, token=last.token, certificate=last.certificate), *last.others]


def _saved(path: Path) -> Logins:
    """The logins in the file `path`."""
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(
            "Others can read the operator's token in {path}. Run `chmod 600 {path}`; if somebody "
            "may have read it, remove operator.token from the state folder and start `edgetailor "
            "serve` again, which makes a new token.",
            code="login.readable-by-others",
            path=str(path),
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Logins)
    except FileNotFoundError:
        raise InputError(
            "No federation is given. On the coordinator's machine, give --federation with its file "
            "or state folder. On another machine, run `edgetailor login URL --token-file FILE` "
            "first.",
            code="login.missing",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(
            "{path} cannot be read: {reason}. Run `edgetailor login` again.",
            code="login.damaged",
            path=str(path),
            reason=str(error),
        ) from None
