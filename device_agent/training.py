"""The schedule interpreter: it runs what the manifest says and knows nothing of families."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from device_agent.activation_cache import Recording
from device_agent.bundle import Bundle, open_bundle
from device_agent.data import LocalData, batches, load_data
from device_agent.manifest import (
    SAMPLES,
    FileEntry,
    Initialise,
    Port,
    Record,
    Signature,
    TensorEntry,
    Train,
    label_dtype,
    uploaded,
)
from device_agent.runtime import Session, open_session
from device_agent.update import UpdateRecord, check_place, write_update
from profiles.errors import UpdateError

OnEpoch = Callable[[int, int, float], None]
"""Called after each local epoch with its number from 1, the number of epochs and the mean loss."""

LOSS = "loss"


@dataclass(frozen=True)
class Trained:
    """A written update's record, and the personal tensors to keep on the device."""

    record: UpdateRecord
    personal: dict[str, np.ndarray]


def quiet(epoch: int, epochs: int, loss: float) -> None:
    """Tell nobody."""


def train_bundle(
    folder: str | Path,
    data: str,
    out: str | Path,
    *,
    threads: int = 0,
    seed: int = 0,
    personal: Mapping[str, np.ndarray] | None = None,
    on_epoch: OnEpoch = quiet,
    force: bool = False,
) -> Trained:
    """Train the bundle in `folder` on local `data` and write the update folder `out`.

    `personal` are tensors kept from earlier rounds; `seed` decides the order of the samples and
    what dropout drops. With one thread and the same seed the update is the same, bit for bit.
    `force` replaces the update that is in `out`.

    Raises BundleError, DataError or UpdateError (training diverged); then `out` is not written.
    """
    out = Path(out)
    check_place(out, force)
    bundle = open_bundle(Path(folder))
    local = local_data(bundle, data)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=".recordings."))
    try:
        run = ScheduleRun(bundle, local, scratch, threads, seed, dict(personal or {}), on_epoch)
        run.go()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return run.finish(out, force)


def local_data(bundle: Bundle, source: str) -> LocalData:
    """The data of `source` for `bundle`. Raises DataError where they do not fit it."""
    about = bundle.manifest
    return load_data(
        source,
        about.sample_shape,
        about.classes,
        about.sample_dtype,
        about.sample_limit,
        labels=label_dtype(about),
    )


@dataclass
class ScheduleRun:
    """One training of one bundle, instruction by instruction."""

    bundle: Bundle
    local: LocalData
    scratch: Path
    threads: int
    seed: int
    personal: dict[str, np.ndarray]
    on_epoch: OnEpoch
    state: dict[str, np.ndarray] = field(default_factory=dict)
    dropout: np.random.Generator = field(init=False)
    recordings: dict[str, Recording] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        # Apart from the order of the samples, which is the same with and without dropout.
        self.dropout = np.random.default_rng([self.seed, 1])

    def go(self) -> None:
        """Run the whole schedule."""
        for instruction in self.bundle.manifest.schedule:
            match instruction:
                case Record():
                    self.record(instruction)
                case Initialise():
                    self.initialise(instruction)
                case Train():
                    self.train(instruction)

    def prepare(self) -> None:
        """Everything that the schedule does ahead of the training itself."""
        for instruction in self.bundle.manifest.schedule:
            if isinstance(instruction, Record):
                self.record(instruction)
            elif isinstance(instruction, Initialise):
                self.initialise(instruction)

    def record(self, instruction: Record) -> None:
        """Run one frozen stage over all samples; its weights and graph are held only here."""
        signature = self.bundle.manifest.signatures[instruction.signature]
        session = self.open(instruction.signature)
        (output,) = signature.outputs
        target = Recording(
            self.scratch / f"{instruction.target}.npy",
            len(self.local),
            tuple(size for size in output.shape if size is not None),
        )
        for indices in batches(len(self.local), self.record_batch(), None):
            feeds = self.feeds(signature, instruction.source, indices, {})
            target.write(indices, session.run(feeds)[output.name])
        self.release()
        spent = self.recordings.pop(instruction.source, None)
        if spent is not None:
            spent.remove()
        self.recordings[instruction.target] = target

    def record_batch(self) -> int:
        """Batch size of the recording: that of the training it is made for."""
        sizes = [s.batch_size for s in self.bundle.manifest.schedule if isinstance(s, Train)]
        return max(sizes, default=1)

    def initialise(self, instruction: Initialise) -> None:
        """Fill the personal tensors that this device does not hold yet."""
        signature = self.bundle.manifest.signatures[instruction.signature]
        wanted = {port.state for port in signature.outputs}
        if wanted <= self.personal.keys():
            return
        session = self.open(instruction.signature)
        self.take(signature, session.run(self.feeds(signature, SAMPLES, np.empty(0, int), {})))
        self.personal = {name: self.state[name] for name in wanted if name is not None}
        self.release()

    def train(self, instruction: Train) -> None:
        """Run the steps on every batch of every epoch."""
        sessions = self.sessions(instruction)
        for epoch in range(instruction.epochs):
            order = np.random.default_rng([self.seed, epoch])
            losses: list[float] = []
            for indices in batches(len(self.local), instruction.batch_size, order):
                losses += self.one_batch(instruction, sessions, indices)
            self.losses.append(float(np.mean(losses)))
            self.on_epoch(epoch + 1, instruction.epochs, self.losses[-1])

    def sessions(self, instruction: Train) -> dict[str, Session]:
        """An open session for every signature that `instruction` runs."""
        return {step.signature: self.open(step.signature) for step in instruction.steps}

    def one_batch(
        self, instruction: Train, sessions: Mapping[str, Session], indices: np.ndarray
    ) -> list[float]:
        """All steps on the samples `indices`; returns the losses that they report."""
        losses = []
        for step in instruction.steps:
            signature = self.bundle.manifest.signatures[step.signature]
            for _ in range(step.times):
                feeds = self.feeds(signature, instruction.source, indices, step.inputs)
                results = sessions[step.signature].run(feeds)
                self.take(signature, results)
                if LOSS in results:
                    losses.append(float(results[LOSS]))
        self.steps += 1
        return losses

    def open(self, name: str) -> Session:
        """A session for the signature `name`, with its state loaded."""
        signature = self.bundle.manifest.signatures[name]
        names = {port.state for port in signature.inputs if port.state is not None}
        missing = [self.bundle.entry(n) for n in sorted(names - self.state.keys())]
        self.state.update(self.bundle.load(e.name for e in missing if e.stored))
        self.state.update({e.name: self.unstored(e) for e in missing if not e.stored})
        runtime = self.bundle.manifest.runtime
        return open_session(runtime, self.bundle.graph(name), name, self.threads)

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
                    return np.asarray(self.local.x[indices])
                return self.recordings[source].read(indices)
            case "labels":
                return np.asarray(self.local.y[indices])
            case "classes":
                known = np.arange(self.bundle.manifest.classes)
                return np.isin(known, self.local.y).astype(np.float32)
            case "scalar":
                return np.asarray(scalars[port.name], np.float32)
            case "seed":
                return np.asarray(self.dropout.integers(2**31 - 1), np.int64)
            case _:
                return self.state[str(port.state)]

    def take(self, signature: Signature, results: Mapping[str, np.ndarray]) -> None:
        """Let the outputs of `signature` replace the state that they name."""
        for port in signature.outputs:
            if port.state is not None:
                self.state[port.state] = results[port.name]

    def finish(self, out: Path, force: bool = False) -> Trained:
        """Write the update. Raises UpdateError where the loss or a tensor is not finite."""
        table = uploaded(self.bundle.manifest.tensors)
        if not self.losses:
            raise UpdateError("The bundle's schedule trains nothing, so there is no update.")
        record = UpdateRecord(
            bundle=self.bundle.sha256,
            base=self.bundle.manifest.base,
            submodel=self.bundle.manifest.submodel,
            samples=len(self.local),
            steps=self.steps,
            loss_first=self.losses[0],
            loss_last=self.losses[-1],
            tensors=table,
            file=FileEntry(size=0, sha256=""),
        )
        tensors = {entry.name: self.state[entry.name] for entry in table}
        record = write_update(out, record, tensors, force)
        kept = [e.name for e in self.bundle.manifest.tensors if e.role == "personal"]
        return Trained(record, {name: self.state[name] for name in kept})
