"""Builds the signatures of differential privacy for samples: gradients of a sample, and the step.

The agent runs the first signature on each sample separately. The agent itself clips the gradients,
adds them up and adds the noise, so that its owner does not have to trust the graphs. The second
signature reads only the noised gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import grad
from torch.fx import GraphModule

from device_agent.formats.manifest import TensorEntry
from exporters.programs.program import (
    ProgramSignature,
    Tensors,
    gradient_port,
    metric_port,
    scalar_port,
    state_in,
    state_out,
)
from exporters.programs.training.losses import Objective
from exporters.programs.training.optimizers import Optimizer, select
from exporters.programs.training.training_signatures import BatchLoss, Penalty, same_name

GRADIENT, APPLY = "gradient", "apply"


def gradient_signature(
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    parameters: Sequence[TensorEntry],
    *,
    reads: Sequence[TensorEntry] = (),
    target: Objective,
    augment: Sequence[str] = (),
) -> ProgramSignature:
    """Build the signature (x, y, state) -> (loss, gradients of the mean loss).

    Args:
        graph: The recorded training graph. It must not update buffers.
        sample_shape: Shape of one sample, without the batch.
        parameters: The parameters with gradients.
        reads: Tensors that the graph only reads.
        target: The objective of the step.
        augment: Random changes of the samples, see `augmentation.py`.

    Raises:
        InputError: An augmentation does not fit the samples.
    """
    loss = BatchLoss(graph, sample_shape, (), None, reads, same_name, target, False, tuple(augment))

    def gradients(feeds: Tensors) -> dict[str, Tensor]:
        found, value, _ = loss.gradients(feeds, select(feeds, parameters))
        return {"loss": value, **{gradient_port(e).name: found[e.name] for e in parameters}}

    return ProgramSignature(
        name=GRADIENT,
        inputs=(*loss.inputs, *map(state_in, (*parameters, *reads))),
        outputs=(metric_port("loss"), *map(gradient_port, parameters)),
        function=gradients,
        source=graph,
    )


def apply_signature(
    parameters: Sequence[TensorEntry],
    still: frozenset[str],
    optimizer: Optimizer,
    penalty: Penalty | None,
) -> ProgramSignature:
    """Build the signature (rate, gradients, state) -> state: a step of the optimizer.

    Args:
        parameters: The trained parameters.
        still: Names of the parameters without a gradient.
        optimizer: Computes new parameters from gradients.
        penalty: A term of the objective. It reads no samples, so its gradient needs no noise.
    """
    written = (*parameters, *optimizer.state(parameters))
    trained = [entry for entry in parameters if entry.name not in still]

    def apply(feeds: Tensors) -> dict[str, Tensor]:
        current = select(feeds, parameters)
        gradients = {e.name: torch.zeros_like(feeds[e.name]) for e in parameters}
        gradients |= {e.name: feeds[gradient_port(e).name] for e in trained}
        if penalty is not None:
            more = grad(penalty)(dict(current))
            gradients = {name: value + more[name] for name, value in gradients.items()}
        if optimizer.scaled:
            gradients = {name: value * feeds["rate"] for name, value in gradients.items()}
        state = select(feeds, written[len(parameters) :])
        new = optimizer.update(current, gradients, state, feeds["rate"])
        return {f"{name}+": value for name, value in new.items()}

    return ProgramSignature(
        name=APPLY,
        inputs=(scalar_port("rate"), *map(gradient_port, trained), *map(state_in, written)),
        outputs=tuple(map(state_out, written)),
        function=apply,
    )
