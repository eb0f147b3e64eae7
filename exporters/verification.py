"""Checks exported graphs against PyTorch's own kernels in float64, on fresh random inputs."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.label_rule import IGNORED, LabelRule
from device_agent.formats.manifest import SAFE_LIMIT, Port
from device_agent.runtime.runtime_choice import Session, open_session
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Graphs

TOLERANCE = 5e-3
"""Largest error of a tensor relative to its norm. A wrong formula is off by far more. In a correct
graph, a value within rounding of a ReLU's kink can move a deep net's gradient by 1e-3."""

THREADS = 0
"""0 means one thread for each core."""

NUDGE = 1e-6
NUDGES = 4
"""If a tensor misses the tolerance, PyTorch's float64 step runs NUDGES times on inputs that are off
by about NUDGE. Twice the change of the result is added to the tolerance, because that is the effect
of kinks near these inputs."""

MOST = 10 * TOLERANCE
"""The largest tolerance that kinks can lead to."""

ROUNDING = 1e-4
"""Tensors below this size, and changes below this share of their tensor, are rounding divided by
the tolerance."""

BATCHES = (8, 8, 5)
"""Samples of each consecutive step: the last batch of local data may be smaller."""


@dataclass(frozen=True)
class Verdict:
    """The worst output of all signatures.

    Attributes:
        error: Its relative error.
        signature: The signature that it belongs to.
        output: Its port.
        seed: Fixes the random inputs.
        tolerance: The largest error that passes.
        step: The step of a training signature that gave it, from 1.
        steps: How many consecutive steps ran.
    """

    error: float
    signature: str
    output: str
    seed: int
    tolerance: float = TOLERANCE
    step: int = 1
    steps: int = 1

    @property
    def passed(self) -> bool:
        """Whether the worst tensor is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def result(self) -> str:
        """The result in at most 80 columns."""
        return (
            f"{'verified' if self.passed else 'verification failed'}: relative error "
            f"{self.error:.1e} (tolerance {self.tolerance:.0e}, seed {self.seed})"
        )

    @property
    def worst(self) -> str:
        """Signature, output and step of the error."""
        place = f"worst tensor: {self.output!r} of {self.signature!r}"
        return place if self.steps == 1 else f"{place}, step {self.step} of {self.steps}"

    def __str__(self) -> str:
        """Result and place of the error as one sentence."""
        return f"{self.result}, {self.worst}"


@dataclass(frozen=True)
class Deployed:
    """A signature as a device runs it; `held` are inputs that its graph holds as constants."""

    session: Session
    held: frozenset[str]

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""
        given = {name: value.numpy() for name, value in feeds.items() if name not in self.held}
        results = self.session.run(given)
        return {name: torch.from_numpy(np.asarray(result)) for name, result in results.items()}


def verify(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor], seed: int | None = None
) -> Verdict:
    """Run every signature on the device's runtime and in PyTorch, and compare all outputs.

    A signature that trains runs three consecutive steps, each on new samples and on the state after
    the step before. Each step is compared with PyTorch's step from the same state, because two
    trajectories of a net with kinks diverge by themselves.

    Args:
        program: Of a submodel.
        graphs: Of every signature of `program`.
        values: Tensors that the bundle stores, by name. Other state starts at random.
        seed: Fixes the random inputs; by default a fresh seed, which the verdict names.

    Returns:
        The verdict on the worst output.
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for signature in program.signatures:
            graph = graphs[signature.name]
            file = Path(folder, graph.file)
            file.write_bytes(graph.data)
            session = open_session(graph.runtime, file, signature.name, THREADS)
            deployed = Deployed(session, graph.held)
            verdicts.append(compare(signature, deployed, program, values, generator, seed))
    return worst(verdicts)


def compare(
    signature: ProgramSignature,
    deployed: Deployed,
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    seed: int,
) -> Verdict:
    """The verdict on the worst output of one signature over all its steps."""
    batches = BATCHES if trains(signature) else BATCHES[:1]

    def draw(ports: Iterable[Port], batch: int) -> dict[str, Tensor]:
        return {p.name: example(p, program, values, generator, batch) for p in ports}

    state = draw((p for p in signature.inputs if p.state is not None), batches[0])
    verdicts = []
    for step, size in enumerate(batches, 1):
        fresh = draw((p for p in signature.inputs if p.state is None), size)
        came = deployed.run({**fresh, **state})
        errors = compare_step(signature, came, {**fresh, **state}, generator)
        verdicts += [
            Verdict(error, signature.name, port.name, seed, limit, step, len(batches))
            for port, (error, limit) in zip(signature.outputs, errors, strict=True)
        ]
        state |= {str(p.state): came[p.name] for p in signature.outputs if p.state in state}
    return worst(verdicts)


def compare_step(
    signature: ProgramSignature,
    came: Mapping[str, Tensor],
    feeds: Mapping[str, Tensor],
    generator: torch.Generator,
) -> list[tuple[float, float]]:
    """Error and tolerance of every output in `came`, which a runtime computed from `feeds`."""
    right = reference(signature, feeds)

    def errors(results: Mapping[str, Tensor]) -> list[float]:
        return [
            relative_error(results[port.name], right[port.name], feeds.get(str(port.state)))
            for port in signature.outputs
        ]

    found = errors(came)
    allowed = [TOLERANCE] * len(found)
    if max(found) > TOLERANCE:
        for _ in range(NUDGES):
            moved = errors(reference(signature, nudge(feeds, generator)))
            allowed = [
                max(old, min(TOLERANCE + 2 * error, MOST))
                for old, error in zip(allowed, moved, strict=True)
            ]
    return list(zip(found, allowed, strict=True))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict with the largest error relative to its tolerance."""
    return max(verdicts, key=lambda verdict: verdict.error / verdict.tolerance)


def nudge(inputs: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """`inputs`, with every number changed by about NUDGE of itself."""
    return {
        name: value * (1 + NUDGE * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def trains(signature: ProgramSignature) -> bool:
    """Whether `signature` returns new values of state that it reads."""
    read = {port.state for port in signature.inputs if port.state is not None}
    return any(port.state in read for port in signature.outputs)


def reference(signature: ProgramSignature, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of `signature` in float64."""

    def call(dtype: torch.dtype) -> dict[str, Tensor]:
        return signature.function(
            {n: t.to(dtype) if t.is_floating_point() else t for n, t in feeds.items()}
        )

    try:
        results = call(torch.float64)
    except RuntimeError:  # the model's float32 constants do not mix with float64
        results = call(torch.float32)
    return {name: value.detach() for name, value in results.items()}


def example(
    port: Port,
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    batch: int,
) -> Tensor:
    """An input for `port`: the stored value, or random numbers of its kind."""
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
    if port.kind == "samples" and port.dtype == "int64":
        return torch.randint(program.sample_limit or SAFE_LIMIT, shape, generator=generator)
    if port.kind == "samples":
        return torch.randn(shape, generator=generator)
    # Optimizer state: second moments and step counts must not be negative.
    return torch.rand(shape, generator=generator) * 0.1


def random_labels(classes: int, shape: list[int], generator: torch.Generator) -> Tensor:
    """Random classes of `shape`; a quarter is IGNORED if a sample has several."""
    labels = torch.randint((LabelRule(classes).highest or 0) + 1, shape, generator=generator)
    if len(shape) == 1:
        return labels
    return torch.where(torch.rand(shape, generator=generator) < 0.25, IGNORED, labels)


def relative_error(came: Tensor, expected: Tensor, before: Tensor | None = None) -> float:
    """Norm of the difference relative to the norm of `expected`; infinite if `came` is not finite.

    The error of state is relative to its change since `before`: a wrong gradient times a learning
    rate would be small relative to the weights. An absolute bound applies to tensors that are zero
    except for rounding, such as the gradient of a bias before a batch norm, and to changes of that
    size.
    """
    right = expected.double()
    difference: float = (came.double() - right).norm().item()
    if not np.isfinite(difference):
        return float("inf")
    size: float = right.norm().item()
    # The norm of a tensor whose elements are all as large as ROUNDING.
    floor: float = ROUNDING * max(1.0, expected.numel()) ** 0.5
    if before is None:
        return difference / max(size, floor)
    change: float = (right - before.double()).norm().item()
    return difference / max(change, ROUNDING * size, floor)
