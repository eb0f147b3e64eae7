"""Reads the coordinator's own samples: `held_out` and `statistics`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec.structs import replace as struct_replace

from device_agent.data.array_files import LABELS, SAMPLES, FileArray, as_array, read_arrays
from device_agent.data.data_checks import check_arrays
from device_agent.data.data_source import needs_preparation
from device_agent.data.packed_arrays import array_names, packed_array
from device_agent.data.preparation import prepare
from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Dtype, Part
from device_agent.formats.packing import array_name, packed_size
from device_agent.formats.preprocessing import Preprocessing

CLASSES = LabelRule(None, None)
"""The rule of class labels while the model's number of classes is not known."""


def read_samples(
    path: Path,
    shape: tuple[int, ...],
    labels: LabelRule = CLASSES,
    key: str = "held_out",
    preprocessing: Preprocessing | None = None,
    parts: Sequence[Part] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Read the coordinator's samples of `shape` and their labels, which must fit `labels`.

    With `preprocessing` the samples may be pictures or CSV files, like those of devices. `key` is
    their key in the federation's file, for messages. `parts` are the arrays that are packed into
    samples.

    Raises:
        DataError: The file has no such samples.
        InputError: Pictures need a package that is not installed.
    """
    if preprocessing is not None and needs_preparation(path):
        own = labels.as_read
        if own.shape is None:
            # The model is not loaded yet: the label of a regression is one number here.
            own = replace(own, shape=(1,) if own.dtype == "float32" else (), parts=())
        arrays = prepare(path, preprocessing, shape, own, None)
    else:
        names = (*array_names(SAMPLES, parts), *array_names(LABELS, labels.parts))
        arrays = read_arrays(path, names=names)
        if labels.shape is None and labels.parts:
            labels = _with_shapes(labels, arrays)
    origin = f"`{key}` {path}"
    x, y = (
        np.array(as_array(packed_array(name, arrays, own, origin)))
        for name, own in ((SAMPLES, parts), (LABELS, labels.parts))
    )
    dtype: Dtype = "int64" if x.dtype == np.int64 else "float32"
    check_arrays(x, y, shape, labels, origin, dtype)
    return x, y


def _with_shapes(labels: LabelRule, arrays: Mapping[str, FileArray]) -> LabelRule:
    """Return `labels` with the shapes of `arrays`: the model's shapes are not known yet."""
    parts = tuple(
        struct_replace(part, shape=as_array(arrays[array_name(LABELS, part)]).shape[1:])
        for part in labels.parts
    )
    return replace(labels, shape=(packed_size(parts),), parts=parts)
