"""Checkpoints of one training, so that a kill at any moment costs minutes and changes nothing.

They lie in a folder beside the update that is trained, `.NAME.training`, together with the recorded
activations and whatever else is written on the way. The folder goes when the update is there.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from device_agent.formats.tensor_files import read_tensors, write_tensors
from device_agent.formats.update import Evaluation
from device_agent.system.disk_space import Written
from profiles.errors import InputError, LimitError, StorageError, UpdateError
from profiles.json_decoding import decode_json

CHECKPOINT = "checkpoint.safetensors"
UNPACKED = "data"
"""Folder of local data that could not be used in their place."""

STATE, PERSONAL = "state:", "personal:"
WORTH_KEEPING = (OSError, MemoryError, LimitError, StorageError)
"""Trouble that may be over at the next start."""

Tensors = dict[str, np.ndarray]


class Position(msgspec.Struct, kw_only=True):
    """How far a training has come: `batch` batches into `epoch` epochs of `instruction`.

    `losses` are the means of whole epochs, `loss_sum` the sum of the `loss_count` that the present
    one's steps gave. `recorded` are the recordings that are complete on disk, by name, `recording`
    names the one that is being written and `begun` is what it holds; `dropout` is its generator's
    state.
    """

    instruction: int = 0
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    losses: list[float] = []
    validation: list[Evaluation] = []
    recorded: dict[str, Written] = {}
    recording: str | None = None
    begun: Written | None = None
    dropout: str = ""


class Checkpoint(msgspec.Struct):
    """What a training goes on from; `state` and `personal` are the tensors that it held."""

    position: Position
    state: Tensors
    personal: Tensors


class Checkpoints:
    """The newest checkpoint in `folder` of the training that `key` and `personal` make."""

    def __init__(self, folder: Path, key: str, personal: Tensors) -> None:
        self.folder = folder
        self._key = key
        self._keys = [self._of(personal)]
        self._path = folder / CHECKPOINT

    def also_for(self, personal: Tensors) -> None:
        """Let later checkpoints be found with the tensors that this training ended with too."""
        self._keys.append(self._of(personal))

    def _of(self, personal: Tensors) -> str:
        """The key with what the device held before: a SHA-256."""
        digest = hashlib.sha256(self._key.encode())
        for name in sorted(personal):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(personal[name]).data)
        return digest.hexdigest()

    def save(self, made: Checkpoint) -> None:
        """Replace the checkpoint, in one step."""
        tensors = {STATE + name: array for name, array in made.state.items()}
        tensors |= {PERSONAL + name: array for name, array in made.personal.items()}
        position = msgspec.json.encode(made.position).decode()
        about = {"keys": " ".join(self._keys), "position": position}
        write_tensors(self._path, tensors, about | {"digest": _digest(position, tensors)})

    def latest(self) -> Checkpoint | None:
        """The checkpoint, where there is one of this training; all else in the folder goes."""
        found = self._read()
        wanted = {UNPACKED}
        if found is not None:
            wanted |= {CHECKPOINT, *_files(found.position)}
        for path in self.folder.iterdir():
            if path.name not in wanted:
                remove(path)
        return found

    def _read(self) -> Checkpoint | None:
        try:
            with safe_open(self._path, framework="numpy") as file:
                about = file.metadata()
            if self._keys[0] not in about["keys"].split():
                return None
            position = decode_json(about["position"], Position)
            tensors = read_tensors(self._path)
            if about["digest"] != _digest(about["position"], tensors):
                return None
        except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, TypeError):
            return None  # none yet, or damaged: the training starts afresh
        if not all(made.still_in(self.folder / name) for name, made in _files(position).items()):
            return None
        return Checkpoint(position, _starting(STATE, tensors), _starting(PERSONAL, tensors))


def _digest(position: str, tensors: Mapping[str, np.ndarray]) -> str:
    """Tells a checkpoint from one that a failing disk has altered: a BLAKE2b."""
    digest = hashlib.blake2b(position.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _files(position: Position) -> dict[str, Written]:
    """The files that a training at `position` goes on from, and what they held."""
    files = dict(position.recorded)
    if position.recording is not None and position.begun is not None:
        files[position.recording] = position.begun
    return {f"{name}.npy": written for name, written in files.items()}


def _starting(prefix: str, tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


def key_of(parts: object) -> str:
    """SHA-256 of what a training is made of, anything that JSON can say."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def training_folder(out: Path) -> Path:
    """Where the training of the update `out` keeps what it writes on the way."""
    return out.parent / f".{out.name}.training"


@contextmanager
def working_folder(out: Path) -> Iterator[Path]:
    """The training folder of `out`, for this process alone, until the training has ended.

    It stays after a failure only where there is something to go on from and the trouble may pass.
    Raises InputError where another process trains `out`.
    """
    folder = training_folder(out)
    started_here = not (folder / CHECKPOINT).exists()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, out):
        try:
            yield folder
        except BaseException as error:
            passing = isinstance(error, WORTH_KEEPING) or not isinstance(error, Exception)
            kept = passing or not (started_here or isinstance(error, UpdateError))
            if not (kept and (folder / CHECKPOINT).exists()):
                _clear(folder)
            raise
        _clear(folder)


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(
            f"Another process is training {out}: wait until it has ended, or give another place."
        ) from None
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    """Delete a training folder, its checkpoint last: until then the training can be taken up."""
    for path in folder.iterdir():
        if path.name != CHECKPOINT:
            remove(path)
    remove(folder)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
