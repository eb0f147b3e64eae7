"""Checks several arrays of samples or labels, and packs them into one."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from device_agent.data.array_files import IN_MEMORY_BYTES, FileArray, as_array, row_slices
from device_agent.data.data_checks import batch_shape, shape_advice
from device_agent.formats.label_rule import IGNORED
from device_agent.formats.manifest import Part
from device_agent.formats.packing import LARGEST_ID, array_name, in_files, pack, packed_size, unpack
from device_agent.system.disk_space import MappedArray, NpyWriter, open_npy
from profiles.errors import DataError


def array_names(prefix: str, parts: Sequence[Part]) -> list[str]:
    """The names of the arrays with the samples (`x`) or labels (`y`). Empty if there are no labels.

    Examples:
        >>> array_names("y", []), array_names("y", [Part(name="box", shape=(4,))])
        (['y'], ['y_box'])
    """
    return [array_name(prefix, part) for part in in_files(parts)] if parts else [prefix]


def packed_array(
    prefix: str,
    arrays: Mapping[str, FileArray],
    parts: Sequence[Part],
    origin: str,
    to: Path | None = None,
) -> FileArray:
    """Check arrays and pack them. Without `parts`, return the only array unchanged.

    Args:
        prefix: `x` for samples, `y` for labels.
        arrays: The arrays, by the names of `array_names`. If the prefix is `y` and the loss reads
            no labels, pass the arrays of the samples: the result is then one zero for each sample.
        parts: The name, shape, type and range of each array.
        origin: Name of the data for messages.
        to: Folder for the result if it is larger than `IN_MEMORY_BYTES`. Without it the result is
            always in memory.

    Returns:
        float32 (n, k).

    Raises:
        DataError: An array has another type or shape, or an integer is out of range. Numbers that
            are not finite are found later, by the checks of the packed array.
        OSError: The disk is full.
    """
    if not parts:
        return arrays[prefix]
    if not in_files(parts):
        return np.zeros(
            (len(as_array(next(iter(arrays.values())))), packed_size(parts)), np.float32
        )
    whole = {part.name: arrays[array_name(prefix, part)] for part in parts}
    first = array_name(prefix, parts[0])
    for part in parts:
        name, array = array_name(prefix, part), as_array(whole[part.name])
        _check_header(name, array, part, origin)
        if len(array) != len(as_array(arrays[first])):
            raise DataError(
                "{origin}: all arrays must contain the same number of samples; {first} has {most}, "
                "but {array} has {samples}.",
                code="data.wrong-shape",
                origin=origin,
                first=first,
                most=len(as_array(arrays[first])),
                array=name,
                samples=len(array),
            )
    shape = (len(as_array(arrays[first])), packed_size(parts))
    stored = to is not None and 4 * shape[0] * shape[1] > IN_MEMORY_BYTES
    writer = None
    if to is not None and stored:
        to.mkdir(exist_ok=True)
        writer = NpyWriter(to / f"{prefix}.packed.npy", np.dtype(np.float32), shape)
    result = np.empty((0 if stored else shape[0], shape[1]), np.float32)
    for rows in row_slices(np.broadcast_to(np.float32(0), shape)):
        piece = {name: as_array(array)[rows] for name, array in whole.items()}
        for part in parts:
            if part.dtype == "int64":
                _check_integers(piece[part.name], part, array_name(prefix, part), rows, origin)
        if writer is None:
            result[rows] = pack(piece, parts)
        else:
            writer.append(pack(piece, parts))
        for source in whole.values():
            if isinstance(source, MappedArray):
                source.drop()
    if writer is None:
        return result
    writer.close()
    return open_npy(writer.path)


def check_packed(packed: np.ndarray, prefix: str, parts: Sequence[Part], origin: str) -> None:
    """Raise DataError if a packed array has an integer that is out of range."""
    whole = unpack(packed, parts)
    for part in parts:
        if part.dtype == "int64":
            rows = slice(0, len(packed))
            _check_integers(whole[part.name], part, array_name(prefix, part), rows, origin)


def _check_header(name: str, array: np.ndarray, part: Part, origin: str) -> None:
    """Raise DataError if `array` has another type or shape than `part`."""
    # Check the type of the labels even if they are one array: they are checked before a bundle is
    # known.
    converted = part.dtype == "int64" and name.startswith("x") and array.dtype == np.int32
    if array.dtype != part.dtype and not converted:
        raise DataError(
            "{origin}: {array} must be {dtype}; it is {given}. Convert it: "
            "{array}.astype({dtype!r}).",
            code="data.wrong-type",
            origin=origin,
            array=name,
            dtype=part.dtype,
            given=str(array.dtype),
        )
    if array.ndim == 0 or array.shape[1:] != part.shape:
        raise DataError(
            "{origin}: {array} must be {expected}; it is {shape}.{advice}",
            code="data.wrong-shape",
            origin=origin,
            array=name,
            expected=batch_shape(part.shape),
            shape=array.shape,
            advice=shape_advice(array, name, part.shape),
        )


def _check_integers(array: np.ndarray, part: Part, name: str, rows: slice, origin: str) -> None:
    """Raise DataError if an integer in these rows of an array is out of the range of `part`."""
    limit = LARGEST_ID if part.limit is None else part.limit
    wrong = (array < 0) | (array >= limit)
    if name.startswith("y") and part.shape:
        wrong &= array != IGNORED
    if not wrong.any():
        return
    index = tuple(int(n) for n in np.argwhere(wrong)[0])
    raise DataError(
        "{origin}: integers in {array} must be 0 to {highest}, but sample {sample} (counted from "
        "0) contains {number}. {advice}",
        code="data.number-out-of-range",
        origin=origin,
        array=name,
        highest=limit - 1,
        sample=rows.start + index[0],
        number=int(array[index]),
        advice=_advice(name, int(array[index]), limit),
    )


def _advice(name: str, number: int, limit: int) -> str:
    """What to do about an integer in the array `name` that is negative, or `limit` or more."""
    if name.startswith("y") and limit == LARGEST_ID:
        return f"Number the classes from 0: numpy.unique({name}, return_inverse=True)[1]."
    if number < 0:
        return "Leave such samples out."
    if limit == LARGEST_ID:
        return "Correct it."
    if name.startswith("x"):
        return "Correct it, or use a model that takes more ids."
    return "Correct it, or use a model and a loss with more classes."
