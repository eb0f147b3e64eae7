from pathlib import Path

import numpy as np
import pytest

from device_agent.formats.input_range import InputRange, Interval, draw_samples, fits
from exporters.recording.inputs.sample_range import (
    parse_range,
    range_between,
    range_of_examples,
    read_range,
)
from refusals import refused


def drawn(input_range: InputRange, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw_samples(input_range, shape, draw.random, draw.standard_normal)


def test_whole_numbers_include_both_ends(seed: int) -> None:
    x = drawn(parse_range("-1:2"), (400, 5), seed)
    assert set(np.unique(x)) == {-1, 0, 1, 2}


def test_other_numbers_fill_the_range(seed: int) -> None:
    x = drawn(parse_range("0.5:1"), (400, 5), seed)
    assert x.min() >= 0.5
    assert x.max() <= 1
    assert np.unique(x).size == x.size


@pytest.mark.parametrize(
    "text", ["", "4", "4:", ":4", "a:b", "4:0", "4:4", "0:nan", "0:inf", "0:1:2"]
)
def test_a_wrong_range_is_refused(text: str) -> None:
    with refused("option.invalid-value", option="--input-range"):
        parse_range(text)


def test_huge_ends_are_refused() -> None:
    with refused("option.invalid-value"):
        range_between(0, 10**400)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16"])
def test_each_number_has_the_range_of_the_examples(seed: int, dtype: str) -> None:
    draw = np.random.default_rng(seed)
    x = np.stack([draw.integers(3, 9, 60), draw.integers(0, 2, 60), draw.integers(0, 200, 60)], 1)
    x = x.astype(dtype)
    made = drawn(range_of_examples(x, "examples"), (500, 3), seed)
    assert (made.min(0) >= x.min(0)).all()
    assert (made.max(0) <= x.max(0)).all()
    assert (made == made.round()).all()


def test_a_constant_column(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(9, 3))
    x[:, 1], x[:, 2] = 7, 0.5
    made = drawn(range_of_examples(x, "examples"), (500, 3), seed)
    assert (made[:, 1] == 7).all()
    assert made[:, 2].min() >= 0.45
    assert made[:, 2].max() <= 0.55
    assert np.unique(made[:, 2]).size > 100


def test_large_pictures_have_a_range_for_each_row_of_a_channel(seed: int) -> None:
    x = np.random.default_rng(seed).random((4, 3, 32, 32)) * np.array([1, 2, 3])[:, None, None]
    known = range_of_examples(x, "examples")
    assert fits(known, 3 * 32 * 32)
    assert len(known) == 3 * 32
    made = drawn(known, (5, 3, 32, 32), seed)
    assert np.allclose(made.max((0, 2, 3)), [1, 2, 3], atol=0.1)


def test_a_series_keeps_its_columns(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = np.stack([draw.normal(size=(5, 900)), draw.integers(24, size=(5, 900))], 2)
    known = range_of_examples(x, "examples")
    assert len(known) == 2
    assert fits(known, 1800)
    made = drawn(known, (3, 900, 2), seed)
    assert set(np.unique(made[..., 1])) == set(range(24))


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (np.zeros((1, 3)), "data.too-few-samples"),
        (np.ones((5, 3)), "data.too-few-samples"),
        (np.array([[0.0, 1], [np.nan, 2]]), "data.not-finite"),
        (np.array([["a", "b"], ["c", "d"]]), "data.wrong-type"),
        (np.array([[1j], [2]]), "data.wrong-type"),
        (np.array(3.0), "data.wrong-shape"),
        (np.array([[0.0], [1e300]]), "data.number-out-of-range"),
    ],
)
def test_examples_that_show_no_range_are_refused(x: np.ndarray, code: str) -> None:
    with refused(code):
        range_of_examples(x, "examples")


def test_examples_of_a_file(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(tmp_path / "both.npz", x=x, y=np.zeros(4, np.int64))
    np.save(tmp_path / "x.npy", x)
    ranges = [
        read_range(path, (3,)) for path in (tmp_path / "both.npz", tmp_path / "x.npy", tmp_path)
    ]
    assert ranges[0] == ranges[1] == ranges[2]
    with refused("data.wrong-shape"):
        read_range(tmp_path / "x.npy", (4,))
    with refused("data.missing-file"):
        read_range(tmp_path / "no.npy", (3,))


def test_ranges_that_do_not_fit_a_port() -> None:
    assert fits((Interval(low=0, high=1, count=3), Interval()), 8)
    assert not fits((Interval(low=0, high=1, count=3),), 8)
    assert not fits((Interval(low=2, high=1),), 8)
    assert not fits((Interval(low=2),), 8)
