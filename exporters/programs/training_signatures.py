"""Builders of the signatures that families put together: train, evaluate, predict, record.

All of them run a captured graph with the tensors of the device's state in place of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.fx import GraphModule

from device_agent.formats.manifest import Dtype, TensorEntry
from exporters.programs.dropout import SeededDropout, drops
from exporters.programs.losses import objective
from exporters.programs.optimizers import Optimizer, select
from exporters.programs.program import (
    ProgramSignature,
    Tensors,
    metric,
    present,
    samples,
    scalar,
    seed,
    state_in,
    state_out,
)
from exporters.programs.recorded_graph import attributes_read, input_node, output_node

Penalty = Callable[[Tensors], Tensor]
"""A term of the objective that depends on the trained parameters and other state only."""

Names = Callable[[str], str]
"""From a graph's own name of a tensor to its name in the device's state."""


def own_name(name: str) -> str:
    """The graph's names are the state's."""
    return name


def sample_dtype(graph: GraphModule) -> Dtype:
    """The type of the samples or recorded activations that `graph` takes."""
    return "int64" if input_node(graph).meta["val"].dtype == torch.int64 else "float32"


def outputs(graph: GraphModule) -> int:
    """How many numbers `graph` returns for one sample, as a row."""
    return int(output_node(graph).meta["val"].shape[1])


def run(graph: GraphModule, tensors: Tensors, x: Tensor, names: Names = own_name) -> Tensor:
    """Output of `graph` for `x`, reading each parameter and buffer from `tensors`.

    Running statistics in `tensors` are updated in place: hand in copies.
    """
    own = {name: tensors[names(name)] for name in attributes_read(graph) if names(name) in tensors}
    (output,) = [functional_call(graph, own, (x,))]
    return output[0] if isinstance(output, tuple | list) else output  # type: ignore[no-any-return]


def train(
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    parameters: Sequence[TensorEntry],
    buffers: Sequence[TensorEntry],
    optimizer: Optimizer,
    *,
    name: str = "train",
    penalty: Penalty | None = None,
    reads: Sequence[TensorEntry] = (),
    names: Names = own_name,
    loss: str = "cross-entropy",
    masked: bool = False,
) -> ProgramSignature:
    """One step: (x, y, rate, state) -> (loss, parameters', optimizer state', buffers').

    The output `loss` is the loss of that name (`losses.py`) alone; the gradient is that of the
    loss plus `penalty`. Both may also look at the tensors `reads`. Statistics among them
    (static batch norm) stay as they are. With `masked` the logits of classes that the device has no
    samples of count as zero (HeteroFL's masked cross-entropy, for models of two classes and more).
    Where `graph` has dropout, a `seed` is an input too. Raises ModelError where the loss does not
    fit the model's output.
    """
    kept = optimizer.state(parameters)
    written = (*parameters, *kept, *buffers)
    classes = outputs(graph)
    aim = objective(loss, classes)
    mask = present(classes) if masked and classes > 1 else None
    random = seed() if drops(graph) else None

    def step(feeds: Tensors) -> dict[str, Tensor]:
        statistics = {b.name: feeds[b.name].clone() for b in buffers}
        # Copies: a batch norm writes into the statistics that it reads.
        fixed = {e.name: feeds[e.name].clone() for e in reads if e.role == "frozen"}
        fixed |= {e.name: feeds[e.name] for e in reads if e.role != "frozen"}

        def minimised(trained: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            with nullcontext() if random is None else SeededDropout(feeds[random.name]):
                logits = run(graph, {**fixed, **trained, **statistics}, feeds["x"], names)
            value = aim.loss(logits if mask is None else logits * feeds[mask.name], feeds["y"])
            total = value if penalty is None else value + penalty({**fixed, **trained})
            return total, value

        current = select(feeds, parameters)
        gradients, (_, value) = grad_and_value(minimised, has_aux=True)(current)
        new = optimizer.update(current, gradients, select(feeds, kept), feeds["rate"])
        results = {f"{key}+": tensor for key, tensor in {**new, **statistics}.items()}
        return {"loss": value, **results}

    inputs = [samples(sample_shape, dtype=sample_dtype(graph)), aim.labels(classes), scalar("rate")]
    inputs += [port for port in (mask, random) if port is not None]
    return ProgramSignature(
        name=name,
        inputs=(*inputs, *map(state_in, (*written, *reads))),
        outputs=(metric("loss"), *map(state_out, written)),
        function=step,
        source=graph,
    )


def apply(
    name: str,
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    reads: Sequence[TensorEntry],
    *,
    names: Names = own_name,
) -> ProgramSignature:
    """Run `graph` on a batch: (x, state) -> output. Serves predictions and recorded activations."""
    shape = tuple(int(size) for size in output_node(graph).meta["val"].shape[1:])

    def function(feeds: Tensors) -> dict[str, Tensor]:
        return {"output": run(graph, feeds, feeds["x"], names)}

    return ProgramSignature(
        name=name,
        inputs=(samples(sample_shape, dtype=sample_dtype(graph)), *map(state_in, reads)),
        outputs=(samples(shape, "output"),),
        function=function,
        source=graph,
    )


def evaluate(
    graph: GraphModule,
    sample_shape: tuple[int, ...],
    reads: Sequence[TensorEntry],
    loss: str = "cross-entropy",
    *,
    names: Names = own_name,
) -> ProgramSignature:
    """Judge predictions of `graph`: (x, y, state) -> (loss, correct), both float32.

    The loss is the mean over the batch, `correct` the number of samples whose class is predicted;
    a regression has no such output. Raises ModelError where the loss does not fit.
    """
    width = outputs(graph)
    aim = objective(loss, width)
    measures = {"loss": aim.loss, "correct": aim.correct}
    known = {key: measure for key, measure in measures.items() if measure is not None}

    def function(feeds: Tensors) -> dict[str, Tensor]:
        output = run(graph, feeds, feeds["x"], names)
        return {key: measure(output, feeds["y"]) for key, measure in known.items()}

    inputs = (samples(sample_shape, dtype=sample_dtype(graph)), aim.labels(width))
    return ProgramSignature(
        name="evaluate",
        inputs=(*inputs, *map(state_in, reads)),
        outputs=tuple(map(metric, known)),
        function=function,
        source=graph,
    )
