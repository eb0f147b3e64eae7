"""Check exported graphs against PyTorch's own kernels in float64, on fresh random inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from device_agent.manifest import SAFE_LIMIT, Port, labels_of
from exporters.bundle_writer import Graphs
from exporters.program import Program, ProgramSignature

TOLERANCE = 5e-3
"""Largest error of a tensor relative to its norm. A wrong formula is off by far more; a value
within rounding of a ReLU's kink can move a deep net's gradient by 1e-3 in a correct one."""

BATCH = 8


@dataclass(frozen=True)
class Verdict:
    """The worst of all outputs of all signatures: its relative error and where it is."""

    error: float
    signature: str
    output: str
    seed: int
    tolerance: float = TOLERANCE

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
        return f"worst tensor: {self.output!r} of {self.signature!r}"

    def __str__(self) -> str:
        """All of it as one sentence."""
        return f"{self.result}, {self.worst}"


def verify(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor], seed: int | None = None
) -> Verdict:
    """Run every signature once in onnxruntime and once in PyTorch and compare all outputs.

    State that the bundle stores is the real one, the rest is random; `seed` fixes the inputs
    (default: a fresh one, named in the verdict).
    """
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    generator = torch.Generator().manual_seed(seed)
    verdicts = [
        compare(signature, graphs[signature.name], program, values, generator, seed)
        for signature in program.signatures
    ]
    return max(verdicts, key=lambda verdict: verdict.error)


def compare(
    signature: ProgramSignature,
    graph: bytes,
    program: Program,
    values: Mapping[str, Tensor],
    generator: torch.Generator,
    seed: int,
) -> Verdict:
    """Worst output of one signature."""
    feeds = {p.name: example(p, program, values, generator) for p in signature.inputs}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in feeds.items()}
    try:
        expected = signature.function(wide)
    except RuntimeError:  # constants that the model makes in float32 do not mix with float64
        expected = signature.function(feeds)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    results = session.run(
        [port.name for port in signature.outputs], {n: t.numpy() for n, t in feeds.items()}
    )
    worst = max(
        (
            relative_error(torch.from_numpy(np.asarray(came)), expected[port.name].detach()),
            port.name,
        )
        for port, came in zip(signature.outputs, results, strict=True)
    )
    return Verdict(error=worst[0], signature=signature.name, output=worst[1], seed=seed)


def example(
    port: Port, program: Program, values: Mapping[str, Tensor], generator: torch.Generator
) -> Tensor:
    """An input for `port`: the stored value, or something random of its kind."""
    shape = [BATCH if size is None else size for size in port.shape]
    if port.kind == "labels" and port.dtype == "float32":
        return torch.randn(shape, generator=generator)
    if port.kind == "labels":
        return torch.randint(labels_of(program.classes), shape, generator=generator)
    if port.state is not None and port.state in values:
        return values[port.state].detach()
    if port.kind == "classes":
        return (torch.arange(shape[0]) > 0).float()
    if port.kind == "scalar":
        return torch.tensor(0.05)
    if port.kind == "samples" and port.dtype == "int64":
        return torch.randint(program.sample_limit or SAFE_LIMIT, shape, generator=generator)
    if port.kind == "samples":
        return torch.randn(shape, generator=generator)
    # Optimizer state: second moments and step counts must not be negative.
    return torch.rand(shape, generator=generator) * 0.1


def relative_error(came: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite where `came` is not finite.

    Tensors that are zero but for rounding (the gradient of a bias ahead of a batch norm) are held
    to an absolute bound instead.
    """
    difference = float((came.double() - expected.double()).norm())
    if not np.isfinite(difference):
        return float("inf")
    floor = 1e-4 * max(1.0, expected.numel()) ** 0.5
    return float(difference / max(float(expected.double().norm()), floor))
