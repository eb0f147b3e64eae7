"""Check exported graphs against PyTorch's own kernels in float64, on fresh random inputs."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.manifest import SAFE_LIMIT, Port, labels_of
from device_agent.runtime.runtime_choice import Session, open_session
from exporters.programs.program import Program, ProgramSignature
from exporters.runtime_graph import Graphs

TOLERANCE = 5e-3
"""Largest error of a tensor relative to its norm. A wrong formula is off by far more; a value
within rounding of a ReLU's kink can move a deep net's gradient by 1e-3 in a correct one."""

THREADS = 0
"""As many as there are cores."""

NUDGE = 1e-6
NUDGES = 4
"""Where a tensor misses, twice what PyTorch's own float64 moves by is allowed besides, when its
inputs are off by rounding: so much the kinks of these very inputs are worth."""

MOST = 10 * TOLERANCE
"""No kinks excuse more."""

ROUNDING = 1e-4
"""Numbers this small beside 1, and changes beside their tensor, are rounding times the inverse of
the tolerance."""

BATCHES = (8, 8, 5)
"""Samples of each consecutive step: the last batch of local data may be smaller."""


@dataclass(frozen=True)
class Verdict:
    """The worst of all outputs of all signatures: its relative error and where it is.

    `step` (from 1) says after which of a training signature's `steps` consecutive steps.
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
        """Whether even the worst tensor is within the tolerance."""
        return self.error <= self.tolerance

    @property
    def result(self) -> str:
        """How it ended, for a person; at most 80 columns."""
        return (
            f"{'verified' if self.passed else 'verification failed'}: relative error "
            f"{self.error:.1e} (tolerance {self.tolerance:.0e}, seed {self.seed})"
        )

    @property
    def worst(self) -> str:
        """Where the error is."""
        place = f"worst tensor: {self.output!r} of {self.signature!r}"
        return place if self.steps == 1 else f"{place}, step {self.step} of {self.steps}"

    def __str__(self) -> str:
        """All of it as one sentence."""
        return f"{self.result}, {self.worst}"


@dataclass(frozen=True)
class Deployed:
    """A signature as a device runs it; `held` are inputs that its graph holds itself."""

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
    """Run every signature as a device does and in PyTorch and compare all outputs.

    A signature that trains runs three consecutive steps, each on new samples and on the state that
    the step before it left; each is compared with PyTorch's step from that very state: two
    trajectories of a net with kinks part by themselves. State that the bundle stores starts as the
    real one, the rest is random; `seed` fixes the inputs (default: a fresh one, named in the
    verdict).
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
    """Worst output of one signature over all its steps."""
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
    """Error and tolerance of every output that `came` of `feeds`."""
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
    """The verdict whose error is the most beside its tolerance."""
    return max(verdicts, key=lambda verdict: verdict.error / verdict.tolerance)


def nudge(inputs: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """`inputs`, each number off by about NUDGE of itself."""
    return {
        name: value * (1 + NUDGE * torch.randn(value.shape, generator=generator))
        if value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def trains(signature: ProgramSignature) -> bool:
    """Whether `signature` gives new values of state that it reads."""
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
    except RuntimeError:  # constants that the model makes in float32 do not mix with float64
        results = call(torch.float32)
    return {name: value.detach() for name, value in results.items()}


def example(
    port: Port,
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    batch: int,
) -> Tensor:
    """An input for `port`: the stored value, or something random of its kind."""
    shape = [batch if size is None else size for size in port.shape]
    if port.kind == "labels" and port.dtype == "float32":
        return torch.randn(shape, generator=generator)
    if port.kind == "labels":
        return torch.randint(labels_of(program.classes), shape, generator=generator)
    if port.state is not None and port.state in values:
        return values[port.state].detach()
    if port.kind == "classes":
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


def relative_error(came: Tensor, expected: Tensor, before: Tensor | None = None) -> float:
    """Norm of the difference over the norm of `expected`; infinite where `came` is not finite.

    Of state it is over the norm of the change since `before`: a wrong gradient times a learning
    rate would be little beside the weights themselves. Tensors that are zero but for rounding (the
    gradient of a bias ahead of a batch norm), and changes of that size beside the tensor, are held
    to an absolute bound instead.
    """
    right = expected.double()
    difference: float = (came.double() - right).norm().item()
    if not np.isfinite(difference):
        return float("inf")
    size: float = right.norm().item()
    floor: float = ROUNDING * max(1.0, expected.numel()) ** 0.5
    if before is None:
        return difference / max(size, floor)
    change: float = (right - before.double()).norm().item()
    return difference / max(change, ROUNDING * size, floor)
