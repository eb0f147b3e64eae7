"""The sums of a partial aggregate: their names in its tensor file, and checks of their numbers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from device_agent.formats import tensor_files
from profiles.errors import UpdateError
from profiles.json_decoding import MalformedError, decode_json, refuse_repeated_keys
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.update_validation import is_variance
from toolkit.aggregation.weighted_mean import Mean
from toolkit.submodels.submodel import Shapes

LOW, HIGH = "low|", "high|"
"""Before a sum's label: its two parts, see `RunningSum.parts`. A sum may come without `high`."""

MOST = 1e30
"""Above every weight times a useful number; 10^8 such sums add up to less than float32 holds."""

ENTRY_BYTES = 256
"""The most that the header of the tensor file has for a tensor, without its name, in bytes."""


@dataclass(frozen=True)
class HeldSum:
    """One sum of an aggregation.

    Attributes:
        label: Its name in the tensor file, without the part.
        mean: The mean that it belongs to.
        name: Its name there.
        shape: Its shape.
        parameter: The global tensor that it is of, unless it is one of factors.
    """

    label: str
    mean: Mean
    name: str
    shape: tuple[int, ...]
    parameter: str | None


def held_sums(aggregation: Aggregation) -> Iterator[HeldSum]:
    """Every sum that `aggregation` has weights of."""
    mean = aggregation.mean
    for name in mean.weights:
        yield HeldSum(f"sum|{name}", mean, name, aggregation.shapes[name], name)
    for key, group in aggregation.factors.items():
        for entry in group.table:
            parameter = entry.stands_for if entry.factor is None else None
            label = f"factors|{key}|{entry.name}"
            yield HeldSum(label, group.mean, entry.name, entry.shape, parameter)


def read_sums(data: bytes, shapes: Shapes, origin: str) -> dict[str, Tensor]:
    """The parts of the sums in `data`, a safetensors file, which has all of them and nothing else.

    Args:
        data: The content of the file.
        shapes: The shape of each sum by its label.
        origin: The name of the file, for messages.

    Raises:
        UpdateError: The file is malformed or has other tensors.
    """
    expected = {f"{part}{label}": shape for label, shape in shapes.items() for part in (LOW, HIGH)}
    try:
        _check_header(data, expected, origin)
        arrays = tensor_files.tensors_in(bytearray(data))
    except (MalformedError, SafetensorError) as error:
        raise UpdateError(
            "{origin} is not a safetensors file: {reason}. Send it again.",
            code="partial.unreadable-tensors",
            origin=origin,
            reason=str(error),
        ) from None
    for label in shapes:
        if f"{LOW}{label}" not in arrays:
            raise UpdateError(
                "{origin}: the tensor {tensor!r} is missing. A partial aggregate has the sum of "
                "every tensor that its record names. Send it again.",
                code="partial.missing-tensor",
                tensor=f"{LOW}{label}",
                origin=origin,
            )
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check_header(data: bytes, expected: Shapes, origin: str) -> None:
    """Check the file's header before anything is made of what it says."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise MalformedError(f"its header should have {length} bytes and is truncated")
    most = sum(len(json.dumps(name)) + ENTRY_BYTES for name in expected)
    if length > most:
        raise UpdateError(
            "{origin} has a header of {bytes} bytes; for the tensors of its record it has at most "
            "{limit_bytes}. Send the tensors that the record names.",
            code="partial.too-large",
            bytes=length,
            limit_bytes=most,
            origin=origin,
        )
    header = data[8 : 8 + length]
    entries = decode_json(header, dict[str, msgspec.Raw])
    refuse_repeated_keys(header)
    end = 0
    for name, raw in sorted(entries.items(), key=lambda item: _begin(item[1])):
        if name not in expected:
            raise UpdateError(
                "{origin}: unexpected tensor {tensor!r}. A partial aggregate has the sums that "
                "its record names, and nothing else. Send these.",
                code="partial.unexpected-tensor",
                tensor=name,
                origin=origin,
            )
        entry = decode_json(raw, tensor_files.Tensor)
        if entry.dtype != "F32" or entry.shape != expected[name]:
            raise UpdateError(
                "{origin}: {tensor!r} is {dtype} {found_shape}; it must be F32 {expected_shape}. "
                "It is of another model or other submodels.",
                code="partial.wrong-shape",
                tensor=name,
                found_shape=entry.shape,
                expected_shape=expected[name],
                origin=origin,
                dtype=entry.dtype,
            )
        if entry.data_offsets[0] != end:
            raise MalformedError(f"{name!r} does not begin where the tensor before it ends")
        end = entry.data_offsets[1]
    if end != len(data) - 8 - length:
        raise MalformedError(f"its tensors end at {end} of {len(data) - 8 - length} bytes")


def _begin(raw: msgspec.Raw) -> tuple[int, int]:
    return decode_json(raw, tensor_files.Tensor).data_offsets


def check_sum(held: HeldSum, origin: str) -> None:
    """Raise UpdateError unless a sum has usable numbers, and none where nothing has a weight."""
    sums, share = held.mean.sums[held.name], held.mean.share(held.name)
    if not bool((sums.total.abs() <= MOST).all()):  # nan is not
        raise UpdateError(
            "{origin}: the sum of {tensor!r} holds a number that is not finite or above {most:g}; "
            "training diverged. Leave this partial aggregate out, and lower the learning rate.",
            code="partial.not-finite",
            tensor=held.name,
            origin=origin,
            most=MOST,
        )
    if isinstance(share, Tensor) and bool(sums.total[share == 0].any()):
        raise UpdateError(
            "{origin}: the sum of {tensor!r} has a number where no update has a weight. The "
            "weights are not those of this sum: send both again.",
            code="partial.unweighted-sum",
            tensor=held.name,
            origin=origin,
        )
    if is_variance(held.parameter or "") and bool((sums.total < 0).any()):
        raise UpdateError(
            "{origin}: the sum of {parameter!r} is below zero, which no sum of variances is. "
            "Leave this partial aggregate out.",
            code="partial.negative-variance",
            parameter=held.parameter,
            origin=origin,
        )
