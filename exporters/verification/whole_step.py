"""Compares whole runs of a signature in a runtime with PyTorch's autograd in float64.

Rounding adds up over a whole step, so the tolerance is wide. `operators.py` compares closely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.graph_forms import form_file
from device_agent.runtime.runtime_choice import open_session
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Graph
from exporters.verification.double_precision import reference
from exporters.verification.errors import relative_error
from exporters.verification.example_inputs import examples

TOLERANCE = 5e-2
"""Largest error of a tensor relative to its norm. In a correct graph, rounding can move a value
across a ReLU's kink and so change a deep net's gradient by 1e-2."""

THREADS = 0
"""0 means one thread for each core."""

NUDGE = 1e-6
NUDGES = 4
"""If a tensor misses the tolerance, PyTorch's float64 step runs NUDGES times on inputs with errors
of about NUDGE. Four times the change of the result is added to the tolerance, because rounding
inside the step has a similar effect."""

BATCHES = (5, 3)
"""Samples of each consecutive step: the last batch of local data may be smaller."""
CHOICE = b"then_branch"
"""Text in the file of a graph that computes full batches in another way: an ONNX `If`."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One run of a signature in a runtime: inputs and outputs by name."""

    feeds: dict[str, Tensor]
    outputs: dict[str, Tensor]


def run_steps(
    signature: ProgramSignature,
    graph: Graph,
    program: Program,
    values: Tensors,
    generator: torch.Generator,
    form: str | None = None,
) -> list[Run]:
    """Run a signature in its runtime on random samples: once, or twice if it trains.

    The second step runs on new samples and on the state after the first. If `form` is given, the
    runtime opens this form of `graph`. Some forms compute full batches in a special way; for these,
    the first batch is full.
    """
    state = {port.name for port in signature.inputs if port.state is not None}
    batches = BATCHES if signature.trains else BATCHES[:1]
    data = graph.forms[form].data if form else graph.data
    if form and CHOICE in data:
        batches = (program.largest_batch, *batches[1:])
    with TemporaryDirectory() as folder:
        file = Path(folder, form_file(graph.file, form) if form else graph.file)
        file.write_bytes(data)
        session = open_session(graph.runtime, file, signature.name, THREADS)
    runs: list[Run] = []
    feeds: dict[str, Tensor] = {}
    for batch in batches:
        # For the first step, the state is drawn, too.
        ports = [port for port in signature.inputs if port.name not in state or not runs]
        feeds = {**feeds, **examples(ports, program, values, generator, batch)}
        given = {name: value.numpy() for name, value in feeds.items() if name not in graph.held}
        actual = {name: torch.from_numpy(np.asarray(v)) for name, v in session.run(given).items()}
        runs.append(Run(feeds, actual))
        feeds = feeds | {
            str(port.state): actual[port.name] for port in signature.outputs if port.state in state
        }
    return runs


def errors(
    signature: ProgramSignature, actual: Tensors, right: Tensors, feeds: Tensors
) -> list[float]:
    """The relative error of each output in `actual`."""
    return [
        relative_error(actual[port.name], right[port.name], feeds.get(str(port.state)))
        for port in signature.outputs
    ]


def tolerances(
    signature: ProgramSignature,
    relative_errors: Sequence[float],
    right: Tensors,
    feeds: Tensors,
    generator: torch.Generator,
) -> list[float]:
    """The largest allowed error of each output.

    `relative_errors` are the measured errors of the outputs, in the same order.
    """
    allowed = [TOLERANCE] * len(relative_errors)
    if max(relative_errors) > TOLERANCE:
        for _ in range(NUDGES):
            moved = errors(signature, reference(signature, nudged(feeds, generator)), right, feeds)
            allowed = [max(old, TOLERANCE + 4 * e) for old, e in zip(allowed, moved, strict=True)]
    return allowed


def nudged(inputs: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """`inputs` with a random relative error of about NUDGE in every number."""
    return {
        name: value * (1 + NUDGE * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
