"""Reads samples from CSV files of a sensor. A sample is a window of consecutive lines."""

import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from device_agent.data.array_files import PIECE_BYTES
from device_agent.data.data_checks import not_readable, unknown_class
from device_agent.data.normalisation import composed, normalised
from device_agent.formats.manifest import Dtype
from device_agent.formats.preprocessing import Series
from profiles.errors import DataError
from profiles.text_formatting import counted, did_you_mean

DELIMITERS = ",;\t"
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""Texts that Python and JavaScript read as the same number."""
LARGEST = 3e38
"""Larger numbers are refused, because they do not fit into float32."""


def windows_of(
    files: Sequence[Path], series: Series, sample_shape: tuple[int, ...], dtype: Dtype
) -> tuple[np.ndarray, Iterator[np.ndarray]]:
    """Read labels and samples from CSV files, in the order of the files.

    Args:
        files: The CSV files. A window never has lines of two files.
        series: The rule by which lines become samples.
        sample_shape: Shape of one sample: (columns,), (lines, columns) or (columns, lines).
        dtype: The type of the labels: int64 for classes, float32 for numbers.

    Returns:
        The labels y (n,) in the type `dtype`, and the samples x (n, *sample_shape), float32, in
        pieces.

    Raises:
        DataError: A file cannot be read, or a column, a number or the name of a class is missing in
            the file.
    """
    length = math.prod(sample_shape) // len(series.columns)
    read, ends, lines = [], [], 0
    for file in files:
        numbers, label = read_series(file, series, dtype)
        starts = window_starts(label, length, series.step or length, dtype == "int64")
        read.append((normalised(numbers, series.mean, series.std), starts))
        ends.append(label[starts + length - 1])
        lines += len(label)
    if not any(len(starts) for _, starts in read):
        same = " with the same label" if dtype == "int64" else ""
        raise DataError(
            "A sample is a window of {needed}{condition}. The data have {counted}, but no such "
            "window.",
            code="data.too-few-samples",
            samples=0,
            lines=lines,
            window=length,
            counted=counted(lines, "line"),
            condition=same,
            needed=counted(length, "line"),
        )
    most = max(1, PIECE_BYTES // (4 * math.prod(sample_shape)))
    pieces = (
        cut_windows(numbers, starts[begin : begin + most], series, sample_shape)
        for numbers, starts in read
        for begin in range(0, len(starts), most)
    )
    return np.concatenate(ends), pieces


def unlabelled_windows(file: Path, series: Series, sample_shape: tuple[int, ...]) -> np.ndarray:
    """Read the samples (n, *sample_shape) of a CSV file, which needs no column of labels.

    Raises:
        DataError: The file cannot be read, or lacks a column or a number.
    """
    numbers, _ = read_series(file, series, None)
    length = math.prod(sample_shape) // len(series.columns)
    unlabelled = np.zeros(len(numbers))
    starts = window_starts(unlabelled, length, series.step or length, runs=False)
    values = normalised(numbers, series.mean, series.std)
    return cut_windows(values, starts, series, sample_shape)


def cut_windows(
    numbers: np.ndarray, starts: np.ndarray, series: Series, sample_shape: tuple[int, ...]
) -> np.ndarray:
    """Cut the windows that begin at the lines `starts` out of `numbers` (lines, columns)."""
    length = math.prod(sample_shape) // len(series.columns)
    x = numbers[starts[:, None] + np.arange(length)]
    if series.channels == "first":
        x = x.transpose(0, 2, 1)
    return x.reshape(-1, *sample_shape)


def window_starts(label: np.ndarray, length: int, step: int, runs: bool) -> np.ndarray:
    """Find the first line of each window of `length` lines.

    With `runs`, a window only has lines with the same label.

    Examples:
        >>> window_starts(np.array([0, 0, 0, 0, 0, 1, 1]), 2, 1, runs=True)
        array([0, 1, 2, 3, 5])
    """
    ends = [*(np.flatnonzero(label[1:] != label[:-1]) + 1 if runs else []), len(label)]
    begins = [0, *ends[:-1]]
    starts = [np.arange(a, b - length + 1, step) for a, b in zip(begins, ends, strict=True)]
    return np.concatenate(starts).astype(np.int64)


def read_series(file: Path, series: Series, dtype: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the numbers (lines, columns) in float64 and the label of each line of `file`.

    `dtype` is the type of the labels. If it is None, no labels are read.

    Raises:
        DataError: The file cannot be read, or lacks a column, a number or the name of a class.
    """
    numbers, labels = array("d"), array("d")
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            head = opened.readline()
            opened.seek(0)
            delimiter = max(DELIMITERS, key=re.sub('"[^"]*"', "", head).count)
            rows = csv.reader(opened, delimiter=delimiter, strict=True)
            names = [composed(name.strip()) for name in next(rows, [])]
            wanted = (*series.columns, *([] if dtype is None else [series.label]))
            places = [column_place(file, names, name) for name in wanted]
            number = Decimals(delimiter).number
            for row in rows:
                if not row:
                    continue
                where = f"{file.name}, line {rows.line_num}"
                cells = [
                    row[position].strip() if position < len(row) else "" for position in places
                ]
                pairs = zip(series.columns, cells, strict=False)
                numbers.extend(number(where, column, text) for column, text in pairs)
                if dtype is not None:
                    labels.append(label_of(where, series, cells[-1], dtype, number))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "{file} is not a CSV file in UTF-8: {reason}.",
            code="data.unreadable-file",
            path=str(file),
            reason=str(error),
            file=file.name,
        ) from None
    except OSError as error:
        raise not_readable(file, error) from None
    values = np.frombuffer(numbers).reshape(-1, len(series.columns)) if numbers else None
    kind = np.int64 if dtype == "int64" else np.float32
    empty = np.empty((0, len(series.columns)))
    return empty if values is None else values, np.array(labels).astype(kind)


def column_place(file: Path, names: Sequence[str], name: str) -> int:
    """The index of the column `name` in `names`. Raises DataError unless it occurs exactly once."""
    count = names.count(composed(name))
    if count != 1:
        near = next(
            (candidate for candidate in names if candidate.casefold() == name.casefold()), name
        )
        why = f"has no column {name!r}{did_you_mean(near, names)}"
        if count:
            why = f"has {count} columns {name!r}."
        known = f"Its columns are {', '.join(names)[:200]}" if names else "Its first line is empty"
        raise DataError(
            "{file} {problem} {found}.",
            code="data.missing-column",
            path=str(file),
            column=name,
            file=file.name,
            problem=why,
            found=known,
        )
    return names.index(composed(name))


class Decimals:
    """Reads the numbers of a file whose columns are separated by `delimiter`.

    If the delimiter is not a comma, numbers may have decimal commas. All numbers of the file must
    have the same decimal mark.
    """

    def __init__(self, delimiter: str) -> None:
        self._comma_separates = delimiter == ","
        self._mark: str | None = None

    def number(self, where: str, column: str, text: str) -> float:
        """Read `text`. Raises DataError if it is not a number, or too large for float32."""
        mark = next((sign for sign in ",." if sign in text), self._mark)
        plain = text if self._comma_separates else text.replace(",", ".", 1)
        if not NUMBER.fullmatch(plain) or abs(value := float(plain)) > LARGEST:
            raise DataError(
                "{place}: {column} is {text!r}; it must be a number such as -1.5. Correct the line "
                "or remove it.",
                code="data.not-a-number",
                column=column,
                place=where,
                text=text[:40],
            )
        self._mark = self._mark or mark
        if mark != self._mark:
            raise DataError(
                "{place}: {column} is {text!r}, but numbers before it have the other decimal mark. "
                "Write all numbers of a file with a point, or all with a comma.",
                code="data.not-a-number",
                column=column,
                place=where,
                text=text[:40],
            )
        return value


def label_of(
    where: str,
    series: Series,
    text: str,
    dtype: str,
    number: Callable[[str, str, str], float],
) -> float:
    """Read the label in `text`. Raises DataError if it is not a label of the model."""
    if series.classes:
        classes = [composed(name) for name in series.classes]
        if composed(text) not in classes:
            raise unknown_class(where, text, series.classes)
        return classes.index(composed(text))
    if dtype == "int64" and not re.fullmatch(r"[0-9]{1,15}", text):
        raise unknown_class(where, text, ())
    return number(where, series.label, text)
