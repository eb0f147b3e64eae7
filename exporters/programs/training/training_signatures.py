"""Builds the signatures that families combine: train, evaluate, predict, record activations.

Each signature runs a recorded graph and replaces its tensors by tensors of the device's state.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.fx import GraphModule

from device_agent.formats.manifest import PREDICT, Dtype, Port, TensorEntry
from exporters.programs.changed_parameters import changed_parameters, writes_of
from exporters.programs.program import (
    JointTrace,
    ProgramSignature,
    Tensors,
    labels_port,
    metric_port,
    packed_port,
    present_port,
    samples_port,
    scalar_port,
    seed_port,
    state_in,
    state_out,
)
from exporters.programs.recorded_graph import attributes_read, input_node, output_node
from exporters.programs.sample_ranges import parts_of_input, range_of_input
from exporters.programs.seeded_random import SeededDropout, has_dropout
from exporters.programs.training.augmentation import Augmentation, fitting
from exporters.programs.training.augmented_samples import augmented
from exporters.programs.training.losses import Objective
from exporters.programs.training.optimizers import Optimizer, moved_state, select
from profiles.errors import ModelError

Penalty = Callable[[Tensors], Tensor]
"""A term of the objective that depends only on trained parameters and other state."""

Names = Callable[[str], str]
"""Maps a tensor's name in the graph to its name in the device's state."""


def same_name(name: str) -> str:
    """Return `name`: the graph and the device's state use the same names."""
    return name


def sample_dtype(graph: GraphModule) -> Dtype:
    """Type of the samples or recorded activations that `graph` takes."""
    return "int64" if input_node(graph).meta["val"].dtype == torch.int64 else "float32"


def graph_samples(graph: GraphModule, shape: tuple[int, ...]) -> Port:
    """The port for the samples or recorded activations of `shape` that `graph` takes."""
    return samples_port(
        shape,
        dtype=sample_dtype(graph),
        input_range=range_of_input(graph),
        parts=parts_of_input(graph),
    )


def output_shape(graph: GraphModule) -> tuple[int, ...]:
    """Shape of the output of `graph` for one sample."""
    return tuple(int(size) for size in output_node(graph).meta["val"].shape[1:])


def run(graph: GraphModule, tensors: Tensors, x: Tensor, names: Names = same_name) -> Tensor:
    """Run `graph` on `x` with the parameters and buffers in `tensors`.

    The graph updates running statistics in place, so pass copies of these tensors.

    Args:
        graph: A recorded graph.
        tensors: The device's state. If a tensor is missing, the graph's own tensor is used.
        x: A batch of samples.
        names: Maps the graph's names to the names in `tensors`.

    Returns:
        The output of the graph.
    """
    replaced = {
        name: tensors[names(name)] for name in attributes_read(graph) if names(name) in tensors
    }
    (output,) = [functional_call(graph, replaced, (x,))]
    return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]


def train_signature(
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    parameters: Sequence[TensorEntry],
    buffers: Sequence[TensorEntry],
    optimizer: Optimizer,
    *,
    name: str = "train",
    penalty: Penalty | None = None,
    reads: Sequence[TensorEntry] = (),
    names: Names = same_name,
    target: Objective,
    masked: bool = False,
    augment: Sequence[str] = (),
) -> ProgramSignature:
    """Build a step: (x, y, rate, state) -> (loss, parameters', optimizer state', buffers').

    The step uses the gradient of loss + penalty, but returns only the loss. If `graph` has dropout,
    or if there are augmentations, the step also takes a `seed`.

    Args:
        graph: The recorded training graph.
        sample_shape: Shape of one sample, without the batch.
        parameters: Trained parameters.
        buffers: Buffers that the graph updates, for example running statistics.
        optimizer: Computes new parameters from gradients.
        name: Name of the signature.
        penalty: An additional term of the objective.
        reads: Tensors that the graph or the penalty only reads. Running statistics in this list do
            not change (static batch norm).
        names: Maps the graph's names of tensors to names in the device's state.
        target: The objective of the step.
        masked: Set the logits to zero for the classes that do not occur in the device's samples
            (HeteroFL's masked cross-entropy, for outputs (batch, n) of at least two classes).

        augment: Random changes of the samples, see `augmentation.py`.

    Returns:
        The signature.

    Raises:
        ModelError: `masked` does not fit the model's output.
        InputError: An augmentation does not fit the samples.
    """
    kept = optimizer.state(parameters)
    written = (*parameters, *kept, *buffers)
    loss = BatchLoss(
        graph, sample_shape, buffers, penalty, reads, names, target, masked, tuple(augment)
    )
    writes = writes_of(graph)

    def step(feeds: Tensors) -> dict[str, Tensor]:
        given, state = select(feeds, parameters), select(feeds, kept)
        current = {**given, **changed_parameters(writes, feeds)}
        rate = feeds["rate"] if optimizer.scaled else None
        gradients, value, statistics = loss.gradients(feeds, current, rate)
        state = moved_state(state, given, current)
        new = optimizer.update(current, gradients, state, feeds["rate"])
        results = {f"{key}+": tensor for key, tensor in {**new, **statistics}.items()}
        return {"loss": value, **results}

    x, y, *others = loss.inputs
    return ProgramSignature(
        name=name,
        inputs=(x, y, scalar_port("rate"), *others, *map(state_in, (*written, *reads))),
        outputs=(metric_port("loss"), *map(state_out, written)),
        function=step,
        source=graph,
    )


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a training step on a batch, and its gradients. Attributes: `train_signature`."""

    graph: GraphModule
    sample_shape: tuple[int, ...]
    buffers: Sequence[TensorEntry]
    penalty: Penalty | None
    reads: Sequence[TensorEntry]
    names: Names
    target: Objective
    masked: bool
    augment: tuple[str, ...]

    @cached_property
    def mask(self) -> Port | None:
        """The port for the classes that occur in the device's samples, if the loss needs them."""
        return class_mask(self.graph, self.target) if self.masked else None

    @cached_property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The random changes of the samples."""
        plain = sample_dtype(self.graph) == "float32" and not parts_of_input(self.graph)
        whole = any(interval.whole for interval in range_of_input(self.graph))
        return fitting(self.augment, self.sample_shape, plain, whole)

    @cached_property
    def drops(self) -> bool:
        """Whether the graph has dropout."""
        return has_dropout(self.graph)

    @cached_property
    def random(self) -> Port | None:
        """The port for the seed, if the step draws random numbers."""
        return seed_port() if self.augmentations or self.drops else None

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The ports for samples, labels, classes and seed."""
        given = (self.mask, self.random)
        return (
            graph_samples(self.graph, self.sample_shape),
            labels_port(self.target.labels),
            *(port for port in given if port is not None),
        )

    def gradients(
        self, feeds: Tensors, current: Tensors, rate: Tensor | None = None
    ) -> tuple[Tensors, Tensor, Tensors]:
        """The gradients of loss + penalty (times `rate`, if given), the loss and the new buffers.

        `current` are the parameters with gradients. `feeds` has all other inputs.
        """
        random, mask = self.random, self.mask
        seed = None if random is None else feeds[random.name]
        x = feeds["x"] if seed is None else augmented(feeds["x"], self.augmentations, seed)

        def minimized(trained: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            # The graph writes into the buffers that it reads. torch.func only lets a function write
            # into tensors that the function made, so these copies are made here.
            statistics = {b.name: feeds[b.name].clone() for b in self.buffers}
            fixed = {e.name: feeds[e.name].clone() for e in self.reads if e.role == "frozen"}
            fixed |= {e.name: feeds[e.name] for e in self.reads if e.role != "frozen"}
            dropping = nullcontext() if seed is None or not self.drops else SeededDropout(seed)
            with dropping:
                logits = run(self.graph, {**fixed, **trained, **statistics}, x, self.names)
            # The mask makes logits of absent classes zero; they get no gradient.
            value = self.target.loss(
                logits if mask is None else logits * feeds[mask.name], feeds["y"]
            )
            total = value if self.penalty is None else value + self.penalty({**fixed, **trained})
            return total if rate is None else total * rate, (value, statistics)

        # The gradients are of the total, but only the loss is reported (`has_aux`).
        gradients, (_, (value, statistics)) = grad_and_value(minimized, has_aux=True)(current)
        return gradients, value, statistics


def class_mask(graph: GraphModule, target: Objective) -> Port | None:
    """Port for the classes that occur in a device's samples. None for a single logit.

    Raises ModelError unless the output is (batch, n) and the loss takes one class for each sample.
    """
    shape = output_shape(graph)
    if len(shape) != 1 or not (target.maskable or shape == (1,)):
        raise ModelError(
            "`masked` needs a model that predicts one class for each sample: an output (batch, n), "
            "trained by cross-entropy. This model's output is {output}. Train without `masked`.",
            code="model.masked-output",
            shape=list(shape),
            output=("batch", *shape),
        )
    return present_port(shape[0]) if shape[0] > 1 else None


def forward_signature(
    name: str,
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    reads: Sequence[TensorEntry],
    *,
    names: Names = same_name,
) -> ProgramSignature:
    """Build a forward pass: (x, state) -> output, for predictions and recorded activations.

    Args:
        name: Name of the signature.
        graph: A recorded inference graph, or a part of such a graph.
        sample_shape: Shape of one sample, without the batch.
        reads: Tensors of the device's state that the graph reads.
        names: Maps the graph's names of tensors to names in the device's state.

    Returns:
        The signature.
    """
    writes = writes_of(graph)

    def function(feeds: Tensors) -> dict[str, Tensor]:
        tensors = {**feeds, **changed_parameters(writes, feeds)}
        return {"output": run(graph, tensors, feeds["x"], names)}

    return ProgramSignature(
        name=name,
        inputs=(graph_samples(graph, sample_shape), *map(state_in, reads)),
        outputs=(samples_port(output_shape(graph), "output"),),
        function=function,
        source=graph,
    )


def prediction_signatures(
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    reads: Sequence[TensorEntry],
    target: Objective,
    *,
    names: Names = same_name,
) -> tuple[ProgramSignature, ProgramSignature]:
    """Build a prediction and an evaluation: (x, y, state) -> the loss and other measures, float32.

    `forward_signature` makes the prediction. Both signatures are traced together. The loss is the
    mean over the labels that are not IGNORED. `correct` is the number of these labels that are
    predicted correctly. `Objective.measures` lists the other measures.

    Args:
        graph: The recorded inference graph.
        sample_shape: Shape of one sample, without the batch.
        reads: Tensors of the device's state that the graph reads.
        target: The objective of the training.
        names: Maps the graph's names of tensors to names in the device's state.

    Returns:
        The signatures `predict` and `evaluate`.

    Raises:
        ModelError: A metric has the name of another tensor.
    """
    predict = forward_signature(PREDICT, graph, sample_shape, reads, names=names)
    if target.outputs:
        (output,) = predict.outputs
        predict = replace(predict, outputs=(packed_port(output, target.outputs),))

    forward = predict.function

    def function(feeds: Tensors) -> dict[str, Tensor]:
        return target.measured(forward(feeds)["output"], feeds["y"])

    def both(feeds: Tensors) -> dict[str, Tensor]:
        output = forward(feeds)["output"]
        return {**target.measured(output, feeds["y"]), "output": output}

    x, *state = predict.inputs
    taken = {"x", "y", "output", *(port.name for port in state)}
    for name in target.metrics:
        if name in taken:
            raise ModelError(
                "The loss has a metric {metric!r}, which is already the name of a tensor of the "
                "evaluation: its samples, labels, output or model. Rename the metric.",
                code="loss.metric-name",
                metric=name,
            )
    evaluate = ProgramSignature(
        name="evaluate",
        inputs=(x, labels_port(target.labels), *state),
        outputs=tuple(map(metric_port, target.measures)),
        function=function,
        source=graph,
    )
    outputs = (*evaluate.outputs, *predict.outputs)
    joint = JointTrace(
        replace(evaluate, outputs=outputs, function=both), (predict.function, evaluate.function)
    )
    return replace(predict, joint=joint), replace(evaluate, joint=joint)
