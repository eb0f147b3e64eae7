"""Draws random inputs for the verification of a signature."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from device_agent.formats.label_rule import IGNORED, LabelRule
from device_agent.formats.manifest import SAFE_LIMIT, Port
from exporters.programs.output_parts import random_labels as random_labels_of_parts
from exporters.programs.program import Program
from exporters.programs.sample_ranges import samples_in_range
from exporters.programs.tracing import DTYPES

STATE = 1e-3
"""Upper bound of the random numbers in optimizer state."""


def examples(
    ports: Iterable[Port],
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    batch: int,
    *,
    with_ends: bool = True,
) -> dict[str, Tensor]:
    """An input for each of `ports`, by name; see `example`."""
    return {
        port.name: random_labels_of_parts(port.packed, batch, generator, with_ends=with_ends)
        if port.kind == "labels" and port.packed
        else example(port, program, values, generator, batch)
        for port in ports
    }


def example(
    port: Port,
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    batch: int,
) -> Tensor:
    """An input for `port`: the stored value, or random numbers that fit the port."""
    shape = [batch if size is None else size for size in port.shape]
    if port.kind == "labels" and port.dtype == "float32":
        return torch.randn(shape, generator=generator)
    if port.kind == "labels":
        return random_labels(program.classes, shape, generator)
    if port.state is not None and port.state in values:
        return values[port.state].detach()
    if port.kind == "classes":  # one class is absent, so that the mask has an effect
        return (torch.arange(shape[0]) > 0).float()
    if port.kind == "seed":
        return torch.randint(2**31 - 1, shape, generator=generator)
    if port.kind == "scalar":
        return torch.tensor(0.05)
    if port.kind == "samples" and port.range:
        return samples_in_range(port.range, shape, DTYPES[port.dtype], generator)
    if port.kind == "samples" and port.dtype == "int64":
        return torch.randint(program.sample_limit or SAFE_LIMIT, shape, generator=generator)
    if port.kind == "samples":
        return torch.randn(shape, generator=generator)
    # Optimizer state. Second moments and step counts must not be negative. A large velocity would
    # hide a wrong gradient.
    return torch.rand(shape, generator=generator) * STATE


def random_labels(classes: int, shape: list[int], generator: torch.Generator) -> Tensor:
    """Random class labels. If a sample has several labels, a quarter of all labels is IGNORED.

    In every second sample, only the first half has labels, because CTC has too few steps for more
    labels.
    """
    labels = torch.randint((LabelRule(classes).highest or 0) + 1, shape, generator=generator)
    if len(shape) == 1:
        return labels
    labels[::2, shape[1] // 2 :] = IGNORED
    return torch.where(torch.rand(shape, generator=generator) < 0.25, IGNORED, labels)
