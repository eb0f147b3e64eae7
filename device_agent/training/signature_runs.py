"""Runs a bundle's signatures: collects their inputs and stores their outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from device_agent.data.array_files import row_slices
from device_agent.data.local_data import LocalData
from device_agent.formats.bundle import Bundle
from device_agent.formats.evaluation_counts import MOST_CLASSES, EvaluationCounts
from device_agent.formats.label_rule import IGNORED, LabelRule, count_labels
from device_agent.formats.manifest import (
    ABSOLUTE,
    CORRECT,
    EVALUATE,
    LOSS,
    SAMPLES,
    Port,
    Signature,
    TensorEntry,
    Train,
)
from device_agent.formats.manifest_validation import REPAIR
from device_agent.privacy.gaussian_noise import RandomBytes, secure_bytes
from device_agent.runtime.runtime_choice import Session, open_session
from device_agent.training.activation_cache import Recording
from device_agent.training.batching import batches, classes_in
from device_agent.training.training_options import TrainingOptions
from profiles.errors import BundleError

OnBatch = Callable[[], None]
"""Called before each batch of a recording, training or evaluation. The batch starts afterwards."""


def at_once() -> None:
    """Return immediately, so that the next batch starts."""


def check_ports(session: Session, signature: Signature, origin: str) -> None:
    """Check that a graph has the inputs and outputs that the manifest names.

    Args:
        session: The session with the graph.
        signature: The manifest's entry for the graph.
        origin: Name of the graph for the error message.

    Raises:
        BundleError: The graph and the manifest differ.
    """
    for side, ports, names in (
        ("inputs", signature.inputs, session.inputs),
        ("outputs", signature.outputs, session.outputs),
    ):
        if other := {port.name for port in ports} ^ names:
            raise BundleError(
                "{origin}: the {side} of the graph and of the manifest differ: only one of the two "
                "has {port!r}. {repair}",
                code="bundle.wrong-graph",
                side=side,
                port=min(other),
                origin=origin,
                repair=REPAIR,
            )


@dataclass
class SignatureRuns:
    """A bundle's signatures with the tensors that they read and replace, and with their data.

    Attributes:
        bundle: The bundle.
        local: The device's samples and labels.
        scratch: Folder for recordings.
        options: Threads and seed of the training.
        personal: Personal tensors of an earlier round, by name.
        held_out: Indices of the samples that are only evaluated.
        on_batch: Called before each batch.
        random_bytes: The source of randomness for the noise and the batches of differential
            privacy.
        state: The tensors that the open signatures read and replace, by name.
        recordings: Recorded activations, by their names in the schedule.
        dropout: Generator of the seeds for signatures with dropout.
        gradients: The noised gradients of a batch, by port name.
    """

    bundle: Bundle
    local: LocalData
    scratch: Path
    options: TrainingOptions
    personal: dict[str, np.ndarray]
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), kw_only=True)
    on_batch: OnBatch = field(default=at_once, kw_only=True)
    random_bytes: RandomBytes = field(default=secure_bytes, kw_only=True)
    state: dict[str, np.ndarray] = field(default_factory=dict, init=False)
    recordings: dict[str, Recording] = field(default_factory=dict, init=False)
    dropout: np.random.Generator = field(init=False)
    gradients: dict[str, np.ndarray] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # This generator is not used for the sample order, so models with and without dropout see
        # the samples in the same order.
        self.dropout = np.random.default_rng([self.options.seed, 1])

    @cached_property
    def trained(self) -> np.ndarray:
        """Indices of the samples to train on."""
        return np.setdiff1d(np.arange(len(self.local)), self.held_out, assume_unique=True)

    def open(self, name: str) -> Session:
        """Open a session for the signature `name`, and load the tensors that it reads.

        Raises BundleError if the graph and the manifest differ.
        """
        signature = self.bundle.manifest.signatures[name]
        names = {port.state for port in signature.inputs if port.state is not None}
        # Loaded tensors stay: another signature of the same step may have trained them.
        missing = [self.bundle.entry(n) for n in sorted(names - self.state.keys())]
        self.state.update(self.bundle.load(e.name for e in missing if e.stored))
        self.state.update({e.name: self.unstored(e) for e in missing if not e.stored})
        replaced = {port.state for port in signature.outputs if port.name in signature.in_place}
        for tensor, kept in self.personal.items():
            # The old personal model must stay unchanged until the round ends.
            if tensor in replaced and self.state[tensor] is kept:
                self.state[tensor] = kept.copy()
        return self.session(name)

    def session(self, name: str) -> Session:
        """Load the graph of the signature `name`. Raises BundleError like `open`."""
        runtime, graph = self.bundle.manifest.runtime, self.bundle.graph(name)
        session = open_session(runtime, graph, name, self.options.threads)
        check_ports(session, self.bundle.manifest.signatures[name], f"{graph}, signature {name!r}")
        return session

    def unstored(self, entry: TensorEntry) -> np.ndarray:
        """The initial value of a tensor that is not in the bundle.

        It is the value from an earlier round. If the device has no such value, it is zeros.
        """
        kept = self.personal.get(entry.name)
        return np.zeros(entry.shape, np.dtype(entry.dtype)) if kept is None else kept

    def release(self) -> None:
        """Release the loaded tensors, so that only one stage is in memory at a time.

        Tensors and sessions are not in reference cycles, so they are freed at once. A garbage
        collection is not needed. It would take half a second in a process with many objects.
        """
        self.state.clear()

    def feeds(
        self, signature: Signature, source: str, indices: np.ndarray, scalars: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Collect the inputs of one run of a signature.

        Args:
            signature: The signature to run.
            source: The data set of the signature's samples: "x" for local data, or the name of a
                recording.
            indices: Indices of the samples in the batch.
            scalars: Values of scalar inputs, by name.

        Returns:
            The arrays by input name.
        """
        return {port.name: self.feed(port, source, indices, scalars) for port in signature.inputs}

    def feed(
        self, port: Port, source: str, indices: np.ndarray, scalars: Mapping[str, float]
    ) -> np.ndarray:
        """Collect the array for one input, see `feeds`."""
        match port.kind:
            case "samples":
                if source == SAMPLES:
                    return self.local.samples(indices)
                return self.recordings[source].read(indices)
            case "labels":
                return self.local.labels(indices)
            case "classes":
                return self.trained_classes
            case "scalar":
                return np.asarray(scalars[port.name], np.float32)
            case "seed":
                return np.asarray(self.dropout.integers(2**31 - 1), np.int64)
            case "gradient":
                return self.gradient(port)
            case _:
                return self.state[str(port.state)]

    def gradient(self, port: Port) -> np.ndarray:
        """The noised gradient for `port`; zeros before the first batch."""
        if port.name not in self.gradients:
            shape = [size for size in port.shape if size is not None]
            self.gradients[port.name] = np.zeros(shape, np.float32)
        return self.gradients[port.name]

    @cached_property
    def trained_classes(self) -> np.ndarray:
        """A float32 array (classes,): 1 for each class among the trained samples, otherwise 0."""
        return classes_in(self.local.y, self.trained, self.bundle.manifest.classes)

    def update_state(self, signature: Signature, results: Mapping[str, np.ndarray]) -> None:
        """Replace state tensors by the outputs of `signature`, given by output name."""
        for port in signature.outputs:
            if port.state is not None:
                self.state[port.state] = results[port.name]

    def evaluate(
        self, instruction: Train, samples: np.ndarray, by_class: bool = False
    ) -> EvaluationCounts:
        """Evaluate the current state with the signature `evaluate`.

        Args:
            instruction: The training instruction, which gives the batch size and the data set.
            samples: Indices of the samples to evaluate.
            by_class: Also count each class, if the signature counts correct predictions and there
                are at most `MOST_CLASSES` classes. For this, each class is evaluated separately.

        Returns:
            The sum of the losses of the labels that count and, for a classification, the number of
            correct predictions.

        Raises:
            BundleError: The bundle has no signature `evaluate`.
        """
        signature = self.bundle.manifest.signatures.get(EVALUATE)
        if signature is None:
            raise BundleError(
                "{path} has no signature {signature!r}. Export the bundle again.",
                code="bundle.missing-signature",
                path=str(self.bundle.folder),
                signature=EVALUATE,
            )
        counts = any(port.name == CORRECT for port in signature.outputs)
        session = self.open(EVALUATE)
        highest = LabelRule(self.bundle.manifest.classes).highest or 0
        if not (by_class and counts and highest < MOST_CLASSES):
            return self._evaluate(session, instruction, samples, None)
        parts = [
            self._evaluate(session, instruction, self.with_label(samples, label), label)
            for label in range(highest + 1)
        ]
        return EvaluationCounts(
            samples=len(samples),
            counted=sum(part.counted for part in parts),
            correct=sum(part.correct or 0 for part in parts),
            loss_sum=sum(part.loss_sum for part in parts),
            classes=tuple((part.counted, part.correct or 0) for part in parts),
        )

    def _evaluate(
        self, session: Session, instruction: Train, samples: np.ndarray, label: int | None
    ) -> EvaluationCounts:
        """Evaluate `samples`, see `evaluate`. If `label` is given, only this label counts."""
        signature = self.bundle.manifest.signatures[EVALUATE]
        name = next(port.name for port in signature.inputs if port.kind == "labels")
        loss, absolute, correct, counted = 0.0, 0.0, 0, 0
        names = {port.name for port in signature.outputs}
        metrics = dict.fromkeys(sorted(names - {LOSS, CORRECT, ABSOLUTE}), 0.0)
        for indices in batches(len(samples), instruction.batch_size, None):
            self.on_batch()
            feeds = self.feeds(signature, instruction.source, samples[indices], {})
            if label is not None:
                feeds[name] = np.where(feeds[name] == label, label, IGNORED)
            results = session.run(feeds)
            # The loss of a batch is a mean, and batches may have different numbers of labels.
            labels = count_labels(feeds[name])
            loss, counted = loss + float(results[LOSS]) * labels, counted + labels
            correct += int(results.get(CORRECT, 0))
            absolute += float(results.get(ABSOLUTE, 0)) * labels
            for metric in metrics:
                metrics[metric] += float(results[metric]) * len(indices)
        return EvaluationCounts(
            samples=len(samples),
            counted=counted,
            correct=correct if CORRECT in names else None,
            loss_sum=loss,
            absolute_sum=absolute if ABSOLUTE in names else None,
            metrics=metrics or None,
        )

    def with_label(self, samples: np.ndarray, label: int) -> np.ndarray:
        """Return the indices in `samples` of the samples that have `label` at any position."""
        # Read in pieces: the labels of images may be as large as their samples.
        parts = [
            (self.local.labels(samples[rows]) == label).reshape(len(samples[rows]), -1).any(axis=1)
            for rows in row_slices(samples)
        ]
        return np.asarray(samples[np.concatenate(parts)])
