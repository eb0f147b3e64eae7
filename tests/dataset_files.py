"""Small files in the formats of public datasets, with random content."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
from PIL import Image

from toolkit.coordinator.federation_file.simulation_table import Format

CIFAR: dict[str, list[str]] = {
    "cifar10": [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"],
    "cifar100": ["train.bin", "test.bin"],
}


def write_cifar(folder: Path, format_: Format, draw: np.random.Generator, samples: int = 8) -> None:
    """Files of `samples` random images each."""
    fine = 100 if format_ == "cifar100" else 10
    for name in CIFAR[format_]:
        records = b""
        for _ in range(samples):
            labels = [int(draw.integers(20))] if format_ == "cifar100" else []
            records += bytes([*labels, int(draw.integers(fine))]) + draw.bytes(3072)
        (folder / name).write_bytes(records)


def write_leaf(
    folder: Path, draw: np.random.Generator, writers: int = 6
) -> dict[str, dict[str, list[float]]]:
    """FEMNIST's training files, two with half of the writers each, and a test file of all.

    Returns the training data.
    """
    written: dict[str, dict[str, list[float]]] = {}
    for part, files in (("train", 2), ("test", 1)):
        (folder / part).mkdir(parents=True)
        for number in range(files):
            users = {}
            each = writers // files
            for name in range(number * each, (number + 1) * each):
                labels = draw.integers(62, size=draw.integers(2, 7)).tolist()
                rows = draw.random((len(labels), 784)).round(4).tolist()
                users[f"f{name:04}_{name}"] = {"x": rows, "y": labels}
            content = {
                "users": list(users),
                "num_samples": [len(user["y"]) for user in users.values()],
                "user_data": users,
            }
            (folder / part / f"all_data_{number}_niid_0.json").write_text(json.dumps(content))
            written |= users if part == "train" else {}
    return written


def write_mnist(
    folder: Path, draw: np.random.Generator, samples: int = 200
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Packed training files and unpacked test files; returns their bytes by part."""
    written: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for part, pack in (("train", gzip.compress), ("t10k", bytes)):
        x = draw.integers(256, size=(samples, 28, 28), dtype=np.uint8)
        y = draw.integers(10, size=samples, dtype=np.uint8)
        images = struct.pack(">4i", 2051, samples, 28, 28) + x.tobytes()
        labels = struct.pack(">2i", 2049, samples) + y.tobytes()
        end = ".gz" if part == "train" else ""
        (folder / f"{part}-images-idx3-ubyte{end}").write_bytes(pack(images))
        (folder / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(labels))
        written[part] = x, y
    return written


def write_tiny_imagenet(
    folder: Path, draw: np.random.Generator, classes: int = 200
) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """Two training pictures and one test picture of each class.

    Returns class and pixels by part and name.
    """
    names = [f"n{number:08}" for number in draw.permutation(classes)]
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    (folder / "val" / "images").mkdir(parents=True)
    written: dict[str, dict[str, tuple[str, np.ndarray]]] = {"train": {}, "val": {}}
    lines = []
    for index, name in enumerate(names):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "train" / name / f"{name}_boxes.txt").write_text("a box\n")
        files = [folder / "train" / name / "images" / f"{name}_{number}.JPEG" for number in (0, 1)]
        files.append(folder / "val" / "images" / f"val_{index}.JPEG")
        lines.append(f"val_{index}.JPEG\t{name}\t0\t32\t44\t62\n")
        for file in files:
            Image.fromarray(draw.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(file)
            part = "val" if file.parent.parent.name == "val" else "train"
            with Image.open(file) as picture:
                written[part][file.name] = name, np.asarray(picture.convert("RGB"))
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return written
