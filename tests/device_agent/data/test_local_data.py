"""Local data: which files, functions and arrays are refused, and how samples form batches."""

import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundles import CLASSES, SAMPLE_SHAPE, samples, write_data
from device_agent.data.data_functions import is_reference
from device_agent.data.local_data import load_data
from device_agent.formats.label_rule import LabelRule
from device_agent.training.batching import batches
from profiles.errors import DataError
from refusals import refused

Arrays = dict[str, np.ndarray]


def load(source: object) -> tuple[np.ndarray, np.ndarray]:
    local = load_data(str(source), SAMPLE_SHAPE, LabelRule(CLASSES))
    return local.x, local.y


def test_an_npz_file(tmp_path: Path) -> None:
    x, y = samples(21, seed=0)
    came = load(write_data(tmp_path / "local.npz", 21, seed=0))
    np.testing.assert_array_equal(came[0], x)
    np.testing.assert_array_equal(came[1], y)


X = np.zeros((4, *SAMPLE_SHAPE), np.float32)
Y = np.array([0, 1, 2, 0])


def with_one(array: np.ndarray, value: float) -> np.ndarray:
    copy = array.copy()
    copy.flat[1] = value
    return copy


SHAPES = "data.wrong-shape"
TYPES = "data.wrong-type"


def shapes(x: list[int], y: list[int]) -> dict[str, object]:
    return {"x_shape": x, "y_shape": y}


def types(x: str, y: str) -> dict[str, object]:
    return {"x_type": x, "y_type": y}


@pytest.mark.parametrize(
    ("arrays", "code", "values"),
    [
        ({"x": X[:, 0], "y": Y}, SHAPES, shapes([4, 6, 6], [4])),
        ({"x": X[:3], "y": Y}, SHAPES, shapes([3, 1, 6, 6], [4])),
        ({"x": X, "y": Y[:, None]}, SHAPES, shapes([4, 1, 6, 6], [4, 1])),
        ({"x": X[0], "y": Y[0]}, SHAPES, shapes([1, 6, 6], [])),
        ({"x": X.astype(np.float64), "y": Y}, TYPES, types("float64", "int64")),
        ({"x": X.astype(np.uint8), "y": Y}, TYPES, types("uint8", "int64")),
        ({"x": X, "y": Y.astype(np.int32)}, TYPES, types("float32", "int32")),
        ({"x": X, "y": Y.astype(np.float32)}, TYPES, types("float32", "float32")),
        (
            {"x": X, "y": with_one(Y, CLASSES)},
            "data.label-out-of-range",
            {"label": 8, "highest": 7},
        ),
        ({"x": X, "y": with_one(Y, -1)}, "data.label-out-of-range", {"label": -1, "highest": 7}),
        (
            {"x": with_one(X, np.nan), "y": Y},
            "data.not-finite",
            {"array": "x", "sample": 0, "number": "nan"},
        ),
        (
            {"x": with_one(X[::-1], np.inf)[::-1], "y": Y},
            "data.not-finite",
            {"array": "x", "sample": 3, "number": "inf"},
        ),
        ({"x": X[:1], "y": Y[:1]}, "data.too-few-samples", {"samples": 1, "needed": 2}),
        ({"x": X[:0], "y": Y[:0]}, "data.too-few-samples", {"samples": 0, "needed": 2}),
        ({"y": Y}, "data.missing-array", {"array": "x"}),
        ({"x": X}, "data.missing-array", {"array": "y"}),
    ],
)
def test_arrays_that_do_not_fit(
    tmp_path: Path, arrays: Arrays, code: str, values: dict[str, object]
) -> None:
    path = tmp_path / "local.npz"
    np.savez(path, **arrays)
    with refused(code, **values) as error:
        load(path)
    assert isinstance(error.value, DataError)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "advice"),
    [
        ({"x": X[:, 0], "y": Y}, "(n, 1, 6, 6)"),
        ({"x": X.astype(np.uint8), "y": Y}, "x.astype('float32')"),
        ({"x": X, "y": Y.astype(np.float32)}, "regression"),
    ],
)
def test_the_error_says_what_is_expected(tmp_path: Path, arrays: Arrays, advice: str) -> None:
    np.savez(tmp_path / "local.npz", **arrays)
    with pytest.raises(DataError) as error:
        load(tmp_path / "local.npz")
    assert advice in str(error.value)


WORDS = np.array([[0, 19], [3, 4], [1, 1]])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_whole_numbers(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "local.npz"
    np.savez(path, x=WORDS.astype(dtype), y=np.array([0, 1, 1]))
    local = load_data(str(path), (2,), LabelRule(1), "int64", 20)
    assert local.x.dtype == np.int64
    np.testing.assert_array_equal(local.x, WORDS)


NUMBERS, LABELS = "data.number-out-of-range", "data.label-out-of-range"


@pytest.mark.parametrize(
    ("x", "label", "code", "values"),
    [
        (WORDS + 1, 0, NUMBERS, {"number": 20, "highest": 19}),
        (WORDS - 1, 0, NUMBERS, {"number": -1}),
        (WORDS.astype(np.float32), 0, TYPES, types("float32", "int64")),
        (WORDS.astype(np.int16), 0, TYPES, types("int16", "int64")),
        (WORDS, 2, LABELS, {"label": 2, "highest": 1}),
        (WORDS, -1, LABELS, {"label": -1, "highest": 1}),
    ],
)
def test_whole_numbers_that_do_not_fit(
    tmp_path: Path, x: np.ndarray, label: int, code: str, values: dict[str, object]
) -> None:
    path = tmp_path / "local.npz"
    np.savez(path, x=x, y=np.array([0, 1, label]))
    with refused(code, **values):
        load_data(str(path), (2,), LabelRule(1), "int64", 20)


def test_whole_numbers_without_a_limit(tmp_path: Path) -> None:
    np.savez(tmp_path / "local.npz", x=WORDS * 1000, y=np.array([0, 1, 1]))
    assert load_data(str(tmp_path / "local.npz"), (2,), LabelRule(1), "int64").x.max() == 19_000


SEQUENCES = LabelRule(5, (3,), sequence=True)


def test_sequences(tmp_path: Path) -> None:
    y = np.array([[1, 1, 4], [2, -100, -100], [-100, -100, -100]])
    np.savez(tmp_path / "local.npz", x=np.zeros((3, 2), np.float32), y=y)
    came = load_data(str(tmp_path / "local.npz"), (2,), SEQUENCES)
    np.testing.assert_array_equal(came.y, y)


@pytest.mark.parametrize("wrong", [[-100, 1, 2], [1, -100, 2], [1, 0, 2], [0, -100, -100]])
def test_labels_that_are_no_sequence(tmp_path: Path, wrong: list[int]) -> None:
    """Of labels after a gap CTC would use only as many as count."""
    y = np.array([[1, 2, 3], [3, -100, -100], wrong, [-100, 1, 1]])
    np.savez(tmp_path / "local.npz", x=np.zeros((4, 2), np.float32), y=y)
    with refused("data.not-a-sequence", sample=2):
        load_data(str(tmp_path / "local.npz"), (2,), SEQUENCES)
    assert len(load_data(str(tmp_path / "local.npz"), (2,), LabelRule(5, (3,))).y) == 4


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "local.npz"
    with refused("data.missing-file", path=str(path)):
        load(path)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "opened"
    path = tmp_path / "local.npz"
    np.savez(path, x=np.array([Opens(str(marker))], object), y=Y)
    with refused("data.unreadable-file", path=str(path)):
        load(path)
    path.write_bytes(pickle.dumps(Opens(str(marker))))
    with refused("data.unreadable-file", path=str(path)):
        load(path)
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
            path.write_bytes(
                data.replace(b"PK\x01\x02\x2d\x03\x2d\x00\x00", b"PK\x01\x02\x2d\x03\x2d\x00\x01")
            )
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
        load(path)
    words = "is empty. A folder holds" if kind == "folder" else "is not a readable .npz file"
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
        load(path)
    assert str(error.value.values["reason"]).startswith(f"array x: {message}")
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "x.npy").write_bytes(data)
    np.save(folder / "y.npy", Y)
    with refused("data.unreadable-file", path=str(folder)) as error:
        load(folder)
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
    np.testing.assert_array_equal(load(tmp_path / "local.npz")[0], X)
    assert not recwarn.list


FUNCTIONS = """
import numpy as np

def good():
    return np.ones((4, 1, 6, 6), np.float32), np.array([0, 1, 2, 0])

def wrong():
    return np.ones((4, 2), np.float32), np.array([0, 1, 2, 0])

def ragged():
    return [[1.0], [1.0, 2.0]], [0, 1]

def alone():
    return 3

def broken():
    raise LookupError("the camera is off")

def named():
    return {"x": 1, "y": 2}

def masked():
    return np.ma.masked_equal(np.ones((4, 1, 6, 6), np.float32), 1), np.array([0, 1, 2, 0])

def wordy():
    raise ValueError("one\\n two\\x1b[31m three")

class Own(BaseException):
    def __str__(self):
        raise RuntimeError

def own():
    raise Own

def hungry():
    raise MemoryError("17 bytes")

def wandering():
    import os
    os.chdir("/")
    print("here I am")
    return good()

number = 3
"""


@pytest.fixture
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write modules of the device's owner into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "owners.py").write_text(FUNCTIONS)
    (tmp_path / "owners_raises.py").write_text("raise RuntimeError('no camera here')\n")
    (tmp_path / "owners_typo.py").write_text("def data(:\n")


@pytest.mark.usefixtures("owners")
def test_a_function_of_the_owners() -> None:
    x, y = load("owners:good")
    assert x.shape == (4, *SAMPLE_SHAPE)
    assert y.tolist() == [0, 1, 2, 0]


@pytest.mark.usefixtures("owners")
@pytest.mark.parametrize(
    ("source", "error", "reason"),
    [
        ("owners:ragged", "ValueError", ""),
        ("owners:alone", "TypeError", ""),
        ("owners:broken", "LookupError", r"the camera is off$"),
        ("owners:named", "TypeError", r"it must return x and y, not a mapping"),
        ("owners:masked", "TypeError", r"masked arrays are not supported"),
        ("owners:wordy", "ValueError", r"one two \[31m three$"),
        ("owners:own", "Own", r"it does not say why$"),
        ("owners:number", "TypeError", ""),
    ],
)
def test_a_function_that_fails(source: str, error: str, reason: str) -> None:
    with refused("data.function-failed", function=source, error=error) as caught:
        load(source)
    assert re.match(reason, str(caught.value.values["reason"]))


@pytest.mark.usefixtures("owners")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("owners:nothing", r".*'nothing'"),
        ("nosuch:data", r"No module named 'nosuch'"),
        ("owners_raises:data", r".*no camera here"),
        ("owners_typo:data", r".*invalid syntax"),
    ],
)
def test_a_function_that_cannot_be_loaded(source: str, reason: str) -> None:
    with refused("data.function-not-loaded", function=source) as caught:
        load(source)
    assert re.match(reason, str(caught.value.values["reason"]))


@pytest.mark.usefixtures("owners")
def test_a_function_whose_arrays_do_not_fit() -> None:
    with refused("data.wrong-shape", **shapes([4, 2], [4])) as error:
        load("owners:wrong")
    assert str(error.value).startswith("owners:wrong: x must be (n, 1, 6, 6)")


@pytest.mark.usefixtures("owners")
def test_a_function_that_changes_the_folder_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load("owners:wandering")[1].tolist() == [0, 1, 2, 0]
    assert Path.cwd() == tmp_path
    assert capsys.readouterr() == ("", "here I am\n")
    with pytest.raises(MemoryError, match="17 bytes"):
        load("owners:hungry")


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    assert is_reference("owners:data")
    assert not is_reference("./owners:data")
    assert not is_reference("C:/local.npz")
    path = write_data(tmp_path / "day:one.npz")
    assert not is_reference(str(path))
    load(path)


@given(
    count=st.integers(1, 300),
    size=st.integers(2, 40),
    order=st.none() | st.integers(0, 99),
)
def test_batches_cover_every_sample_once(count: int, size: int, order: int | None) -> None:
    shuffled = None if order is None else np.random.default_rng(order)
    made = batches(count, size, shuffled)
    sizes = list(map(len, made))
    assert sorted(np.concatenate(made).tolist()) == list(range(count))
    assert min(sizes) > 1 or count == 1
    assert all(length == size for length in sizes[:-1])
    assert sizes[-1] <= size + 1
    if order is None:
        assert np.concatenate(made).tolist() == list(range(count))


def test_batches_are_shuffled_by_their_seed() -> None:
    first, again, other = (
        np.concatenate(batches(50, 8, np.random.default_rng(seed))).tolist() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first != list(range(50))
