"""Runs whole signatures in a runtime, and compares them with PyTorch's autograd in float64.

Rounding errors add up over a whole step, so the tolerance is wide. `operators.py` compares with a
narrow tolerance.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.graph_forms import form_file
from device_agent.formats.manifest import Part, Port
from device_agent.runtime.runtime_choice import open_session
from device_agent.system.process_memory import release_unused
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Graph
from exporters.verification.errors import norm, relative_error
from exporters.verification.example_inputs import examples

TOLERANCE = 5e-2
"""Largest error of a tensor relative to its norm. In a correct graph, rounding can move a value
across a ReLU's kink and so change a deep net's gradient by 1e-2."""

THREADS = 0
"""0 means one thread for each core."""

NUDGE = 1e-6
NUDGES = 4
"""If a tensor misses the tolerance, the step runs NUDGES times on inputs with errors of about
NUDGE. Four times the change of the result is added to the tolerance, because rounding inside the
step has a similar effect. PyTorch's own error in float32 counts as such a change: the gradient of a
bias before a batch norm is 0, and its rounding errors depend on no input."""

BATCHES = (5, 3)
"""Samples of each consecutive step: the last batch of local data may be smaller."""

LARGEST_CHANGE = 0.1
"""Largest change of the parameters in the first step, relative to their norm. After a larger
change, such as that of a summed loss, the training may diverge. Then no result is finite in
float32."""

Tensors = Mapping[str, Tensor]
Output = tuple[int, Tensor]
"""The number of an output of a signature, and its value."""


@dataclass(frozen=True)
class Step:
    """One run of a signature in a runtime.

    Attributes:
        feeds: The inputs by name.
        outputs: The outputs by name.
        number: The number of this step among the consecutive steps, from 1.
        steps: The number of consecutive steps.
        batch: The number of samples in `feeds`.
    """

    feeds: dict[str, Tensor]
    outputs: dict[str, Tensor]
    number: int
    steps: int
    batch: int


def run(
    signature: ProgramSignature, graph: Graph, feeds: Tensors, form: str | None = None
) -> dict[str, Tensor]:
    """Run the file of `graph`, or of its `form`, in its runtime. Return the outputs by name."""
    with TemporaryDirectory() as folder:
        file = Path(folder, form_file(graph.file, form) if form else graph.file)
        file.write_bytes(graph.forms[form].data if form else graph.data)
        session = open_session(graph.runtime, file, signature.name, THREADS)
    given = {name: value.numpy() for name, value in feeds.items() if name not in graph.held}
    outputs = session.run(given)
    del session
    release_unused()  # the session's memory, before values in float64 need it
    return {name: torch.from_numpy(np.asarray(value)) for name, value in outputs.items()}


class ExampleInputs:
    """Draws random inputs of a signature for consecutive steps."""

    def __init__(
        self,
        signature: ProgramSignature,
        program: Program,
        values: Tensors,
        generator: torch.Generator,
    ) -> None:
        """Take a signature of `program`, and the stored tensors by name."""
        self._signature, self._program = signature, program
        self._values, self._generator = values, generator

    def first(self, batch: int) -> dict[str, Tensor]:
        """Inputs for the first step, with random optimizer state."""
        return self._drawn(self._signature.inputs, batch, {})

    def samples(self, feeds: Tensors, batch: int) -> dict[str, Tensor]:
        """New samples, and the state in `feeds`."""
        ports = [port for port in self._signature.inputs if port.state is None]
        return self._drawn(ports, batch, feeds)

    def _drawn(self, ports: Sequence[Port], batch: int, feeds: Tensors) -> dict[str, Tensor]:
        """`feeds` with new inputs for `ports`, for which an own loss is finite if possible."""
        given = self._program, self._values, self._generator, batch
        drawn = {**feeds, **examples(ports, *given)}
        if any(part.dtype == "float32" for port in ports for part in labels_of(port)):
            values = self._signature.function(drawn).values()
            if not all(value.isfinite().all() for value in values):
                drawn = {**feeds, **examples(ports, *given, with_ends=False)}
        return drawn

    def slower(self, feeds: Tensors, outputs: Tensors) -> dict[str, Tensor] | None:
        """`feeds` with a lower rate if the step to `outputs` changed the parameters too much."""
        trained = {e.name for e in self._program.tensors if e.role == "parameter"}
        changed = [p for p in self._signature.outputs if p.state in trained]
        moved = norm_of_all(outputs[p.name] - feeds[str(p.state)] for p in changed)
        size = norm_of_all(feeds[str(p.state)] for p in changed)
        if "rate" not in feeds or moved <= LARGEST_CHANGE * size:
            return None
        factor = LARGEST_CHANGE * size / moved if math.isfinite(moved) else NUDGE
        return {**feeds, "rate": feeds["rate"] * factor}

    def after(self, outputs: Tensors, feeds: Tensors, batch: int) -> dict[str, Tensor]:
        """New samples, and the state after a step that turned `feeds` into `outputs`."""
        read = {port.state for port in self._signature.inputs if port.state is not None}
        changed = {
            str(port.state): outputs[port.name]
            for port in self._signature.outputs
            if port.state in read
        }
        return {**self.samples(feeds, batch), **changed}


def labels_of(port: Port) -> Sequence[Part]:
    """The labels that are packed into `port`. Empty if the port is not packed labels."""
    return port.packed if port.kind == "labels" else ()


def norm_of_all(values: Iterable[Tensor]) -> float:
    """The Euclidean norm of all numbers in `values`."""
    return math.sqrt(sum(norm(value) ** 2 for value in values))


def numbered(signature: ProgramSignature, outputs: Tensors) -> list[Output]:
    """The index and the value of each output in `outputs`, which are given by name."""
    return [(number, outputs[port.name]) for number, port in enumerate(signature.outputs)]


def errors(
    signature: ProgramSignature, actual: Tensors, right: Iterable[Output], feeds: Tensors
) -> dict[int, float]:
    """The relative error of each output in `actual`, by the index of the output."""
    ports = signature.outputs
    return {
        number: output_error(ports[number], actual[ports[number].name], value, feeds)
        for number, value in right
    }


def output_error(port: Port, actual: Tensor, right: Tensor, feeds: Tensors) -> float:
    """The relative error of the output `port`. For new state, it is relative to the change."""
    return relative_error(actual, right, feeds.get(str(port.state)))


def tolerances(
    signature: ProgramSignature,
    relative_errors: Mapping[int, float],
    right: Callable[[Tensors], Iterable[Output]],
    feeds: Tensors,
    generator: torch.Generator,
) -> dict[int, float]:
    """The largest allowed error of each output.

    Args:
        signature: The signature.
        relative_errors: The measured error of each output.
        right: Computes the correct outputs for given inputs, always in the same order.
        feeds: The inputs for which the errors were measured.
        generator: The random generator for rounding errors.
    """
    allowed = dict.fromkeys(relative_errors, TOLERANCE)
    if max(relative_errors.values()) <= TOLERANCE:
        return allowed

    def widen(number: int, value: Tensor, moved: Tensor) -> None:
        change = output_error(signature.outputs[number], moved, value, feeds)
        if change < float("inf"):  # otherwise the reference outputs are not finite
            allowed[number] = max(allowed[number], TOLERANCE + 4 * change)

    for _ in range(NUDGES):
        outputs = zip(right(feeds), right(nudged(feeds, generator)), strict=True)
        for (number, value), (_, moved) in outputs:
            widen(number, value, moved)
    single = signature.function({**feeds})
    for number, value in right(feeds):
        widen(number, value, single.pop(signature.outputs[number].name).detach())
    return allowed


def nudged(inputs: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Return `inputs` with a random relative error of about NUDGE in every number."""
    return {
        name: value * (1 + NUDGE * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
