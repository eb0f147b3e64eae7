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
"""Prefixes of a sum's label for its two parts, see `RunningSum.parts`. `high` may be missing."""

MOST = 1e30
"""The largest number in a sum. Any weight times a useful number is smaller, and 10^8 such sums
still fit into float32."""

ENTRY_BYTES = 256
"""The most bytes of the tensor file's header for one tensor, without its name."""


@dataclass(frozen=True)
class HeldSum:
    """One sum of an aggregation.

    Attributes:
        label: The name of the sum in the tensor file, without the prefix LOW or HIGH.
        mean: The mean that is computed from the sum.
        name: The name of the summed tensor in `mean`.
        shape: The shape of the sum.
        parameter: The global tensor that was summed; None if a factor was summed.
    """

    label: str
    mean: Mean
    name: str
    shape: tuple[int, ...]
    parameter: str | None


def held_sums(aggregation: Aggregation) -> Iterator[HeldSum]:
    """Yield every sum for which `aggregation` has weights."""
    mean = aggregation.mean
    for name in mean.weights:
        yield HeldSum(f"sum|{name}", mean, name, aggregation.shapes[name], name)
    for key, group in aggregation.factors.items():
        for entry in group.table:
            parameter = entry.stands_for if entry.factor is None else None
            label = f"factors|{key}|{entry.name}"
            yield HeldSum(label, group.mean, entry.name, entry.shape, parameter)


def read_sums(data: bytes, shapes: Shapes, origin: str) -> dict[str, Tensor]:
    """Read the parts of the sums from a safetensors file, which has all sums and nothing else.

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
    """Check the file's header before its sizes are used."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise MalformedError(f"its header should have {length} bytes and is truncated")
    most = sum(len(json.dumps(name)) + ENTRY_BYTES for name in expected)
    if length > most:
        raise UpdateError(
            "{origin} has a header of {bytes} bytes; the tensors of its record need at most "
            "{limit_bytes}. Send only the tensors that the record names.",
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
                "{origin}: unexpected tensor {tensor!r}. Send only the sums that the record names.",
                code="partial.unexpected-tensor",
                tensor=name,
                origin=origin,
            )
        entry = decode_json(raw, tensor_files.Tensor)
        if entry.dtype != "F32" or entry.shape != expected[name]:
            raise UpdateError(
                "{origin}: {tensor!r} is {dtype} {found_shape}; it must be F32 {expected_shape}. "
                "This partial aggregate belongs to another model or to other submodels.",
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
    """Raise UpdateError if a sum has an unusable number.

    An element that no update contains must be 0.
    """
    sums, share = held.mean.sums[held.name], held.mean.share(held.name)
    if not bool((sums.total.abs() <= MOST).all()):  # false for nan
        raise UpdateError(
            "{origin}: the sum of {tensor!r} contains nan, infinity or a number above {most:g}; "
            "training diverged. Leave this partial aggregate out, and lower the learning rate.",
            code="partial.not-finite",
            tensor=held.name,
            origin=origin,
            most=MOST,
        )
    if isinstance(share, Tensor) and bool(sums.total[share == 0].any()):
        raise UpdateError(
            "{origin}: the sum of {tensor!r} is not 0 at an element to which no update "
            "contributed. So the sums and the weights are not from the same partial aggregate. "
            "Send both of its files again: the record and the tensors.",
            code="partial.unweighted-sum",
            tensor=held.name,
            origin=origin,
        )
    if is_variance(held.parameter or "") and bool((sums.total < 0).any()):
        raise UpdateError(
            "{origin}: the sum of {parameter!r} is below zero, but variances cannot be negative. "
            "Leave this partial aggregate out.",
            code="partial.negative-variance",
            parameter=held.parameter,
            origin=origin,
        )
