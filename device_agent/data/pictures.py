"""Samples from pictures: decoded, turned upright, scaled and normalised."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from device_agent.data.data_checks import unknown_class
from device_agent.data.normalisation import normalised
from device_agent.formats.preprocessing import Images
from profiles.errors import DataError, InputError

GREY = np.array([0.299, 0.587, 0.114])
"""Shares of red, green and blue in a grey value (ITU-R BT.601)."""

MOST_POINTS = 2**27
"""A picture with more points is refused: decoding it would take gigabytes."""


def pictures_of(
    folder: Path, images: Images, sample_shape: tuple[int, ...]
) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Labels and samples of the pictures in `folder`, by class and then by name.

    Args:
        folder: Holds one folder for each class. Hidden files are left out.
        images: How pictures become samples.
        sample_shape: (channels, height, width).

    Returns:
        y (n,) int64, and x (n, *sample_shape) float32, one picture at a time.

    Raises:
        DataError: A folder is no class, a file is no picture, or Pillow is missing.
    """
    found: list[tuple[Path, int]] = []
    for one in sorted(visible(folder)):
        if not one.is_dir():
            raise DataError(
                f"{one} is not in the folder of its class. Put pictures of "
                f"{images.classes[0]} into {folder / images.classes[0]}, and so on.",
                code="data.unknown-class",
                name=one.name[:40],
                classes=list(images.classes),
            )
        if one.name not in images.classes:
            raise unknown_class(str(folder), one.name, images.classes)
        found += [(file, images.classes.index(one.name)) for file in sorted(visible(one))]
    found.sort(key=lambda pair: pair[1])  # stable: names stay in order
    check_pillow()
    y = np.array([label for _, label in found], np.int64)
    return y, (read_picture(file, images, sample_shape)[None] for file, _ in found)


def visible(folder: Path) -> Iterator[Path]:
    """What is in `folder`, without hidden files such as .DS_Store."""
    return (one for one in folder.iterdir() if not one.name.startswith("."))


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
    """The sample (channels, height, width) of one picture.

    Raises:
        DataError: The file is no picture, or has too many points.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            if opened.width * opened.height > MOST_POINTS:
                raise ValueError(f"it has {opened.width} x {opened.height} points, too many")
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            # What is transparent becomes black, as on a page.
            clear = upright.convert("RGBA")
            points = Image.alpha_composite(Image.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
            values = np.asarray(points)[..., :3]
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{file} is not a picture that Pillow can read: {error}. Remove it or convert it.",
            code="data.unreadable-file",
            path=str(file),
            reason=str(error),
        ) from None
    return sample_of(values, images, sample_shape)


def sample_of(values: np.ndarray, images: Images, sample_shape: tuple[int, ...]) -> np.ndarray:
    """The sample (channels, height, width) of a picture (H, W, 3) with values from 0 to 255."""
    channels, *size = sample_shape
    crop = images.fit == "crop"
    scale = min(values.shape[axis] / size[axis] for axis in (0, 1))
    for axis in (0, 1):
        taken = size[axis] * scale if crop else float(values.shape[axis])
        values = scaled(values, axis, (values.shape[axis] - taken) / 2, taken, size[axis])
    values = values / 255
    if channels == 1:
        values = (values @ GREY)[..., None]
    return normalised(values, images.mean, images.std).transpose(2, 0, 1)


def scaled(values: np.ndarray, axis: int, start: float, length: float, size: int) -> np.ndarray:
    """Scale the range [start, start + length) of `axis` to `size` points, in float64.

    A triangle filter: the weight of a point falls linearly with its distance from the centre of the
    new one, to 0 at the distance of one new point, or of one old point if the picture grows.
    """
    step = length / size
    reach = max(step, 1.0)
    moved = np.moveaxis(values, axis, 0)
    made = np.empty((size, *moved.shape[1:]))
    for place in range(size):
        taps, weights = filter_at(start + (place + 0.5) * step, reach, len(moved))
        made[place] = np.tensordot(weights, moved[taps].astype(np.float64), 1)
    return np.moveaxis(made, 0, axis)


def filter_at(centre: float, reach: float, size: int) -> tuple[slice, np.ndarray]:
    """The points that a new point at `centre` is made of, and their weights, whose sum is 1."""
    first = max(0, int(np.ceil(centre - reach - 0.5)))
    last = min(size - 1, int(np.floor(centre + reach - 0.5)))
    weights = 1 - np.abs(np.arange(first, last + 1) + 0.5 - centre) / reach
    weights = np.maximum(weights, 0)
    return slice(first, last + 1), weights / weights.sum()
