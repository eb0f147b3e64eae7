"""The rule by which the owner's files become samples: pictures, or CSV files of a sensor.

The rule is in the federation's file and in every manifest. So agents and web pages compute the same
numbers from the same file (`device_agent/data/`, `toolkit/web/phone/agent/preparation.ts`).
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

Finite = Annotated[float, Meta(ge=-3e38, le=3e38)]
Above0 = Annotated[float, Meta(gt=0, le=3e38)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]


class Images(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="images",
    tag_field="kind",
):
    """Pictures in folders. Each class has one folder, with the name of the class.

    A triangle filter scales a picture to the model's height and width: it averages the old pixels
    near each new pixel. The values, from 0 to 1, become (value - mean) / std.

    Attributes:
        classes: Names of the classes, in the order of the model's outputs.
        fit: `crop` cuts the picture to the model's proportions, equally on both sides. `stretch`
            distorts the picture instead.
        mean: A number for each channel; empty means 0.
        std: A number for each channel; empty means 1.
    """

    kind: ClassVar[str] = "images"
    classes: Annotated[tuple[Name, ...], Meta(min_length=2)]
    fit: Literal["crop", "stretch"] = "crop"
    mean: tuple[Finite, ...] = ()
    std: tuple[Above0, ...] = ()


class Series(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="series",
    tag_field="kind",
):
    """CSV files: a line with the names of the columns, then one line for each point in time.

    A sample is a window with the number of lines that the model takes. If the labels are classes,
    all lines of a window have the same label. A number becomes (number - mean) / std.

    Attributes:
        columns: The columns that the model reads, in its order.
        label: The column of the labels. For a regression, the last line of a window gives its
            label.
        classes: Names of the classes, in the order of the model's outputs. Without names, the
            labels are the indices of the classes, or the numbers of a regression.
        channels: Whether the columns are the `last` axis of a sample, or the `first`.
        step: Number of lines from the start of a window to the start of the next window. 0 means
            the length of a window.
        mean: A number for each column; empty means 0.
        std: A number for each column; empty means 1.
    """

    kind: ClassVar[str] = "series"
    columns: Annotated[tuple[Name, ...], Meta(min_length=1)]
    label: Name
    classes: tuple[Name, ...] = ()
    channels: Literal["first", "last"] = "last"
    step: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    mean: tuple[Finite, ...] = ()
    std: tuple[Above0, ...] = ()


Preprocessing = Images | Series


def misfit(
    preprocessing: Preprocessing,
    sample_shape: Sequence[int],
    dtype: str,
    classes: int | None = None,
    labels: Sequence[int] | None = (),
    regression: bool = False,
) -> str | None:
    """Explain why samples from files do not fit a model. Returns None if they fit.

    Args:
        preprocessing: The rule by which files become samples.
        sample_shape: Shape of one sample of the model.
        dtype: Type of the model's samples.
        classes: Size of the output's class axis. None if it is not known, or for a regression.
        labels: Shape of the labels of one sample; None if it is not known.
        regression: Whether the labels are numbers.

    Returns:
        The reason, as a clause without a full stop.
    """
    if dtype != "float32":
        return f"files give float32 samples, but the model takes {dtype}"
    shape = tuple(sample_shape)
    if isinstance(preprocessing, Images):
        if len(shape) != 3 or shape[0] not in (1, 3):
            return f"pictures give samples (1, h, w) or (3, h, w), but the model takes {shape}"
        channels = shape[0]
    else:
        channels = len(preprocessing.columns)
        axis = 0 if preprocessing.channels == "first" else -1
        if len(shape) > 2 or shape[axis] != channels:
            window = "(lines, {0})" if axis else "({0}, lines)"
            given = f"({channels},) or {window.format(channels)}"
            wrong = f"its columns give samples {given}, but the model takes {shape}"
            other = "last" if axis == 0 else "first"
            if len(shape) == 2 and shape[-1 - axis] == channels:
                wrong += f'. With channels = "{other}" they fit'
            return wrong
        if preprocessing.label in preprocessing.columns:
            return (
                f"the column {preprocessing.label!r} cannot be both the label and part of the "
                "sample"
            )
    for key, numbers in (("mean", preprocessing.mean), ("std", preprocessing.std)):
        if len(numbers) not in (0, channels):
            return f"{key} needs {channels} numbers, one for each channel; it has {len(numbers)}"
    names = preprocessing.classes
    if len(set(names)) < len(names):
        return "a class is named twice"
    for name in names:
        if name != name.strip() or name.startswith(".") or "/" in name or "\\" in name:
            return f"{name!r} cannot be the name of a folder or of a label"
    if regression and names:
        return "a regression (loss mse) has no classes"
    if classes is not None and names and len(names) != max(classes, 2):
        return f"it names {len(names)} classes, but the model has {max(classes, 2)}"
    if labels is not None and any(size != 1 for size in labels):
        return f"files give one label for each sample, but the model takes labels {tuple(labels)}"
    return None
