"""Converts pictures and CSV files to samples, as the bundle describes."""

from pathlib import Path

import numpy as np

from device_agent.data.array_files import IN_MEMORY_BYTES, LABELS, SAMPLES, FileArray
from device_agent.data.csv_windows import windows_of
from device_agent.data.data_source import CSV
from device_agent.data.pictures import check_pillow, pictures_of, visible
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.preprocessing import Images, Preprocessing
from device_agent.system.disk_space import NpyWriter, open_npy
from profiles.errors import DataError


def check_files(source: Path) -> None:
    """Check the owner's files before a bundle is known.

    Raises:
        DataError: `source` does not exist or is empty.
        InputError: Pictures need a package that is not installed.
    """
    if source.is_dir() and not visible(source):
        raise DataError(
            "{path} is empty. The folder must contain x.npy and y.npy, or CSV files, or a folder "
            "of pictures for each class.",
            code="data.missing-file",
            path=str(source),
        )
    if not source.exists():
        raise DataError("{path} does not exist.", code="data.missing-file", path=str(source))
    if source.is_dir() and any(path.is_dir() for path in visible(source)):
        check_pillow()


def prepare(
    source: Path,
    preprocessing: Preprocessing | None,
    sample_shape: tuple[int, ...],
    labels: LabelRule,
    to: Path | None,
) -> dict[str, FileArray]:
    """Convert the owner's files to samples and labels.

    Args:
        source: A CSV file, a folder of CSV files, or a folder with a folder of pictures for each
            class.
        preprocessing: The bundle's rule for such files; None if it has no rule.
        sample_shape: Shape of one sample.
        labels: The labels that the model takes.
        to: Folder for samples that take more than `IN_MEMORY_BYTES`. Without this folder they are
            in memory.

    Returns:
        `x` (n, *sample_shape) float32, and `y` (n, *labels.shape).

    Raises:
        DataError: The bundle does not take files of this kind, or a file cannot be used.
        InputError: Pictures need a package that is not installed.
        OSError: The disk is full.
    """
    check_files(source)
    if preprocessing is None:
        raise not_prepared(source)
    if isinstance(preprocessing, Images):
        if not source.is_dir():
            raise wrong_kind(source, "pictures, in a folder for each class")
        y, pieces = pictures_of(source, preprocessing, sample_shape)
    else:
        files = [source]
        if source.is_dir():
            files = [path for path in visible(source) if path.suffix.lower() == CSV]
        if not files:
            raise wrong_kind(source, "CSV files")
        y, pieces = windows_of(files, preprocessing, sample_shape, labels.dtype)
    y = y.reshape(-1, *(labels.shape or ()))
    shape = (len(y), *sample_shape)
    if to is None or 4 * np.prod(shape) <= IN_MEMORY_BYTES:
        x = np.empty(shape, np.float32)
        at = 0
        for piece in pieces:
            x[at : at + len(piece)] = piece
            at += len(piece)
        return {SAMPLES: x, LABELS: y}
    to.mkdir(exist_ok=True)
    writer = NpyWriter(to / "x.prepared.npy", np.dtype(np.float32), shape)
    for piece in pieces:
        writer.append(piece)
    writer.close()
    return {SAMPLES: open_npy(writer.path), LABELS: y}


def not_prepared(source: Path) -> DataError:
    """The error for pictures or CSV files if the bundle has no rule for them."""
    return DataError(
        "{path}: this bundle takes only arrays, such as an .npz file with x and y. Its "
        "federation does not define how pictures or CSV files become samples.",
        code="data.not-prepared",
        path=str(source),
    )


def wrong_kind(source: Path, wanted: str) -> DataError:
    """The error for files of a kind that the bundle does not take."""
    return DataError(
        "{source}: this bundle takes {wanted}, or an .npz file with x and y.",
        code="data.wrong-kind",
        kind=source.suffix or "folder",
        source=source,
        wanted=wanted,
    )
