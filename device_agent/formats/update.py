"""An update: what a device sends back after training a bundle.

A folder of two files: `update.safetensors`, the uploaded tensors under their bundle names, and
`update.json`, which says what they are.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from device_agent.formats.atomic_files import fingerprint, refuse_existing, write_folder
from device_agent.formats.manifest import FileEntry, Struct, TensorEntry, encode
from profiles.documents.bundle_profile import Profile
from profiles.errors import InputError, UpdateError
from profiles.json_decoding import MalformedError, decode_json

UPDATE_VERSION = 1
RECORD = "update.json"
TENSORS = "update.safetensors"
DIVERGED = "The loss is not finite: training diverged. Lower the learning rate."


class Evaluation(Struct, frozen=True, kw_only=True):
    """Mean `loss` over `samples` samples, and how many of them are `correct`.

    That is None for a regression.
    """

    samples: int
    loss: float
    correct: int | None

    def __str__(self) -> str:
        if self.correct is None:
            return f"loss {self.loss:.4f}"
        return f"loss {self.loss:.4f}, accuracy {self.correct / self.samples:.1%}"


class UpdateRecord(Struct, frozen=True, kw_only=True):
    """All of `update.json`.

    `bundle` is the SHA-256 of the bundle's manifest, `base` the global model that it was cut from.
    `loss_first` and `loss_last` are means over the first and the last local epoch; `samples` were
    trained on. `validation` is how each epoch left the submodel on the samples that were held out.
    `profile` is what the training took, of a device in a federation.
    """

    version: int = UPDATE_VERSION
    bundle: str
    base: str
    submodel: str
    samples: int
    steps: int
    loss_first: float
    loss_last: float
    tensors: tuple[TensorEntry, ...]
    file: FileEntry
    profile: Profile | None = None
    validation: tuple[Evaluation, ...] = ()

    def losses(self, digits: int) -> str:
        """The first and the last epoch's loss with `digits` decimals; one where both are one."""
        first, last = f"{self.loss_first:.{digits}f}", f"{self.loss_last:.{digits}f}"
        return first if self.loss_first == self.loss_last else f"{first} to {last}"


def check_tensors(
    tensors: Mapping[str, np.ndarray], table: tuple[TensorEntry, ...], origin: str
) -> None:
    """Raise UpdateError unless `tensors` is exactly what `table` describes, in finite numbers."""
    expected = {entry.name: entry for entry in table}
    for name in expected.keys() ^ tensors.keys():
        state = "lacks" if name in expected else "has, unasked,"
        raise UpdateError(f"{origin} {state} the tensor {name!r}: it is not from this bundle.")
    for name, array in tensors.items():
        entry = expected[name]
        if tuple(array.shape) != entry.shape or array.dtype.name != entry.dtype:
            raise UpdateError(
                f"{origin}: {name!r} is {array.dtype.name} {tuple(array.shape)}, "
                f"its bundle says {entry.dtype} {entry.shape}."
            )
        if not np.isfinite(array).all():
            raise UpdateError(
                f"{origin}: {name!r} holds a number that is not finite; training diverged. "
                "Lower the learning rate and train again."
            )


def check_trained(record: UpdateRecord, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise UpdateError for losses and tensors that no server would take."""
    check_tensors(tensors, record.tensors, "This update")
    losses = (record.loss_first, record.loss_last, *(found.loss for found in record.validation))
    if not all(map(math.isfinite, losses)):
        raise UpdateError(DIVERGED)


def check_place(out: Path, force: bool = False) -> None:
    """Raise InputError where `out` exists, unless `force` is given and it is an update's folder."""
    refuse_existing(out, force)
    if out.exists() and not (out / RECORD).is_file():
        raise InputError(f"{out} is no update, so --force does not replace it: give another place.")


def write_update(
    out: Path,
    record: UpdateRecord,
    tensors: Mapping[str, np.ndarray],
    force: bool = False,
    staging: Path | None = None,
) -> UpdateRecord:
    """Write the two files of an update to the new folder `out`, whole or not at all.

    With `force` an update that is there already is replaced. `staging`: see `write_folder`.

    Returns the record with size and hash of the tensor file filled in.
    Raises UpdateError for tensors that no server would take, InputError where `out` exists.
    """
    check_trained(record, tensors)
    data = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
    record = replace(record, file=fingerprint(data))
    check_place(out, force)
    write_folder(out, {TENSORS: data, RECORD: encode(record)}, force, staging)
    return record


def read_update(folder: str | Path) -> tuple[UpdateRecord, dict[str, np.ndarray]]:
    """Read and check an update folder. Raises UpdateError naming the file and what is wrong."""
    folder = Path(folder)
    try:
        record = decode_json((folder / RECORD).read_bytes(), UpdateRecord)
        data = (folder / TENSORS).read_bytes()
    except FileNotFoundError as error:
        raise UpdateError(
            f"{folder} is no update: {Path(error.filename).name} is missing. "
            "Give the folder that `edgetailor-agent train --out` wrote."
        ) from None
    except NotADirectoryError:
        raise UpdateError(f"{folder} is a file; an update is a folder.") from None
    except MalformedError as error:
        raise UpdateError(f"{folder / RECORD} is not an update record: {error}.") from None
    if record.version != UPDATE_VERSION:
        raise UpdateError(
            f"{folder / RECORD} has version {record.version}; this program reads {UPDATE_VERSION}."
        )
    if fingerprint(data) != record.file:
        raise UpdateError(
            f"{folder / TENSORS} is not the file that {RECORD} describes (size or SHA-256 differ): "
            "copy the update again."
        )
    try:
        tensors: dict[str, np.ndarray] = load_file(folder / TENSORS)
    except SafetensorError as error:
        raise UpdateError(f"{folder / TENSORS} cannot be read: {error}.") from None
    check_tensors(tensors, record.tensors, str(folder))
    return record, tensors
