"""Files of arrays that are damaged, hostile or of another version."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bundles import SAMPLE_SHAPE, read_data, samples, write_data
from refusals import refused

X = np.zeros((4, *SAMPLE_SHAPE), np.float32)
Y = np.array([0, 1, 2, 0])


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "opened"
    path = tmp_path / "local.npz"
    np.savez(path, x=np.array([Opens(str(marker))], object), y=Y)
    with refused("data.unreadable-file", path=str(path)):
        read_data(path)
    path.write_bytes(pickle.dumps(Opens(str(marker))))
    with refused("data.unreadable-file", path=str(path)):
        read_data(path)
    assert not marker.exists()


class Opens:
    """Creates the file `name` when it is unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.name, "w")


def damaged(folder: Path, kind: str) -> Path:
    path = write_data(folder / "local.npz")
    data = path.read_bytes()
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("x,y\n1,2\n")
        case "truncated":
            path.write_bytes(data[:-100])
        case "flipped":
            path.write_bytes(data[:500] + bytes([data[500] ^ 255]) + data[501:])
        case "compressed":
            x, y = samples(21, seed=0)
            np.savez_compressed(path, x=x, y=y)
            data = path.read_bytes()
            path.write_bytes(data[:100] + bytes(50) + data[150:])
        case "encrypted":
            flags = data.index(b"PK\x01\x02") + 8  # those of the first entry in the list of files
            path.write_bytes(data[:flags] + b"\x01" + data[flags + 1 :])
        case "single array":
            np.save(folder / "single.npy", np.zeros(3, np.float32))
            path = folder / "single.npy"
        case "folder":
            path.unlink()
            path.mkdir()
    return path


@pytest.mark.parametrize(
    "kind",
    ["empty", "text", "truncated", "flipped", "compressed", "encrypted", "single array", "folder"],
)
def test_files_that_are_no_npz(tmp_path: Path, kind: str) -> None:
    path = damaged(tmp_path, kind)
    code = "data.missing-file" if kind == "folder" else "data.unreadable-file"
    with refused(code, path=str(path)) as error:
        read_data(path)
    words = {
        "folder": "is empty. The folder must contain",
        "single array": "is a single array, but",
    }.get(kind, "is not a readable .npz file")
    assert words in str(error.value)


def with_header(header: str, numbers: bytes, version: int = 1) -> bytes:
    """A .npy file with this header, in the layout of its format's specification."""
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode("latin1") + numbers


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s)}"
IMPOSSIBLE = "its header names the impossible shape "
NO_HEADER = "its header is not that of a .npy file"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            with_header(HEADER % "-4, 1, 6, 6", X.tobytes()),
            IMPOSSIBLE + "(-4, 1, 6, 6) of float32",
        ),
        (with_header(HEADER % "4, -1, 6, 6", X.tobytes()), IMPOSSIBLE + "(4, -1, 6, 6)"),
        (with_header(HEADER % f"{2**70}, 0", b""), IMPOSSIBLE),
        (with_header(HEADER % "True, 1, 6, 6", X.tobytes()), IMPOSSIBLE),
        (with_header(HEADER.replace("<f4", "|V0") % "4, 1", b""), IMPOSSIBLE),
        (with_header(HEADER % "4, 1, 6, 6", X.tobytes()[:-1]), "it is truncated"),
        (with_header(HEADER % "4, 1, 6, 6", X.tobytes(), version=9), NO_HEADER),
        (with_header(HEADER % "exit(), 1", X.tobytes()), NO_HEADER),
        (with_header(HEADER % f"4, {' ' * 20_000}1", X.tobytes(), version=2), NO_HEADER),
        (with_header("(" * 5_000, X.tobytes(), version=2), NO_HEADER),
        (b"", NO_HEADER),
    ],
)
def test_data_that_are_no_arrays(
    tmp_path: Path, data: bytes, message: str, compression: int
) -> None:
    path = tmp_path / "local.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", data)
        with archive.open("y.npy", "w") as labels:
            np.save(labels, Y)
    with refused("data.unreadable-file", path=str(path)) as error:
        read_data(path)
    assert str(error.value.values["reason"]).startswith(f"array x: {message}")
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "x.npy").write_bytes(data)
    np.save(folder / "y.npy", Y)
    with refused("data.unreadable-file", path=str(folder)) as error:
        read_data(folder)
    assert str(error.value.values["reason"]).startswith(message)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("shape", ["4, 1, 6, 6", "4L, 1L, 6L, 6L"], ids=["3.0", "of Python 2"])
def test_arrays_of_other_versions(
    tmp_path: Path, shape: str, compression: int, recwarn: pytest.WarningsRecorder
) -> None:
    data = with_header(HEADER % shape, X.tobytes(), version=1 if "L" in shape else 3)
    with zipfile.ZipFile(tmp_path / "local.npz", "w", compression) as archive:
        archive.writestr("x.npy", data)
        with archive.open("y.npy", "w") as labels:
            np.save(labels, Y)
    np.testing.assert_array_equal(read_data(tmp_path / "local.npz")[0], X)
    assert not recwarn.list
