"""Reads samples without labels, for predictions: arrays, pictures or CSV files of a sensor."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_agent.data.array_files import SAMPLES, as_array, read_arrays
from device_agent.data.csv_windows import unlabelled_windows
from device_agent.data.data_source import CSV
from device_agent.data.packed_arrays import array_names, packed_array
from device_agent.data.pictures import check_pillow, read_picture, visible
from device_agent.data.preparation import not_prepared, wrong_kind
from device_agent.formats.manifest import Part
from device_agent.formats.preprocessing import Images, Preprocessing, Series
from profiles.errors import DataError

ARRAYS = (".npy", ".npz")

OnError = Callable[[DataError], object]
"""Is called with the error of a file that cannot be used."""


@dataclass(frozen=True)
class UnlabelledFile:
    """The samples of one file.

    Attributes:
        name: Name of the file.
        x: The samples (n, *sample shape).
        unit: The word for a sample of the file, such as "sample" or "window".
    """

    name: str
    x: np.ndarray
    unit: str = "sample"

    def title(self, index: int) -> str:
        """The name of the sample `index`: the file's name, with a number if there are several."""
        return self.name if len(self.x) == 1 else f"{self.name}, {self.unit} {index + 1}"


def shown(name: str) -> str:
    """The name of a file as printable text. Names may contain any bytes, such as line breaks.

    Examples:
        >>> shown("a\\nb.png")
        'a?b.png'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def read_unlabelled(
    source: Path,
    preprocessing: Preprocessing | None,
    sample_shape: tuple[int, ...],
    on_error: OnError | None = None,
    parts: Sequence[Part] = (),
) -> Iterator[UnlabelledFile]:
    """Read the samples of a file, or of all files in a folder. Subfolders may contain pictures.

    Args:
        source: An .npy file, an .npz file with `x`, or a folder with x.npy. If `preprocessing` is
            given, a picture, a CSV file, or a folder of pictures or CSV files is also allowed.
        preprocessing: The bundle's rule for pictures or CSV files; None if it has no rule.
        sample_shape: Shape of one sample.
        on_error: Called with the error of each file in a folder that cannot be used. Without
            `on_error`, the first such error is raised.
        parts: The arrays `x_NAME` that are packed into the samples. Empty if the samples are one
            array `x`.

    Yields:
        One file at a time.

    Raises:
        DataError: There is no such file, or it cannot be read.
        InputError: Pictures need a package that is not installed.
        StorageError: A compressed array is too large for the disk of temporary files.
    """
    if not source.exists():
        raise DataError("{path} does not exist.", code="data.missing-file", path=str(source))
    names = array_names(SAMPLES, parts)
    if (source / f"{names[0]}.npy").is_file() or (source.suffix in ARRAYS and not source.is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            arrays = read_arrays(source, Path(folder) / "unpacked", names)
            x = as_array(packed_array(SAMPLES, arrays, parts, str(source)))
            yield UnlabelledFile(shown(source.name), x)
    elif preprocessing is None:
        raise not_prepared(source)
    elif isinstance(preprocessing, Images):
        yield from _pictures(source, preprocessing, sample_shape, on_error)
    else:
        yield from _windows(source, preprocessing, sample_shape, on_error)


def _readable(
    files: Sequence[Path], read: Callable[[Path], UnlabelledFile], on_error: OnError | None
) -> Iterator[UnlabelledFile]:
    """Read each of `files`. See `read_unlabelled` for errors."""
    for file in files:
        try:
            samples = read(file)
        except DataError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            yield samples


def _pictures(
    source: Path, images: Images, sample_shape: tuple[int, ...], on_error: OnError | None
) -> Iterator[UnlabelledFile]:
    check_pillow()
    if not source.is_dir():
        yield UnlabelledFile(shown(source.name), read_picture(source, images, sample_shape)[None])
        return
    files = [file for file in visible(source) if not file.is_dir()]
    folders = [folder for folder in visible(source) if folder.is_dir()]
    files += [file for folder in folders for file in visible(folder) if not file.is_dir()]
    if not files:
        raise wrong_kind(source, "pictures")

    def read(file: Path) -> UnlabelledFile:
        name = shown(str(file.relative_to(source)))
        return UnlabelledFile(name, read_picture(file, images, sample_shape)[None])

    yield from _readable(files, read, on_error)


def _windows(
    source: Path, series: Series, sample_shape: tuple[int, ...], on_error: OnError | None
) -> Iterator[UnlabelledFile]:
    files = [source]
    if source.is_dir():
        files = [path for path in visible(source) if path.suffix.lower() == CSV]
    if not files or any(file.suffix.lower() != CSV for file in files):
        raise wrong_kind(source, "CSV files")
    length = math.prod(sample_shape) // len(series.columns)

    def read(file: Path) -> UnlabelledFile:
        x = unlabelled_windows(file, series, sample_shape)
        if not len(x):
            raise DataError(
                "{file} has fewer lines than a sample, which is a window of {window}.",
                code="data.too-few-samples",
                samples=0,
                window=length,
                file=file.name,
            )
        return UnlabelledFile(shown(file.name), x, "window")

    yield from _readable(files, read, on_error if source.is_dir() else None)


def suffix_of(head: bytes, preprocessing: Preprocessing | None) -> str:
    """The file suffix for the format of a file whose first bytes are `head`.

    An unknown format gets the suffix of the files that `preprocessing` reads.
    """
    if head.startswith(b"\x93NUMPY"):
        return ".npy"
    if head.startswith(b"PK"):
        return ".npz"
    return CSV if isinstance(preprocessing, Series) else ""
