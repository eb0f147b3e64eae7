"""Checkpoints of a training. A killed training resumes from the last checkpoint."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from device_agent.formats.evaluation_counts import Evaluation, EvaluationCounts
from device_agent.formats.graph_forms import PLAIN
from device_agent.formats.tensor_files import read_tensors, write_tensors
from device_agent.system.disk_space import Written
from device_agent.training.training_folder import CHECKPOINT, UNPACKED, remove
from profiles.json_decoding import decode_json

STATE, PERSONAL = "state:", "personal:"
"""Prefixes of tensor names in the checkpoint file."""

Tensors = dict[str, np.ndarray]


class Position(msgspec.Struct, kw_only=True):
    """How far a training has come.

    Attributes:
        instruction: Number of finished instructions of the schedule.
        epoch: Number of finished epochs of the current instruction.
        batch: Number of finished batches of the current epoch or recording.
        steps: Number of finished training batches.
        loss_sum: Sum of the losses in the current epoch.
        loss_count: Number of losses in `loss_sum`.
        losses: Mean loss of each finished epoch.
        validation: Evaluation after each finished epoch.
        before: Counts of the received model on held-out samples, for a federated evaluation.
        after: The same counts for this device's own model after the last epoch.
        recorded: Recordings that are complete on disk, by name.
        recording: Name of the recording that is being written.
        begun: Size and digest of the part of `recording` that is on disk.
        spent_s: Seconds that recordings and batches have taken, counted only if the time is
            limited.
        samples: Number of different samples in the training; None if the time was sufficient for
            all samples.
        dropout: State of the random generator for dropout, as JSON.
    """

    instruction: int = 0
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    losses: list[float] = []
    validation: list[Evaluation] = []
    before: EvaluationCounts | None = None
    after: EvaluationCounts | None = None
    recorded: dict[str, Written] = {}
    recording: str | None = None
    begun: Written | None = None
    spent_s: float = 0.0
    samples: int | None = None
    dropout: str = ""


class Checkpoint(msgspec.Struct):
    """A position in a training, and the tensors of the training at this position.

    Attributes:
        position: How far the training has come.
        state: Tensors that the signatures read and replace.
        personal: Personal tensors; empty if `state` contains them.
    """

    position: Position
    state: Tensors
    personal: Tensors


class Checkpoints:
    """The checkpoint file of one training in the folder `folder`.

    A training is identified by `key`, a hash of its inputs, and by the personal tensors with which
    it starts. A checkpoint of another training is ignored. A checkpoint also contains the bundle's
    SHA-256 `bundle` and the `form` of the trained graphs; see `form_begun`.
    """

    def __init__(
        self, folder: Path, key: str, personal: Tensors, bundle: str, form: str | None
    ) -> None:
        self.folder = folder
        self._begun = {"bundle": bundle, "form": form or PLAIN}
        self._key = key
        self._keys = [self._key_with(personal)]
        self._path = folder / CHECKPOINT

    def accept_personal(self, personal: Tensors) -> None:
        """Make later checkpoints also valid for a training that starts with the tensors `personal`.

        When a training ends, its new personal tensors are stored before the update is written. If
        the process is killed between the two steps, the next start finds the new tensors instead of
        the old tensors.
        """
        self._keys.append(self._key_with(personal))

    def _key_with(self, personal: Tensors) -> str:
        """SHA-256 of the key and of the personal tensors."""
        digest = hashlib.sha256(self._key.encode())
        for name in sorted(personal):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(personal[name]).data)
        return digest.hexdigest()

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint atomically."""
        tensors = {STATE + name: array for name, array in checkpoint.state.items()}
        tensors |= {PERSONAL + name: array for name, array in checkpoint.personal.items()}
        position = msgspec.json.encode(checkpoint.position).decode()
        about = {"keys": " ".join(self._keys), "position": position, **self._begun}
        write_tensors(self._path, tensors, about | {"digest": _digest(position, tensors)})

    def load(self) -> Checkpoint | None:
        """Load the checkpoint, and delete all files that it does not need.

        Returns:
            The checkpoint; None if this training has no intact checkpoint.
        """
        checkpoint = self._read()
        wanted = {UNPACKED}
        if checkpoint is not None:
            wanted |= {CHECKPOINT, *_files(checkpoint.position)}
        for path in self.folder.iterdir():
            if path.name not in wanted:
                remove(path)
        return checkpoint

    def _read(self) -> Checkpoint | None:
        try:
            with safe_open(self._path, framework="numpy") as file:
                about = file.metadata()
            # The key is in the header, so the tensors of another training are not read.
            if self._keys[0] not in about["keys"].split():
                return None
            position = decode_json(about["position"], Position)
            tensors = read_tensors(self._path)
            if about["digest"] != _digest(about["position"], tensors):
                return None
        except (OSError, SafetensorError, msgspec.MsgspecError, KeyError, TypeError):
            return None  # missing or damaged: the training starts from the beginning
        # A recording on disk may be damaged or deleted independently of the checkpoint.
        if not all(
            written.still_in(self.folder / name) for name, written in _files(position).items()
        ):
            return None
        return Checkpoint(position, _with_prefix(STATE, tensors), _with_prefix(PERSONAL, tensors))


def form_begun(folder: Path, bundle: str) -> str | None:
    """The form of graphs with which a killed training in `folder` must continue.

    The forms differ in rounding, so a training must not change its form. A device measures which
    form is faster, and the result may change after a restart.

    Args:
        folder: The training folder.
        bundle: SHA-256 of the bundle's manifest.

    Returns:
        The name of the form. It is `PLAIN` for the unchanged graphs, and None if there is no
        checkpoint of a training of this bundle.
    """
    try:
        with safe_open(folder / CHECKPOINT, framework="numpy") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    return about.get("form") if about.get("bundle") == bundle else None


def _digest(position: str, tensors: Mapping[str, np.ndarray]) -> str:
    """The BLAKE2b digest of a checkpoint. It detects changes by a failing disk."""
    digest = hashlib.blake2b(position.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def _files(position: Position) -> dict[str, Written]:
    """The recordings that a training at `position` needs, by file name."""
    files = dict(position.recorded)
    if position.recording is not None and position.begun is not None:
        files[position.recording] = position.begun
    return {f"{name}.npy": written for name, written in files.items()}


def _with_prefix(prefix: str, tensors: Mapping[str, np.ndarray]) -> Tensors:
    return {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if name.startswith(prefix)
    }


def training_key(parts: object) -> str:
    """The SHA-256 of the inputs of a training. `parts` are values that JSON can represent."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
