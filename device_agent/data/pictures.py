"""Samples from pictures: decoded, turned upright, scaled and normalised."""

import importlib.util
import math
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from device_agent.data.data_checks import not_readable, unknown_class
from device_agent.data.normalisation import composed, normalised
from device_agent.formats.preprocessing import Images
from profiles.errors import DataError, InputError
from profiles.text_formatting import said_by

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = np.array([0.299, 0.587, 0.114])
"""Shares of red, green and blue in a grey value (ITU-R BT.601)."""

MOST_POINTS = 10**8
"""A picture with more points is refused: it would take 300 MB or more."""


def pictures_of(
    folder: Path, images: Images, sample_shape: tuple[int, ...]
) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Read labels and samples from the pictures in `folder`, sorted by class and then by name.

    Args:
        folder: A folder with one subfolder for each class. A class without pictures needs no
            subfolder. Hidden files are left out.
        images: How pictures become samples.
        sample_shape: (channels, height, width).

    Returns:
        The labels y (n,), int64, and the samples x (n, *sample_shape), float32. x is yielded one
        picture at a time.

    Raises:
        DataError: The model has no class with the name of a folder, or a file is not a picture.
        InputError: Pillow is missing.
    """
    classes = [composed(name) for name in images.classes]
    pictures: list[tuple[Path, int]] = []
    for subfolder in visible(folder):
        if not subfolder.is_dir():
            raise DataError(
                "{file} is not in the folder of a class. Give a folder that has a subfolder of "
                "pictures for each of the classes {classes}.",
                code="data.unknown-class",
                name=subfolder.name[:40],
                classes=list(images.classes),
                file=subfolder,
            )
        if composed(subfolder.name) not in classes:
            raise unknown_class(str(folder), subfolder.name, images.classes)
        pictures += [(file, classes.index(composed(subfolder.name))) for file in visible(subfolder)]
    pictures.sort(key=lambda pair: pair[1])  # stable: names stay in order
    check_pillow()
    y = np.array([label for _, label in pictures], np.int64)
    return y, (read_picture(file, images, sample_shape)[None] for file, _ in pictures)


def visible(folder: Path) -> list[Path]:
    """The files and folders in `folder`, sorted, without hidden files such as .DS_Store.

    Raises:
        DataError: The folder cannot be read.
    """
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise not_readable(folder, error) from None


def check_pillow() -> None:
    """Raise InputError if Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError(
            "Pictures need the package Pillow. Run pip install 'edgetailor[images]', or "
            "pip install pillow.",
            code="program.missing-package",
            package="pillow",
            extra="images",
        )


def read_picture(file: Path, images: Images, sample_shape: tuple[int, ...]) -> np.ndarray:
    """Read a picture as a sample (channels, height, width).

    Raises:
        DataError: The file is not a picture, or has too many pixels.
    """
    from PIL import Image

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is not a file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # real problems raise errors
            with Image.open(file) as opened:
                if opened.width * opened.height > MOST_POINTS:
                    raise ValueError(f"it has {opened.width} x {opened.height} pixels, too many")
                if opened.mode == "F" or (opened.mode == "I" and opened.format == "TIFF"):
                    raise ValueError("its values have no known range")
                return sample_of(upright(opened), images, sample_shape)
    except (KeyboardInterrupt, MemoryError):
        raise
    except PermissionError as error:
        raise not_readable(file, error) from None
    except Exception as error:  # decoders raise a dozen kinds for damaged files
        raise DataError(
            "{path} is not a picture that Pillow can read: {reason}. Remove it or convert it.",
            code="data.unreadable-file",
            path=str(file),
            reason=said_by(error).rstrip("."),
        ) from None


def upright(picture: "Image") -> "Image":
    """Turn `picture` as its EXIF data say. If these data are damaged, return it unchanged."""
    from PIL import ImageOps

    picture.load()
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # damaged EXIF data do not make a picture unusable
        return picture


def sample_of(picture: "Image", images: Images, sample_shape: tuple[int, ...]) -> np.ndarray:
    """Scale and normalise a decoded picture to a sample (channels, height, width)."""
    channels, *size = sample_shape
    points = (picture.height, picture.width)
    scale = min(points[axis] / size[axis] for axis in (0, 1))
    rows, columns = (
        filters(points[axis], size[axis], size[axis] * scale if images.fit == "crop" else None)
        for axis in (0, 1)
    )
    # Scale band by band, so that only one band is in memory as numbers.
    down = [
        np.tensordot(weights, values_of(picture.crop((0, a, picture.width, b))), 1)
        for (a, b), weights in rows
    ]
    across = np.array(down).transpose(1, 0, 2)  # (W, height, 3)
    values = np.array([np.tensordot(weights, across[a:b], 1) for (a, b), weights in columns])
    values = values.transpose(1, 0, 2) / 255
    if channels == 1:
        values = (values @ GREY)[..., None]
    return normalised(values, images.mean, images.std).transpose(2, 0, 1)


def values_of(band: "Image") -> np.ndarray:
    """Convert `band`, some rows of a picture, to red, green and blue values from 0 to 255.

    The result has the shape (height, width, 3), in float64.
    """
    from PIL import Image

    if band.mode.startswith("I"):  # 16 bits for a point; Pillow would cut values off at 255
        band = Image.fromarray((np.asarray(band) >> 8).astype(np.uint8))
    if band.has_transparency_data:
        clear = band.convert("RGBA")  # transparent points become black, as on a page
        band = Image.alpha_composite(Image.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
    return np.asarray(band.convert("RGB"), np.float64)


def filters(
    points: int, size: int, taken: float | None
) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Compute the weights that scale one axis of a picture from `points` to `size` pixels.

    Only the `taken` pixels in the middle of the axis are used. If `taken` is None, all pixels are
    used. The weight of an old pixel decreases linearly with its distance from the centre of the new
    pixel. If the picture shrinks, the weight reaches 0 at the distance between two new pixels. If
    the picture grows, the weight reaches 0 at the distance between two old pixels.

    Returns:
        For each new pixel, the range of old pixels and the weights of these pixels. The sum of the
        weights is 1.
    """
    length = float(points) if taken is None else taken
    step = length / size
    reach = max(step, 1.0)
    rows = []
    for position in range(size):
        centre = (points - length) / 2 + (position + 0.5) * step
        first = max(0, math.ceil(centre - reach - 0.5))
        last = min(points - 1, math.floor(centre + reach - 0.5))
        weights = 1 - np.abs(np.arange(first, last + 1) + 0.5 - centre) / reach
        weights = np.maximum(weights, 0)
        rows.append(((first, last + 1), weights / weights.sum()))
    return rows
