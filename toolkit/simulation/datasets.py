"""Reads files of public datasets: CIFAR (binary), MNIST, Tiny-ImageNet and LEAF (JSON).

CIFAR: https://www.cs.toronto.edu/~kriz/cifar.html; LEAF: Caldas et al., 2019, arXiv:1812.01097.
"""

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from device_agent.data.pictures import check_pillow, read_picture, visible
from device_agent.formats.preprocessing import Images, misfit
from profiles.errors import DataError
from profiles.text_formatting import said_by
from toolkit.coordinator.federation_file.simulation_table import Format

SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
BRIGHTEST = 255.0


class Cifar(NamedTuple):
    """The files of CIFAR-10 or CIFAR-100. A record has the labels, one byte each, then the pixels.

    The last label is the class; the first label of CIFAR-100 is a group of classes. `mean` and
    `std` describe the training samples, for each channel.
    """

    train: Sequence[str]
    test: str
    labels: int
    mean: Sequence[float]
    std: Sequence[float]


CIFAR: dict[Format, Cifar] = {
    "cifar10": Cifar(
        train=[f"data_batch_{number}.bin" for number in range(1, 6)],
        test="test_batch.bin",
        labels=1,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Cifar(
        train=["train.bin"],
        test="test.bin",
        labels=2,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


MNIST = "train", "t10k"
IMAGES_HEADER, LABELS_HEADER = 16, 8
"""Bytes before the first pixel and before the first label of MNIST's files."""

TINY_MEAN, TINY_STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
"""Mean and standard deviation of each channel of Tiny-ImageNet's training samples."""


class LeafUser(msgspec.Struct):
    """The samples of one writer, each a list of numbers, and their classes."""

    x: list[list[float]]
    y: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class LeafFile(msgspec.Struct):
    """The part of a LEAF JSON file that is used."""

    user_data: dict[str, LeafUser]


@dataclass(frozen=True)
class Samples:
    """Samples of a dataset.

    Attributes:
        x: Values, shape (n, *sample shape), float32.
        y: Classes, shape (n,), int64.
        writers: For each sample, the index of the person who wrote it, shape (n,); None if not
            known.
    """

    x: np.ndarray
    y: np.ndarray
    writers: np.ndarray | None = None


def read_dataset(format_: Format, folder: Path, shape: tuple[int, ...]) -> tuple[Samples, Samples]:
    """Read a dataset's training and test samples from its folder.

    Pixels are scaled to 0..1. Pixels of CIFAR and Tiny-ImageNet then become (value - mean) / std
    for each channel. LEAF's numbers are not changed. Samples of MNIST and LEAF are reshaped to
    `shape`.

    Args:
        format_: The dataset, by the format of its files.
        folder: The dataset's folder: the files of CIFAR or MNIST, the folders train/ and test/ of
            LEAF, or Tiny-ImageNet with wnids.txt. The test samples of Tiny-ImageNet are the samples
            in val/.
        shape: Shape of the model's samples.

    Raises:
        DataError: A file is missing, or is not in this format.
        InputError: Tiny-ImageNet needs Pillow, which is not installed.

    Examples:
        >>> train, test = read_dataset("cifar10", Path("cifar-10-batches-bin"), (3, 32, 32))
        >>> train.x.shape, test.x.shape
        ((50000, 3, 32, 32), (10000, 3, 32, 32))
    """
    if format_ == "leaf":
        return _read_leaf(folder / "train", shape), _read_leaf(folder / "test", shape)
    if format_ == "mnist":
        train, test = (_read_mnist(folder / part, shape) for part in MNIST)
        return train, test
    if format_ == "tiny-imagenet":
        return _read_tiny_imagenet(folder, shape)
    files = CIFAR[format_]
    return _read_cifar(folder, files.train, files), _read_cifar(folder, [files.test], files)


def _read_cifar(folder: Path, names: Sequence[str], files: Cifar) -> Samples:
    size = files.labels + PIXELS
    parts = [_records(folder / name, size) for name in names]
    x = np.empty((sum(map(len, parts)), CHANNELS, SIDE, SIDE), np.float32)
    np.concatenate([part[:, files.labels :] for part in parts], out=x.reshape(-1, PIXELS))
    scale = np.asarray(files.std, np.float32).reshape(-1, 1, 1)
    x /= BRIGHTEST * scale
    x -= np.asarray(files.mean, np.float32).reshape(-1, 1, 1) / scale
    return Samples(
        x, np.concatenate([part[:, files.labels - 1] for part in parts]).astype(np.int64)
    )


def _records(path: Path, size: int, header: int = 0) -> np.ndarray:
    """The records of a file after its header, as bytes of shape (n, size)."""
    content = _content(path)[header:]
    if not content or len(content) % size:
        raise DataError(
            "{path} has {bytes} bytes after its header of {header} bytes. These must be whole "
            "records of {size} bytes, at least one. Download the dataset again.",
            code="data.dataset-file",
            path=str(path),
            bytes=len(content),
            header=header,
            size=size,
        )
    return np.frombuffer(content, np.uint8).reshape(-1, size)


def _content(path: Path) -> bytes:
    """The content of the file, or the unpacked content of `path`.gz."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        if not path.exists() and packed.exists():
            return gzip.decompress(packed.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "{path} cannot be read: {reason}. `data` must be the dataset's folder, with the files "
            "as they are distributed.",
            code="data.dataset-file",
            path=str(path),
            reason=said_by(error),
        ) from None


def _read_mnist(path: Path, shape: tuple[int, ...]) -> Samples:
    """Read the images and labels whose names begin with `path`."""
    x = _records(path.with_name(f"{path.name}-images-idx3-ubyte"), math.prod(shape), IMAGES_HEADER)
    y = _records(path.with_name(f"{path.name}-labels-idx1-ubyte"), 1, LABELS_HEADER)
    if len(x) != len(y):
        raise DataError(
            "{folder}: {name} has {images} images but {labels} labels. Download the dataset again. "
            "An image has 28 x 28 pixels: `input_shape` must have 784 elements.",
            code="data.dataset-file",
            path=str(path),
            folder=path.parent,
            name=path.name,
            images=len(x),
            labels=len(y),
        )
    scaled = (x / np.float32(BRIGHTEST)).reshape(-1, *shape)
    return Samples(scaled, y[:, 0].astype(np.int64))


def _read_tiny_imagenet(folder: Path, shape: tuple[int, ...]) -> tuple[Samples, Samples]:
    check_pillow()
    classes = _content(folder / "wnids.txt").decode(errors="replace").split()
    train = [
        (picture, label)
        for label, name in enumerate(classes)
        for picture in visible(folder / "train" / name / "images")
    ]
    annotations = folder / "val" / "val_annotations.txt"
    test = []
    for line in _content(annotations).decode(errors="replace").splitlines():
        name, label, *_ = [*line.split("\t"), ""]
        if label not in classes:
            raise DataError(
                '{path}: the line "{line}" names no class of wnids.txt. Download the dataset '
                "again.",
                code="data.dataset-file",
                path=str(annotations),
                line=line[:80],
            )
        test.append((folder / "val" / "images" / name, classes.index(label)))
    images = Images(classes=tuple(classes), mean=TINY_MEAN, std=TINY_STD)
    wrong = misfit(images, shape, "float32")
    if wrong is not None:
        raise DataError(
            "Tiny-ImageNet does not fit the model: {problem}.",
            code="data.wrong-shape",
            problem=wrong,
        )
    return _pictures(train, images, shape), _pictures(test, images, shape)


def _pictures(
    pictures: Sequence[tuple[Path, int]], images: Images, shape: tuple[int, ...]
) -> Samples:
    x = np.empty((len(pictures), *shape), np.float32)
    for row, (path, _) in zip(x, pictures, strict=True):
        row[:] = read_picture(path, images, shape)
    return Samples(x, np.asarray([label for _, label in pictures], np.int64))


def _read_leaf(folder: Path, shape: tuple[int, ...]) -> Samples:
    x: list[np.ndarray] = []
    y: list[int] = []
    writers: list[int] = []
    numbers: dict[str, int] = {}
    for path in sorted(folder.glob("*.json")):
        # Convert file by file: as Python numbers, it takes eight times the memory of an array.
        for name, user in _users(path).items():
            if len(user.x) != len(user.y) or any(len(row) != math.prod(shape) for row in user.x):
                raise DataError(
                    '{path}: the user "{user}" must have as many labels as samples, and {numbers} '
                    "numbers in each sample, as `input_shape` says.",
                    code="data.dataset-file",
                    path=str(path),
                    user=name,
                    numbers=math.prod(shape),
                )
            x.append(np.asarray(user.x, np.float32).reshape(len(user.y), *shape))
            y += user.y
            writers += [numbers.setdefault(name, len(numbers))] * len(user.y)
    if not y:
        raise DataError(
            "{path} has no .json file with samples. `data` must be the folder that LEAF's "
            "preprocess.sh fills with train/ and test/.",
            code="data.dataset-file",
            path=str(folder),
        )
    return Samples(np.concatenate(x), np.asarray(y, np.int64), np.asarray(writers))


def _users(path: Path) -> dict[str, LeafUser]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LeafFile).user_data
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            "{path} is not a LEAF file with lists of numbers: {reason}.",
            code="data.dataset-file",
            path=str(path),
            reason=str(error),
        ) from None
