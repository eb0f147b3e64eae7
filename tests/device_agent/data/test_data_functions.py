"""Local data from a function of the device's owner."""

import re
from pathlib import Path

import pytest

from bundles import SAMPLE_SHAPE, read_data, write_data
from device_agent.data.data_functions import is_reference
from refusals import refused

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
    x, y = read_data("owners:good")
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
        read_data(source)
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
        read_data(source)
    assert re.match(reason, str(caught.value.values["reason"]))


@pytest.mark.usefixtures("owners")
def test_a_function_whose_arrays_do_not_fit() -> None:
    with refused("data.wrong-shape", x_shape=[4, 2], y_shape=[4]) as error:
        read_data("owners:wrong")
    assert str(error.value).startswith("owners:wrong: x must be (n, 1, 6, 6)")


@pytest.mark.usefixtures("owners")
def test_a_function_that_changes_the_folder_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_data("owners:wandering")[1].tolist() == [0, 1, 2, 0]
    assert Path.cwd() == tmp_path
    assert capsys.readouterr() == ("", "here I am\n")
    with pytest.raises(MemoryError, match="17 bytes"):
        read_data("owners:hungry")


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    assert is_reference("owners:data")
    assert not is_reference("./owners:data")
    assert not is_reference("C:/local.npz")
    path = write_data(tmp_path / "day:one.npz")
    assert not is_reference(str(path))
    read_data(path)
