"""Local data: which arrays are refused."""

from pathlib import Path

import numpy as np
import pytest

from bundles import CLASSES, SAMPLE_SHAPE, read_data, samples, write_data
from device_agent.data.data_checks import check_arrays
from device_agent.data.local_data import load_data
from device_agent.formats.label_rule import LabelRule
from profiles.errors import DataError
from refusals import refused

Arrays = dict[str, np.ndarray]


def test_an_npz_file(tmp_path: Path) -> None:
    x, y = samples(21, seed=0)
    came = read_data(write_data(tmp_path / "local.npz", 21, seed=0))
    np.testing.assert_array_equal(came[0], x)
    np.testing.assert_array_equal(came[1], y)


X = np.zeros((4, *SAMPLE_SHAPE), np.float32)
Y = np.array([0, 1, 2, 0])


def with_one(array: np.ndarray, value: float) -> np.ndarray:
    copy = array.copy()
    copy.flat[1] = value
    return copy


@pytest.mark.parametrize(
    ("wanted", "shape", "advice"),
    [
        ((3, 8, 8), (5, 8, 8, 3), "x.transpose(0, 3, 1, 2)"),
        ((8, 8, 3), (5, 3, 8, 8), "x.transpose(0, 2, 3, 1)"),
        ((2, 9), (5, 9, 2), "x.transpose(0, 2, 1)"),
        ((3, 4, 5), (5, 4, 3, 5), "x.transpose(0, 2, 1, 3)"),
        ((1, 8, 8), (5, 8, 8), "x.reshape(-1, 1, 8, 8)"),
        ((1, 8, 8), (5, 64), "x.reshape(-1, 1, 8, 8)"),
        ((64,), (5, 8, 8), "x.reshape(-1, 64)"),
        ((3, 8, 8), (5, 4, 8, 8), None),
        ((3, 8, 8), (5, 8, 8, 4), None),
    ],
)
def test_a_shape_that_would_fit_is_named(
    wanted: tuple[int, ...], shape: tuple[int, ...], advice: str | None
) -> None:
    x, y = np.zeros(shape, np.float32), np.zeros(5, np.int64)
    with refused("data.wrong-shape", x_shape=list(shape)) as error:
        check_arrays(x, y, wanted, LabelRule(None), "it")
    said = str(error.value)
    if advice is None:
        assert said.endswith(f"they are {shape} and (5,).")
        return
    assert said.endswith(f" {advice} has this shape.")
    # What the message proposes is what the check takes.
    check_arrays(eval(advice, {"x": x}), y, wanted, LabelRule(None), "it")
    with refused("data.wrong-shape"):
        check_arrays(np.zeros((5, *wanted), np.float32), y[:, None], wanted, LabelRule(3), "it")


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
        read_data(path)
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
        read_data(tmp_path / "local.npz")
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


@pytest.mark.parametrize(
    ("rule", "label", "advice"),
    [
        (LabelRule(3, (2,)), 3, "Correct the labels, or use a model with more classes."),
        (LabelRule(3, (2,)), -1, "Correct the labels."),
        (LabelRule(1, (2,), independent=True), 2, "labels: each is 1 for yes or 0 for no."),
    ],
)
def test_what_to_do_about_other_labels(rule: LabelRule, label: int, advice: str) -> None:
    x, y = np.zeros((3, 2), np.float32), np.array([[0, 1], [1, 1], [0, label]])
    with refused(LABELS, label=label) as caught:
        load_data((x, y), (2,), rule)
    assert str(caught.value).endswith(advice)


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
        read_data(path)
