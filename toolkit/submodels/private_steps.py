"""Training steps with differential privacy for samples (DP-SGD)."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule

from device_agent.formats.manifest import SAMPLES, SamplePrivacy, Step, TensorEntry, Train
from exporters.programs.program import ProgramSignature
from exporters.programs.torch_internals import LazyGraphModule
from exporters.programs.training.losses import Objective
from exporters.programs.training.optimizers import Optimizer
from exporters.programs.training.private_signatures import (
    APPLY,
    GRADIENT,
    apply_signature,
    gradient_signature,
)
from exporters.programs.training.training_signatures import Penalty
from exporters.recording.captured import Captured
from profiles.errors import ModelError
from toolkit.submodels.hyperparameters import TrainingConfig

BATCH_NORM = torch.ops.aten.batch_norm.default
MEAN, TRAINING = 3, 5
"""Places of the running mean and of `training` among the arguments of a batch norm."""


def private_signatures(
    captured: Captured,
    training: TrainingConfig,
    entries: Sequence[TensorEntry],
    optimizer: Optimizer,
    still: frozenset[str],
    penalty: Penalty | None,
    target: Objective,
) -> tuple[ProgramSignature, ProgramSignature]:
    """The signatures that compute the gradient of a sample and apply the noised gradients.

    Args:
        captured: The recorded model.
        training: How devices train.
        entries: The model's parameters and frozen tensors.
        optimizer: Computes new parameters from gradients.
        still: Names of the parameters without a gradient.
        penalty: A term of the objective, or None.
        target: What the step trains for.

    Raises:
        ModelError: The model computes statistics over the samples of a batch, or changes its own
            parameters.
    """
    if captured.changed:
        raise ModelError(
            "sample_clip cannot be combined with a model that changes its own parameter {tensor!r} "
            "before it uses the parameter. Compute with a changed copy, as in "
            "F.linear(x, weight.clamp(-1, 1)).",
            code="privacy.changed-parameter",
            tensor=min(captured.changed),
        )
    for entry in entries:
        if entry.role == "buffer":
            raise ModelError(
                "sample_clip needs a model whose training step changes only parameters, but this "
                "one changes {tensor!r}, which mixes samples without noise. For batch norms, set "
                'batch_norm = "static"; or use group norms.',
                code="privacy.mixed-samples",
                tensor=entry.name,
            )
    parameters = [entry for entry in entries if entry.role == "parameter"]
    gradient = gradient_signature(
        with_fixed_statistics(captured.training),
        captured.sample_shape,
        [entry for entry in parameters if entry.name not in still],
        reads=[entry for entry in entries if entry.role == "frozen" or entry.name in still],
        target=target,
        augment=training.augment,
    )
    return gradient, apply_signature(parameters, still, optimizer, penalty)


def private_instruction(training: TrainingConfig) -> Train:
    """The instruction to train on the device's samples with differential privacy for them."""
    assert training.sample_clip is not None
    assert training.sample_noise is not None
    return Train(
        source=SAMPLES,
        **training.local_work._asdict(),
        batch_size=training.batch_size,
        steps=(
            Step(signature=GRADIENT, inputs={}, each_sample=True),
            Step(signature=APPLY, inputs={"rate": training.learning_rate}),
        ),
        privacy=SamplePrivacy(
            clip=training.sample_clip,
            noise_multiplier=training.sample_noise,
            delta=training.sample_delta,
        ),
    )


def with_fixed_statistics(graph: GraphModule) -> GraphModule:
    """A copy of the training `graph` whose batch norms use the statistics that the device received.

    The statistics of a single sample do not estimate the statistics of all samples.

    Raises ModelError if a batch norm keeps no statistics.
    """
    copy = Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    for node in copy.find_nodes(op="call_function", target=BATCH_NORM):
        batch = node.args[0].meta["val"].shape[0]
        if node.args[MEAN] is not None:
            node.args = (*node.args[:TRAINING], False, *node.args[TRAINING + 1 :])
        elif batch != 1:  # an instance norm is recorded as a batch norm of one "sample"
            raise ModelError(
                "sample_clip cannot be combined with a batch norm without running statistics, "
                "because it mixes the samples of a batch. Use track_running_stats=True with "
                'batch_norm = "static", or group norms.',
                code="privacy.mixed-samples",
            )
    return LazyGraphModule(graph, copy)
