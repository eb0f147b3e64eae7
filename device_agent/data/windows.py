"""Samples from CSV files of a sensor: windows of lines."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from device_agent.data.array_files import PIECE_BYTES
from device_agent.data.data_checks import unknown_class
from device_agent.data.normalisation import normalised
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.preprocessing import Series
from profiles.errors import DataError
from profiles.text_formatting import did_you_mean

DELIMITERS = ",;\t"
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
"""Python and JavaScript read the same number from such a text."""


def windows_of(
    files: Sequence[Path], series: Series, sample_shape: tuple[int, ...], labels: LabelRule
) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Labels and samples of CSV files, in the order of the files.

    Args:
        files: The CSV files. No window crosses the end of one.
        series: What the lines mean.
        sample_shape: Shape of one sample: (columns,), (lines, columns) or (columns, lines).
        labels: The labels that the model takes.

    Returns:
        y (n, *labels.shape), int64 or float32, and x (n, *sample_shape) float32 in pieces.

    Raises:
        DataError: A file cannot be read, or lacks a column, a number or the name of a class.
    """
    length = math.prod(sample_shape) // len(series.columns)
    read, ends = [], []
    for file in files:
        numbers, label = read_series(file, series, labels.dtype)
        starts = window_starts(label, length, series.step or length, labels.dtype == "int64")
        read.append((normalised(numbers, series.mean, series.std), starts))
        ends.append(label[starts + length - 1])
    y = np.concatenate(ends).reshape(-1, *(labels.shape or ()))
    most = max(1, PIECE_BYTES // (4 * math.prod(sample_shape)))

    def pieces() -> Iterator[np.ndarray]:
        for numbers, starts in read:
            for begin in range(0, len(starts), most):
                x = numbers[starts[begin : begin + most, None] + np.arange(length)]
                if series.channels == "first":
                    x = x.transpose(0, 2, 1)
                yield x.reshape(-1, *sample_shape)

    return y, pieces()


def window_starts(label: np.ndarray, length: int, step: int, runs: bool) -> np.ndarray:
    """The first line of each window of `length` lines; with `runs` a window has only one label.

    Examples:
        >>> window_starts(np.array([0, 0, 0, 0, 0, 1, 1]), 2, 1, runs=True)
        array([0, 1, 2, 3, 5])
    """
    ends = [*(np.flatnonzero(label[1:] != label[:-1]) + 1 if runs else []), len(label)]
    begins = [0, *ends[:-1]]
    found = [np.arange(a, b - length + 1, step) for a, b in zip(begins, ends, strict=True)]
    return np.concatenate(found).astype(np.int64)


def read_series(file: Path, series: Series, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The columns (lines, columns) in float64 and the labels of each line of `file`.

    Raises:
        DataError: The file cannot be read, or lacks a column, a number or the name of a class.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            head = opened.readline().rstrip("\r\n")
            delimiter = max(DELIMITERS, key=head.count)
            (names,) = csv.reader([head], delimiter=delimiter)
            names = [name.strip() for name in names]
            places = [column_place(file, names, one) for one in (*series.columns, series.label)]
            rows = [row for row in csv.reader(opened, delimiter=delimiter) if row]
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise DataError(
            f"{file.name} is not a CSV file in UTF-8: {error}.",
            code="data.unreadable-file",
            path=str(file),
        ) from None
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}.",
            code="data.unreadable-file",
            path=str(file),
        ) from None
    numbers = np.empty((len(rows), len(places) - 1))
    label = np.empty(len(rows), np.int64 if dtype == "int64" else np.float32)
    for line, row in enumerate(rows):
        cells = [row[place].strip() if place < len(row) else "" for place in places]
        for column, text in enumerate(cells[:-1]):
            numbers[line, column] = number(file, line, series.columns[column], text)
        label[line] = label_of(file, line, series, cells[-1], dtype)
    return numbers, label


def column_place(file: Path, names: Sequence[str], name: str) -> int:
    """The place of the column `name` among `names`. Raises DataError if it is not there."""
    if name not in names:
        raise DataError(
            f"{file.name} has no column {name!r}{did_you_mean(name, names)} Its columns are "
            f"{', '.join(names)[:200]}.",
            code="data.missing-column",
            path=str(file),
            column=name,
        )
    return names.index(name)


def number(file: Path, line: int, column: str, text: str) -> float:
    """The number that `text` is. Raises DataError if it is none, or too large for float32."""
    if not NUMBER.fullmatch(text) or abs(found := float(text)) > 3e38:
        raise DataError(
            f"{file.name}, line {line + 2}: {column} is {text[:40]!r}; it must be a number such as "
            "-1.5. Correct the line or remove it.",
            code="data.not-a-number",
            path=str(file),
            line=line + 2,
            column=column,
        )
    return found


def label_of(file: Path, line: int, series: Series, text: str, dtype: str) -> float:
    """The label that `text` names. Raises DataError if it is none."""
    if not series.classes:
        if dtype == "int64" and not re.fullmatch(r"\d{1,15}", text):
            raise unknown_class(f"{file.name}, line {line + 2}", text, ())
        return number(file, line, series.label, text)
    if text not in series.classes:
        raise unknown_class(f"{file.name}, line {line + 2}", text, series.classes)
    return series.classes.index(text)
