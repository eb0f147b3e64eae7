"""The state folder of a device: who it is, cached files, the bundle and what stays here.

device.json            url, id, secret, name, submodel (readable by the owner only)
device.key             the private key that this device is known by (readable by the owner only)
replacing.key          in its place while the folder is given to another coordinator
files/                 files of the current bundle by SHA-256, so that unchanged ones stay
bundle/  update/       the current bundle and the update trained from it
attempts.json          how often training the present submodel failed on end
personal.safetensors   personal tensors, which never leave the device
"""

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from device_agent.formats.atomic_files import fingerprint_file, write_file
from device_agent.formats.manifest import MANIFEST, FileEntry, Manifest, Struct, encode
from device_agent.formats.protocol import FileOffer
from device_agent.formats.update import UpdateRecord, read_update
from device_agent.training.personal_model import read_personal, write_personal
from device_agent.training.training_folder import training_folder
from profiles.errors import ClientError, InputError, UpdateError
from profiles.json_decoding import MalformedError, decode_json

Fetch = Callable[[FileOffer, Path], None]
UNFINISHED = re.compile(
    r"\.writable|\.(\.writable|device\.json|(device|replacing)\.key|attempts\.json"
    r"|personal\.safetensors)\.\w+"
)
"""Names that `write_file` gives to the files of this folder before they are whole."""


class Identity(Struct, frozen=True, kw_only=True):
    """All of device.json. `token_sha256` is of the join token that it enrolled with."""

    version: int = 1
    url: str
    device: str
    secret: str
    name: str
    submodel: str
    token_sha256: str | None = None


def default_state() -> Path:
    """$XDG_STATE_HOME/edgetailor-agent, or its usual place in the home folder."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "edgetailor-agent"


class DeviceState:
    """The state folder at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle = folder / "bundle"
        self.update = folder / "update"
        self._files = folder / "files"
        self.key = folder / "device.key"
        self.replacing_key = folder / "replacing.key"
        self.attempts = folder / "attempts.json"
        self._identity = folder / "device.json"
        self._personal = folder / "personal.safetensors"

    def identity(self) -> Identity | None:
        """Who this device is; None before it has joined. Raises InputError for a damaged file."""
        try:
            return decode_json(self._identity.read_bytes(), Identity)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise InputError(
                f"The state is a folder; {self.folder} is a file or below one: give a folder with "
                "--state."
            ) from None
        except OSError as error:
            raise InputError(f"{self._identity} cannot be read: {error.strerror}.") from None
        except MalformedError as error:
            raise InputError(
                f"{self._identity} is damaged ({error}): remove it and join again."
            ) from None

    def member(self) -> Identity:
        """Who this device is. Raises InputError where it has not joined."""
        identity = self.identity()
        if identity is None:
            raise InputError(
                f"{self.folder} belongs to no coordinator yet: run `edgetailor-agent join URL "
                "--token-file FILE` first."
            )
        return identity

    def remember(self, identity: Identity) -> None:
        """Write device.json, readable by the owner only."""
        write_file(self._identity, encode(identity), mode=0o600)

    def check_writable(self) -> None:
        """Raise InputError unless device.json can be written, before a token is used up for it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / ".writable", b"")
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise InputError(
                f"The state folder {self.folder} cannot be written ({error.strerror}): give "
                "another with --state."
            ) from None

    def check_open(self) -> None:
        """Raise InputError where nothing in the folder can be made or removed."""
        if self.folder.is_dir() and not os.access(self.folder, os.W_OK | os.X_OK):
            raise InputError(
                f"The state folder {self.folder} cannot be written: make its disk writable, or run "
                "this as the user that it belongs to. Nothing was changed."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other agent off this folder; what one that was killed left unfinished goes.

        Raises InputError where another agent is at work on it, or where it cannot be written.
        """
        self.check_open()
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"Another agent is at work on {self.folder}: stop that one, or give this one a "
                    "folder of its own with --state."
                ) from None
            self._sweep()
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove files that were being written when an agent was killed."""
        for path in self.folder.glob(".*"):
            if UNFINISHED.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)

    def forget(self, *, keep_personal: bool = False) -> None:
        """Remove all that this agent keeps here, and the folder where nothing else is in it.

        `keep_personal` leaves the personal model. Removing again what is gone is fine.
        """
        self._empty(keep_personal)
        self._sweep()
        # Who it is goes last: cut off before, leaving can be asked for again.
        for path in (self.replacing_key, self.key, self._identity):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # something of the owner's is in it, or it was never made
            self.folder.rmdir()

    def change_hands(self) -> None:
        """Take up the key that another coordinator knows, and nothing else of before."""
        self._empty(keep_personal=False)
        os.replace(self.replacing_key, self.key)

    def _empty(self, keep_personal: bool) -> None:
        """Remove what rounds leave here."""
        for path in (self.bundle, self.update, training_folder(self.update), self._files):
            shutil.rmtree(path, ignore_errors=True)
        self.attempts.unlink(missing_ok=True)
        if not keep_personal:
            self._personal.unlink(missing_ok=True)

    def collect(self, offers: Iterable[FileOffer], fetch: Fetch) -> str:
        """Make bundle/ of the offered files, fetching only what is not here yet.

        Returns the SHA-256 of its manifest. Raises ClientError for an offer that is no bundle.
        """
        offers = list(offers)
        _check_offers(offers)
        for offer in offers:
            if not self._has(offer):
                fetch(offer, self._files / offer.sha256)
        self._drop_others({offer.sha256 for offer in offers})
        self._lay_out(offers)
        return next(offer.sha256 for offer in offers if offer.name == MANIFEST)

    def _has(self, offer: FileOffer) -> bool:
        path = self._files / offer.sha256
        expected = FileEntry(size=offer.size, sha256=offer.sha256)
        return path.exists() and fingerprint_file(path) == expected

    def _drop_others(self, wanted: set[str]) -> None:
        for path in self._files.iterdir():
            if path.name not in wanted:
                path.unlink()

    def _lay_out(self, offers: list[FileOffer]) -> None:
        shutil.rmtree(self.bundle, ignore_errors=True)
        self.bundle.mkdir()
        for offer in offers:
            cached = self._files / offer.sha256
            try:
                os.link(cached, self.bundle / offer.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(cached, self.bundle / offer.name)

    def trained(self, bundle: str) -> UpdateRecord | None:
        """The update in update/, where it was trained from the bundle with this hash.

        Anything else there, of an earlier round or cut off, is removed.
        """
        if self.update.exists():
            try:
                record, _ = read_update(self.update)
            except UpdateError:
                record = None
            if record is not None and record.bundle == bundle:
                return record
            shutil.rmtree(self.update)
        return None

    def personal(self) -> dict[str, np.ndarray]:
        """Personal tensors of the current bundle's submodel; none where it is another one now."""
        try:
            return read_personal(self._personal, self._manifest())
        except InputError:
            return {}  # as on a device that has none yet

    def keep_personal(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Keep the personal tensors for the next round of this submodel."""
        write_personal(self._personal, tensors, self._manifest())

    def submodel(self) -> str:
        """The submodel of the current bundle."""
        return self._manifest().submodel

    def _manifest(self) -> Manifest:
        return msgspec.json.decode((self.bundle / MANIFEST).read_bytes(), type=Manifest)


def _check_offers(offers: list[FileOffer]) -> None:
    """Raise ClientError for names or hashes that would leave the folder, or without a manifest."""
    for offer in offers:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", offer.name) or not re.fullmatch(
            r"[0-9a-f]{64}", offer.sha256
        ):
            raise ClientError(
                f"The coordinator offers a file called {offer.name!r} with SHA-256 "
                f"{offer.sha256!r}, which no bundle has: check that the URL is the right one."
            )
    if MANIFEST not in [offer.name for offer in offers]:
        raise ClientError(f"The coordinator offers a bundle without {MANIFEST}: look at its log.")
