"""Running signatures on the device's state: what goes in, and what comes out of it."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from device_agent.formats.bundle import Bundle
from device_agent.formats.manifest import (
    EVALUATE,
    LOSS,
    SAMPLES,
    Port,
    Signature,
    TensorEntry,
    Train,
)
from device_agent.formats.manifest_validation import REPAIR
from device_agent.formats.update import Evaluation
from device_agent.runtime.runtime_choice import Session, open_session
from device_agent.training.activation_cache import Recording
from device_agent.training.local_data import LocalData, batches, classes_in
from device_agent.training.training_options import TrainingOptions
from profiles.errors import BundleError

OnBatch = Callable[[], None]
"""Called before each batch of whatever is run, which waits until it returns."""

CORRECT = "correct"


def at_once() -> None:
    """Let the next batch begin."""


def check_ports(session: Session, signature: Signature, origin: str) -> None:
    """Raise BundleError where graph and manifest do not have the same inputs and outputs."""
    for side, ports, found in (
        ("inputs", signature.inputs, session.inputs),
        ("outputs", signature.outputs, session.outputs),
    ):
        if other := {port.name for port in ports} ^ found:
            raise BundleError(
                f"{origin}: the graph and the manifest differ in their {side}, by {min(other)!r}. "
                f"{REPAIR}"
            )


@dataclass
class SignatureRuns:
    """A bundle's signatures, the tensors that they read and replace, and the data for them.

    `held_out` are the samples that validate and are not trained on.
    """

    bundle: Bundle
    local: LocalData
    scratch: Path
    options: TrainingOptions
    personal: dict[str, np.ndarray]
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), kw_only=True)
    on_batch: OnBatch = field(default=at_once, kw_only=True)
    state: dict[str, np.ndarray] = field(default_factory=dict, init=False)
    recordings: dict[str, Recording] = field(default_factory=dict, init=False)
    dropout: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        # Apart from the order of the samples, which is the same with and without dropout.
        self.dropout = np.random.default_rng([self.options.seed, 1])

    @cached_property
    def trained(self) -> np.ndarray:
        """The samples that are trained on."""
        return np.setdiff1d(np.arange(len(self.local)), self.held_out, assume_unique=True)

    def open(self, name: str) -> Session:
        """A session for the signature `name`, with its state loaded."""
        signature = self.bundle.manifest.signatures[name]
        names = {port.state for port in signature.inputs if port.state is not None}
        missing = [self.bundle.entry(n) for n in sorted(names - self.state.keys())]
        self.state.update(self.bundle.load(e.name for e in missing if e.stored))
        self.state.update({e.name: self.unstored(e) for e in missing if not e.stored})
        runtime, graph = self.bundle.manifest.runtime, self.bundle.graph(name)
        session = open_session(runtime, graph, name, self.options.threads)
        check_ports(session, signature, f"{graph}, signature {name!r}")
        return session

    def unstored(self, entry: TensorEntry) -> np.ndarray:
        """The first value of a tensor that is not in the bundle."""
        kept = self.personal.get(entry.name)
        return np.zeros(entry.shape, np.dtype(entry.dtype)) if kept is None else kept

    def release(self) -> None:
        """Forget state that is not to be trained, so that one stage is in memory at a time."""
        self.state.clear()
        gc.collect()

    def feeds(
        self, signature: Signature, source: str, indices: np.ndarray, scalars: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """The inputs of one run of `signature` on the samples `indices` of `source`."""
        return {port.name: self.feed(port, source, indices, scalars) for port in signature.inputs}

    def feed(
        self, port: Port, source: str, indices: np.ndarray, scalars: Mapping[str, float]
    ) -> np.ndarray:
        """The array for one input."""
        match port.kind:
            case "samples":
                if source == SAMPLES:
                    return self.local.samples(indices)
                return self.recordings[source].read(indices)
            case "labels":
                return self.local.labels(indices)
            case "classes":
                return self.present
            case "scalar":
                return np.asarray(scalars[port.name], np.float32)
            case "seed":
                return np.asarray(self.dropout.integers(2**31 - 1), np.int64)
            case _:
                return self.state[str(port.state)]

    @cached_property
    def present(self) -> np.ndarray:
        """1 for every class that samples are trained of, 0 for the others."""
        return classes_in(self.local.y, self.trained, self.bundle.manifest.classes)

    def take(self, signature: Signature, results: Mapping[str, np.ndarray]) -> None:
        """Let the outputs of `signature` replace the state that they name."""
        for port in signature.outputs:
            if port.state is not None:
                self.state[port.state] = results[port.name]

    def judge(self, instruction: Train, samples: np.ndarray) -> Evaluation:
        """Run the signature `evaluate` over `samples`. Raises BundleError where there is none."""
        signature = self.bundle.manifest.signatures.get(EVALUATE)
        if signature is None:
            raise BundleError(
                f"{self.bundle.folder} has no signature {EVALUATE!r}: export it again."
            )
        session = self.open(EVALUATE)
        loss, correct = 0.0, 0
        for indices in batches(len(samples), instruction.batch_size, None):
            self.on_batch()
            feeds = self.feeds(signature, instruction.source, samples[indices], {})
            results = session.run(feeds)
            loss += float(results[LOSS]) * len(indices)
            correct += int(results.get(CORRECT, 0))
        counts = any(port.name == CORRECT for port in signature.outputs)
        return Evaluation(
            samples=len(samples), loss=loss / len(samples), correct=correct if counts else None
        )
