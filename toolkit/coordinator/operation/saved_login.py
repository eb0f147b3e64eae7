"""The coordinator that `edgetailor login` saved, for commands on other machines."""

import os
from pathlib import Path

import msgspec

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct
from profiles.errors import InputError


class Login(Struct, frozen=True, kw_only=True):
    """A coordinator's URL, the operator's token, and the fingerprint of its certificate."""

    version: int = 1
    url: str
    token: str
    certificate: str | None = None


def login_file() -> Path:
    """The file of the login, below $XDG_CONFIG_HOME or ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "edgetailor" / "login.json"


def save_login(login: Login) -> Path:
    """Write `login` to its file, which only its owner can read. Returns the path."""
    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.encode(login) + b"\n", mode=0o600)
    return path


def saved_login() -> Login:
    """Read the saved login. Raises InputError if there is none, or if it is damaged."""
    path = login_file()
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
