"""A disk that fills up at any write of a training: one error message, and no progress is lost."""

import builtins
import errno
import io
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundles import BundleOf, everything, samples, write_data
from commands import Done, command, environment, refusal
from device_agent.data.array_files import IN_MEMORY_BYTES
from device_agent.system.disk_space import storage_error
from device_agent.training.standalone_training import train as train_alone
from profiles.errors import StorageError
from refusals import refused
from trainings import train_bundle

MOST_WRITES = 400


class Disk:
    """Makes the write number `full_at` below `folder` fail, and all later ones.

    Creating files and folders, reserving space, writing, flushing to disk and renaming count.
    """

    def __init__(self, folder: Path, full_at: int) -> None:
        self.folder, self.full_at = str(folder), full_at
        self.writes = 0
        self.refused = False

    def touch(self, path: object = None) -> None:
        self.writes += 1
        if self.writes >= self.full_at:
            self.refused = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path and str(path))


class Counted(io.BufferedIOBase):
    """A file whose writes are counted. Its errors name no file, as those of real files."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        self._disk.touch()
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, *size: int) -> bytes:
        return bytes(self._file.read(*size))

    def readinto(self, buffer: Any) -> int:
        return int(self._file.readinto(buffer))

    def seek(self, *where: int) -> int:
        return int(self._file.seek(*where))

    def tell(self) -> int:
        return int(self._file.tell())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def install(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    """Send every write of this process below the disk's folder through `disk`."""

    def before(module: Any, name: str, position: int) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            path = options.get("dir", arguments[position] if len(arguments) > position else None)
            if path is None or str(path).startswith(disk.folder) or isinstance(path, int):
                disk.touch(None if isinstance(path, int) else path)
            return original(*arguments, **options)

        patch.setattr(module, name, wrapped)

    for name in ("fsync", "posix_fallocate", "mkdir", "replace"):
        before(os, name, 0)
    for name in ("mkstemp", "mkdtemp"):
        before(tempfile, name, 9)
    opened, adopted = io.open, os.fdopen

    def opening(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        writes = "w" in mode or "+" in mode
        if not writes or not str(file).startswith(disk.folder):
            return opened(file, mode, *more, **options)
        disk.touch(file)
        return Counted(opened(file, mode, *more, **options), disk)

    patch.setattr(io, "open", opening)
    patch.setattr(builtins, "open", opening)
    patch.setattr(os, "fdopen", lambda handle, mode: Counted(adopted(handle, mode), disk))


@pytest.fixture
def compressed(tmp_path: Path) -> str:
    """Compressed data that are large enough to be unpacked to the disk instead of memory."""
    x, y = samples(IN_MEMORY_BYTES // 144 + 1, seed=0)
    np.savez_compressed(tmp_path / "packed.npz", x=np.round(x), y=y)
    return str(tmp_path / "packed.npz")


@pytest.mark.parametrize("family", ["slice", pytest.param("cp", marks=pytest.mark.long)])
def test_a_disk_that_is_full_at_every_write(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bundle, data = bundle_of(family), str(write_data(tmp_path / "local.npz"))

    def train(folder: Path) -> None:
        own = folder / "own" / "personal.safetensors"
        train_alone(bundle, data, folder / "new" / "update", personal=own, threads=1)

    whole = tmp_path / "whole"
    train(whole)
    expected = everything(whole)
    for full_at in range(1, MOST_WRITES):
        folder = tmp_path / "disk"
        disk = Disk(folder, full_at)
        with monkeypatch.context() as patch:
            install(disk, patch)
            try:
                train(folder)
            except StorageError as error:
                message = str(error)
        if not disk.refused:
            break
        assert message.startswith(str(folder)), (full_at, message)
        assert message.endswith(
            ": No space left on device. Free some space there and run the same command again: the "
            "training resumes."
        )
        # The update is complete or absent. It may exist if only the flush of its folder failed.
        landed = folder / "new" / "update"
        assert not landed.exists() or everything(landed) == everything(whole / "new" / "update")
        train(folder)  # the disk has space again
        assert everything(folder) == expected, full_at
        shutil.rmtree(folder)
    assert 30 < full_at < MOST_WRITES - 1
    assert everything(folder) == expected


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EROFS, r"^/media/usb/update: Read-only file system\. Give a folder that can be"),
        (
            errno.EACCES,
            r"^/media/usb/update: Permission denied\. Give a folder that can be written",
        ),
        (errno.EIO, r"^/media/usb/update: Input/output error\. The disk is failing: look at"),
        (errno.EDQUOT, r"^/media/usb/update: Disk quota exceeded\. Free some space there"),
    ],
)
def test_a_disk_error_says_what_to_do(number: int, message: str) -> None:
    error = storage_error(OSError(number, os.strerror(number), "/media/usb/update"))
    assert error is not None
    assert re.search(message, str(error))


def test_other_os_errors_are_not_converted(bundle_of: BundleOf, tmp_path: Path) -> None:
    def on_epoch(epoch: int, epochs: int, loss: float) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(ConnectionResetError):
        train_bundle(
            bundle_of("full"), str(write_data(tmp_path / "local.npz")), tmp_path / "update",
            threads=1, on_epoch=on_epoch,
        )  # fmt: skip


def test_unpacking_on_a_full_disk(
    bundle_of: BundleOf, tmp_path: Path, compressed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, bundle = Disk(tmp_path / "here", 5), bundle_of("slice")
    out = tmp_path / "here" / "update"
    with monkeypatch.context() as patch:
        install(disk, patch)
        with refused("storage.disk-error", errno="ENOSPC") as error:
            train_bundle(bundle, compressed, out, threads=1)
    assert disk.refused
    assert isinstance(error.value, StorageError)
    assert "data/x.npy: No space left on device. Free some" in str(error.value)
    assert everything(tmp_path / "here") == {}


SMALL = """
set -e
mount -t tmpfs -o size={size} tmpfs {disk}
cd {disk}
set +e
{train} --out update --force
echo "code $?"
mount -o remount,size=64m {disk}
{train} --out update --force
echo "code $?"
cp -r update {result}
"""


@pytest.mark.parametrize(("size", "code"), [("8k", 2), ("300k", 0)])
def test_a_disk_that_is_really_small(
    bundle_of: BundleOf, tmp_path: Path, size: str, code: int
) -> None:
    """A file system that is too small for the update, or only for the recordings."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a file system of one's own cannot be mounted here")
    data = write_data(tmp_path / "local.npz", count=600)
    train = shlex.join(
        command("edgetailor-agent", "train", bundle_of("slice"), "--data", data, "--threads", 1)
    )
    (tmp_path / "disk").mkdir()
    script = SMALL.format(
        size=size, disk=tmp_path / "disk", train=train, result=tmp_path / "result"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    codes = re.findall(r"^code (\d+)$", done.stdout, re.M)
    assert codes == [str(code), "0"], done
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    if code:
        assert len(errors) == 1
        assert re.search(r"No space left on device\. Free some space there and run", errors[0])
    train_bundle(bundle_of("slice"), str(data), tmp_path / "whole", threads=1)
    assert everything(tmp_path / "result") == everything(tmp_path / "whole")


def test_a_state_folder_that_cannot_be_written(bundle_of: BundleOf, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a file system of one's own cannot be mounted here")
    data = write_data(tmp_path / "local.npz")
    (tmp_path / "disk").mkdir()
    train = command(
        "edgetailor-agent", "train", bundle_of("full"), "--data", data, "--out", "disk/update"
    )
    mount = "mount -t tmpfs tmpfs disk && mount -o remount,ro disk && exec"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} {shlex.join(train)}"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert refusal(Done(done.returncode, done.stdout, done.stderr)) == (
        "disk/.update.training: Read-only file system. Give a folder that can be written."
    )
