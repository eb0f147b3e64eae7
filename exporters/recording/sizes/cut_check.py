"""Checks that a model that cuts sequences agrees with its recording, which keeps all steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from exporters.recording.captured import Captured
from exporters.recording.recording_comparison import check_graph, random_samples
from exporters.recording.replacements.function_forms.index_forms import cut_by_value
from exporters.recording.sizes.cut_sequences import CUTS, Cutting, SameDraws
from profiles.errors import ModelError


def check_cuts(model: nn.Module, captured: Captured) -> None:
    """Raise ModelError if results of `model` depend on the longest sequence of a batch.

    The samples are padded by zeros on the axis that the model cuts. The model must cut some
    samples.
    """
    graphs = captured.training, captured.inference
    cuts = {cut for graph in graphs for cut in graph.meta.get(CUTS, ())}
    for line, ahead in sorted(cuts):
        cutting = Cutting(line)
        for x in padded_batches(captured, ahead):
            for graph in graphs:
                try:
                    with cutting:
                        check_graph(model, captured, graph, SameDraws(0), x)
                except ModelError as error:
                    raise cut_by_value(line) from error
        if not cutting.cut:
            raise cut_by_value(line)


def padded_batches(captured: Captured, ahead: bool) -> Iterator[Tensor]:
    """Random samples, once for each axis: zeros fill the start (`ahead`) or the end of the axis."""
    generator = torch.Generator().manual_seed(0)
    axes = () if captured.parts else range(1, len(captured.sample_shape) + 1)
    for axis in axes:
        x = random_samples(captured, generator).movedim(axis, 1)
        x = torch.where(x == 0, 1, x)
        for row, steps in enumerate(torch.arange(1, x.shape[1]).tensor_split(len(x))):
            x[row, int(steps[-1]) if len(steps) else 1 :] = 0
        yield (x.flip(1) if ahead else x).movedim(1, axis)
