"""The coordinator that `edgetailor login` saved, for commands on other machines."""

import ipaddress
import os
import stat
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct
from profiles.errors import InputError


class Login(Struct, frozen=True, kw_only=True):
    """A coordinator's URL, the operator's token, and the fingerprint of its certificate."""

    version: Literal[1] = 1
    url: str
    token: str
    certificate: str | None = None


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
    """Write `login` to its file, which only its owner can read. Returns the path."""
    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.encode(login) + b"\n", mode=0o600)
    return path


def saved_login() -> Login:
    """Read the saved login.

    Raises InputError if there is none, if it is damaged, or if others can read its file.
    """
    path = login_file()
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise InputError(
            "Others can read the operator's token in {path}. Run `chmod 600 {path}`; if somebody "
            "may have read it, remove operator.token from the state folder and start `edgetailor "
            "serve` again: it makes a new token.",
            code="login.readable-by-others",
            path=str(path),
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Login)
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
