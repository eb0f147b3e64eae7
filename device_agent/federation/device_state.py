"""The state folder of a device: its identity, cached files, the bundle and personal tensors.

device.json            url, id, secret, name, submodel (readable by the owner only)
device.key             the device's private key (readable by the owner only)
replacing.key          the new key while the device moves to another coordinator
files/                 files of the current bundle by SHA-256, each downloaded once; .part-* are
                       unfinished downloads
bundle/  update/       the current bundle and the update trained from it
attempts.json          number of failed trainings in a row (see training_attempts.py)
rounds.log             what the device has done in its rounds (see round_log.py)
privacy.json           the privacy that the device's samples have spent (see spent_privacy.py)
personal.safetensors   personal tensors, which never leave the device
forms.json             results of form checks (see remembered_checks.py)
secure-sums            exists if the federation promised secure sums (see secure_promise.py)
noise-of-sums          the least noise of these sums (see secure_promise.py)
masked.bin             the update behind masks, while it is sent
release.json           which release is current; the bundles are in releases/ (see
                       release_folder.py)
fine-tuning/           a fine-tuning of the current release that is not finished
"""

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from device_agent.client.transfers import PART
from device_agent.federation.identity.state_folder import StateFolder
from device_agent.federation.offered_files import check_offers, is_whole, manifest_of
from device_agent.federation.release_folder import DeviceReleases
from device_agent.federation.secure_promise import SecurePromise
from device_agent.federation.work_age import check_age
from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import MANIFEST, Manifest, SamplePrivacy, Train
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.formats.signed_work import check_signature
from device_agent.system.clock import SYSTEM_CLOCK, Clock
from device_agent.training.training_folder import training_folder
from profiles.errors import InputError, UpdateError

if TYPE_CHECKING:
    import numpy as np

    from device_agent.formats.update import UpdateRecord

log = logging.getLogger(__name__)
Fetch = Callable[[FileOffer, Path], None]
UNFINISHED = re.compile(
    r"\.writable|\.(\.writable|device\.json|(device|replacing)\.key|attempts\.json"
    r"|forms\.json|privacy\.json|release(-attempts)?\.json|rounds\.log|personal\.safetensors"
    r"|newest-work|secure-sums|noise-of-sums)\.\w+"
)
"""Names that `write_file` gives to the files of this folder before they are complete."""


class DeviceState(StateFolder):
    """The state folder with all files of a device.

    Methods for rounds import the libraries that only rounds need. A join runs without these
    libraries, so that the calibration has more memory on a small board.

    Args:
        folder: The folder. It need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bundle = folder / "bundle"
        self.update = folder / "update"
        self._files = folder / "files"
        self.replacing_key = folder / "replacing.key"
        self.attempts = folder / "attempts.json"
        self.form_checks = folder / "forms.json"
        self.personal_file = folder / "personal.safetensors"
        self._newest = folder / "newest-work"
        self.secure_promise = SecurePromise(folder)
        self.masked = folder / "masked.bin"
        self.releases = DeviceReleases(folder)

    @contextmanager
    def created(self) -> Iterator[None]:
        """Create the folder and check that it can be written, before the block runs the join.

        The check comes first, because a join uses up the token. If the block fails, the folders
        that were created are removed again if they are empty.

        Raises:
            InputError: The folder cannot be created or written.
        """
        missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        try:
            self.check_writable()
            yield
        except BaseException:
            with suppress(OSError):  # it holds the key of a join whose answer was lost
                for folder in missing:
                    folder.rmdir()
            raise

    def check_changeable(self) -> None:
        """Check that files in the folder can be created and removed.

        Raises:
            InputError: The folder is read-only for this user.
        """
        if self.folder.is_dir() and not os.access(self.folder, os.W_OK | os.X_OK):
            raise InputError(
                "The state folder {path} cannot be written. Make its disk writable, or run this "
                "command as the owner of the folder. Nothing was changed.",
                code="state.not-writable",
                path=str(self.folder),
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other agents, and remove unfinished files of a killed agent.

        Raises:
            InputError: Another agent uses the folder, or it cannot be written.
        """
        self.check_changeable()
        # The kernel releases this lock when the process ends, also after a kill.
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    "Another agent uses {path}. Stop that agent, or give this one another folder "
                    "with --state.",
                    code="state.in-use",
                    path=str(self.folder),
                ) from None
            self._remove_unfinished()
            yield
        finally:
            os.close(handle)

    def _remove_unfinished(self) -> None:
        """Remove files that an agent was writing when it was killed."""
        for path in self.folder.glob(".*"):
            if UNFINISHED.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)

    def forget(self, *, keep_personal: bool = False) -> None:
        """Remove the state. Also remove the folder if it is then empty. May be called repeatedly.

        Args:
            keep_personal: Keep the personal model.
        """
        self._remove_round_files(keep_personal)
        self.privacy.unlink(missing_ok=True)
        self._remove_unfinished()
        # The identity goes last: if the process is killed before, `leave` can be repeated.
        for path in (self.replacing_key, self.key, self._identity):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds files of the owner, or does not exist
            self.folder.rmdir()

    def take_new_key(self) -> None:
        """After a move to another coordinator, use the new key and remove files of old rounds."""
        self._remove_round_files(keep_personal=False)
        os.replace(self.replacing_key, self.key)

    def _remove_round_files(self, keep_personal: bool) -> None:
        """Remove the files of the rounds."""
        for path in (self.bundle, self.update, training_folder(self.update), self._files):
            shutil.rmtree(path, ignore_errors=True)
        self.attempts.unlink(missing_ok=True)
        self.form_checks.unlink(missing_ok=True)
        (self.folder / "runtimes.json").unlink(missing_ok=True)  # of earlier agents
        self.log.unlink(missing_ok=True)
        self._newest.unlink(missing_ok=True)
        self.secure_promise.forget()
        self.masked.unlink(missing_ok=True)
        self.releases.forget()
        if not keep_personal:
            self.personal_file.unlink(missing_ok=True)

    def check_work(self, work: Work, key: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Check the signature of `work` with the coordinator's `key`, and its time. Store the time.

        Raises:
            TrustError: The coordinator did not sign the work, the work is too old, or the device's
                clock is wrong.
        """
        check_signature(work, key)
        try:
            newest = int(self._newest.read_text())
        except FileNotFoundError:  # none yet
            newest = 0
        except ValueError:
            log.warning("%s is damaged: the time of the newest work is unknown.", self._newest)
            newest = 0
        noted = check_age(work, newest, clock)
        if noted != newest:
            write_file(self._newest, f"{noted}\n".encode())

    def use_up_update(self, round_: int) -> None:
        """Remove and count the update: it is now sent behind masks, and must never be sent again.

        Suppose that one update were in two sums over different devices. The difference of the sums
        would reveal the updates of the devices that are in only one sum.
        """
        self.secure_promise.count_masked_update(round_)
        shutil.rmtree(self.update)

    @property
    def is_private(self) -> bool:
        """Whether this device has trained with differential privacy for its samples."""
        return self.privacy.exists()

    def sample_privacy(self) -> SamplePrivacy | None:
        """The differential privacy for samples that the current bundle promises."""
        trains = (i for i in self._manifest().schedule if isinstance(i, Train))
        return next((i.privacy for i in trains if i.privacy is not None), None)

    def collect(self, offers: Iterable[FileOffer], fetch: Fetch) -> str:
        """Assemble bundle/ from the offered files. Only files that are not cached are downloaded.

        Args:
            offers: All files of the bundle. Forms of graphs for other devices are left out.
            fetch: Downloads one file to a path.

        Returns:
            The SHA-256 of the bundle's manifest.

        Raises:
            ClientError: The offered files are not a bundle.
        """
        from device_agent.training.form_choice import files_for_device

        offers = files_for_device(offers, training_folder(self.update))
        check_offers(offers)
        # Remove old files first: unfinished downloads of earlier rounds must not fill the disk.
        self._remove_other_files({offer.sha256 for offer in offers})
        for offer in offers:
            # Compute the hash of a cached file again: a failing disk may have altered the file.
            if not is_whole(self._files / offer.sha256, offer):
                fetch(offer, self._files / offer.sha256)
        self._link_files(offers)
        return manifest_of(offers)

    def _remove_other_files(self, wanted: set[str]) -> None:
        for path in self._files.glob("*"):
            if path.name.removeprefix(PART) not in wanted:
                path.unlink()

    def _link_files(self, offers: list[FileOffer]) -> None:
        shutil.rmtree(self.bundle, ignore_errors=True)
        self.bundle.mkdir()
        for offer in offers:
            cached = self._files / offer.sha256
            # A link avoids a second copy of the weights on the disk.
            try:
                os.link(cached, self.bundle / offer.name)
            except OSError:  # the file system has no hard links
                shutil.copyfile(cached, self.bundle / offer.name)

    def trained(self, bundle: str) -> "UpdateRecord | None":
        """Read the update in update/ if it belongs to the bundle with this hash.

        An incomplete update, or an update of another bundle, is removed.
        """
        from device_agent.formats.update import read_update

        if self.update.exists():
            try:
                record, _ = read_update(self.update)
            except UpdateError:
                record = None
            if record is not None and record.bundle == bundle:
                return record
            shutil.rmtree(self.update)
        return None

    def personal(self) -> "dict[str, np.ndarray]":
        """Read the personal tensors of the current submodel, if there are any."""
        from device_agent.training.personal_model import read_personal

        try:
            return read_personal(self.personal_file, self._manifest())
        except InputError:
            return {}  # of another submodel, or damaged: start with a new personal model

    def keep_personal(self, tensors: "Mapping[str, np.ndarray]") -> None:
        """Store the personal tensors for the next round of this submodel."""
        from device_agent.training.personal_model import write_personal

        write_personal(self.personal_file, tensors, self._manifest())

    def submodel(self) -> str:
        """The submodel of the current bundle."""
        return self._manifest().submodel

    def _manifest(self) -> Manifest:
        return msgspec.json.decode((self.bundle / MANIFEST).read_bytes(), type=Manifest)
