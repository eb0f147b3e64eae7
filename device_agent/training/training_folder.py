"""The folder for the temporary files of a training.

The folder of the update NAME is `.NAME.training`, next to the update. The folder has the
checkpoint, recorded activations and unpacked data. It is deleted when the update is complete.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiles.errors import InputError, LimitError, StorageError, UpdateError

CHECKPOINT = "checkpoint.safetensors"
UNPACKED = "data"
"""Subfolder for local data that had to be unpacked or converted."""
WORTH_KEEPING = (OSError, MemoryError, LimitError, StorageError)
"""These errors may be gone at the next start, so the checkpoint is kept."""


def training_folder(out: Path) -> Path:
    """The training folder of the update `out`."""
    return out.parent / f".{out.name}.training"


@contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """Create and lock the training folder of an update for the duration of a training.

    The folder is deleted at the end. It stays only after a failure, if it has a checkpoint from
    which a later start could succeed.

    Args:
        out: The update to train.

    Yields:
        The training folder.

    Raises:
        InputError: Another process is training `out`.
    """
    folder = training_folder(out)
    started_here = not (folder / CHECKPOINT).exists()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, out):
        try:
            yield folder
        except BaseException as error:
            # Ctrl-C is not an Exception. If an earlier process wrote the checkpoint, keep it after
            # wrong input of this start, but not after divergence: training would diverge again.
            temporary = isinstance(error, WORTH_KEEPING) or not isinstance(error, Exception)
            kept = temporary or not (started_here or isinstance(error, UpdateError))
            if not (kept and (folder / CHECKPOINT).exists()):
                _clear(folder)
            raise
        _clear(folder)


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    # The system releases this lock when the process ends, even if it is killed.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(
            "Another process is training {path}. Wait until it has ended, or choose another "
            "output folder.",
            code="update.already-training",
            path=str(out),
        ) from None
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    """Delete a training folder. The checkpoint is deleted last, so that a restart can resume."""
    for path in folder.iterdir():
        if path.name != CHECKPOINT:
            remove(path)
    remove(folder)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
