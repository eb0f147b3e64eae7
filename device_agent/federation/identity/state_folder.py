"""The identity of a device in its state folder, which every command reads.

This module imports little. `status` and `doctor` need only the identity, and `doctor` must work
even if libraries do not load.
"""

from pathlib import Path

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import Struct, encode
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json


class Identity(Struct, frozen=True, kw_only=True):
    """The content of device.json.

    `token_sha256` is the hash of the join token that was used. `key` is the coordinator's public
    key, which verifies all work. It is None if the device joined before coordinators had keys.
    `next_secret` is a new secret that the coordinator may have accepted already. `certificate` is
    the SHA-256 of the coordinator's certificate if `join` got this hash. `labels` tells whether the
    federation's loss reads labels. If so, the data must have labels.
    """

    version: int = 1
    url: str
    device: str
    secret: str
    name: str
    submodel: str
    token_sha256: str | None = None
    key: str | None = None
    certificate: str | None = None
    next_secret: str | None = None
    labels: bool = True


IDENTITY = "device.json"


class StateFolder:
    """The state folder of a device.

    Args:
        folder: The folder. It need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "device.key"
        self.log = folder / "rounds.log"
        self.privacy = folder / "privacy.json"
        self._identity = folder / IDENTITY

    def identity(self) -> Identity | None:
        """Read the identity.

        Returns:
            The identity; None if the device has not joined.

        Raises:
            InputError: device.json is damaged or cannot be read.
        """
        try:
            return decode_json(self._identity.read_bytes(), Identity)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise InputError(
                "The state must be a folder; {path} is a file or below a file. Give a folder with "
                "--state.",
                code="state.not-a-folder",
                path=str(self.folder),
            ) from None
        except OSError as error:
            raise InputError(
                "{path} cannot be read: {reason}.",
                code="state.unreadable",
                path=str(self._identity),
                reason=error.strerror,
            ) from None
        except MalformedError as error:
            raise InputError(
                "{path} is damaged ({reason}). Remove it and join again.",
                code="state.damaged-identity",
                path=str(self._identity),
                reason=str(error),
            ) from None

    def member(self) -> Identity:
        """Read the identity of a device that has joined.

        Raises:
            InputError: The device has not joined, or device.json is damaged.
        """
        identity = self.identity()
        if identity is None:
            raise InputError(
                "{path} has not joined a coordinator yet. Run `edgetailor-agent join URL "
                "--token-file FILE` first.",
                code="state.not-joined",
                path=str(self.folder),
            )
        return identity

    def remember(self, identity: Identity) -> None:
        """Write device.json, readable by the owner only."""
        write_file(self._identity, encode(identity), mode=0o600)

    def check_writable(self) -> None:
        """Check that files can be written to the folder. Create it if it does not exist.

        Raises:
            InputError: The folder cannot be created or written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Mode bits are not enough: the disk may be read-only or full, and root ignores them.
            write_file(self.folder / ".writable", b"")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise InputError(
                "The state folder {path} cannot be written ({reason}). Give another folder with "
                "--state.",
                code="state.not-writable",
                path=str(self.folder),
                reason=error.strerror,
            ) from None
