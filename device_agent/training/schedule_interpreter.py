"""Runs the schedule of a bundle: its signatures and instructions, whatever the submodel family."""

import json
import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from device_agent.formats.manifest import LOSS, SAMPLES, Initialise, Record, Train
from device_agent.formats.update import DIVERGED
from device_agent.log_format import fields
from device_agent.runtime.runtime_choice import Session
from device_agent.system.interval_timer import IntervalTimer
from device_agent.training.activation_cache import Recording
from device_agent.training.batching import batches
from device_agent.training.checkpoint import Checkpoint, Checkpoints, Position
from device_agent.training.signature_runs import SignatureRuns
from profiles.errors import UpdateError

log = logging.getLogger(__name__)
OnEpoch = Callable[[int, int, float], None]
"""Called after each local epoch with its number from 1, the number of epochs and the mean loss."""

CHECKPOINT_S = 120.0
"""Time between checkpoints within an epoch or a recording: the most work that a kill can cost."""
PROGRESS_S = 30.0
"""Time between two progress messages about the same epoch or recording."""


def ignore_epoch(epoch: int, epochs: int, loss: float) -> None:
    """Do nothing."""


@dataclass
class ScheduleRun(SignatureRuns):
    """One training of one bundle, instruction by instruction.

    Attributes:
        checkpoints: Where checkpoints are stored; None to store none.
        spare_bytes: Memory in bytes for recordings that do not fit on the disk.
        at: How far the training has come.
        batch_seconds: Durations of the training batches that this process ran.
    """

    on_epoch: OnEpoch = ignore_epoch
    checkpoints: Checkpoints | None = None
    spare_bytes: int = 0
    at: Position = field(default_factory=Position, init=False)
    batch_seconds: "array[float]" = field(default_factory=lambda: array("d"), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.saving, self.telling = IntervalTimer(CHECKPOINT_S), IntervalTimer(PROGRESS_S)

    def go(self) -> None:
        """Run the schedule from the current position to its end."""
        schedule = self.bundle.manifest.schedule
        while self.at.instruction < len(schedule):
            match schedule[self.at.instruction]:
                case Record() as instruction:
                    self.record(instruction)
                case Initialise() as instruction:
                    self.initialise(instruction)
                case Train() as instruction:
                    self.train(instruction)

    def prepare(self) -> None:
        """Run all instructions except the training: recordings and the initial personal model."""
        for instruction in self.bundle.manifest.schedule:
            if isinstance(instruction, Record):
                self.record(instruction)
            elif isinstance(instruction, Initialise):
                self.initialise(instruction)

    def resume(self, found: Checkpoint) -> None:
        """Continue from a checkpoint of the same training."""
        for name, written in found.position.recorded.items():
            self.recordings[name] = self.recording(name, len(self.local))
            self.recordings[name].written = written
        self.record_again(found.position.instruction)
        self.at, self.state = found.position, found.state
        self.personal.update(found.personal)
        self.dropout.bit_generator.state = json.loads(self.at.dropout)
        log.info("Continuing the interrupted training: %s.", self.place())

    def place(self) -> str:
        """Describe the current position, for a message."""
        schedule = self.bundle.manifest.schedule
        if self.at.instruction == len(schedule):
            return "writing the update"
        match schedule[self.at.instruction]:
            case Record(target=target):
                what = f"recording {target}"
            case Initialise():
                return "initialising the personal model"
            case Train():
                what = f"epoch {self.at.epoch + 1}"
        return f"{what}, batch {self.at.batch + 1}"

    def record_again(self, instruction: int) -> None:
        """Repeat recordings that are still needed but were only in the killed process's memory."""
        schedule = self.bundle.manifest.schedule
        before = [done for done in schedule[:instruction] if isinstance(done, Record)]
        needed = self.sources_from(instruction)
        if (needed & {done.target for done in before}) <= self.recordings.keys():
            return
        # A checkpoint would replace the later position that the training resumes from.
        kept, self.checkpoints = self.checkpoints, None
        for done in before:
            self.record(done)
        self.checkpoints = kept

    def sources_from(self, instruction: int) -> set[str]:
        """Names of the data sets that `instruction` and later instructions read."""
        rest = self.bundle.manifest.schedule[instruction:]
        return {later.source for later in rest if not isinstance(later, Initialise)}

    def checkpoint(self) -> None:
        """Store a checkpoint of the current position."""
        if self.checkpoints is None:
            return
        needed = self.sources_from(self.at.instruction)
        self.at.recorded = {
            name: made.written
            for name, made in self.recordings.items()
            if made.written is not None and name in needed
        }
        self.at.dropout = json.dumps(self.dropout.bit_generator.state)
        frozen = {e.name for e in self.bundle.manifest.tensors if e.role == "frozen"}
        state = {name: array for name, array in self.state.items() if name not in frozen}
        if self.at.recording is not None:
            state = {}  # a recording only reads its tensors, which are in the bundle
        self.checkpoints.save(Checkpoint(self.at, state, {} if state else self.personal))

    def advance(self) -> None:
        """Move to the next instruction and store a checkpoint."""
        self.at.instruction += 1
        self.at.epoch = self.at.batch = 0
        self.checkpoint()

    def tell(self, what: str, batch: int, count: int) -> None:
        """Report progress, at most once every `PROGRESS_S` seconds."""
        if self.telling.due():
            log.info("%s: batch %d of %d", what, batch, count)

    def record(self, instruction: Record) -> None:
        """Run one frozen stage over all samples and store its activations.

        The stage's graph and tensors are in memory only during this call.
        """
        signature = self.bundle.manifest.signatures[instruction.signature]
        parts = batches(len(self.local), self.record_batch(), None)
        target = self.recording(instruction.target, sum(map(len, parts[: self.at.batch])))
        session = self.open(instruction.signature)
        for number, indices in enumerate(parts[self.at.batch :], self.at.batch + 1):
            self.on_batch()
            feeds = self.feeds(signature, instruction.source, indices, {})
            target.append(session.run(feeds)[signature.outputs[0].name])
            self.tell(f"recording {instruction.target}", number, len(parts))
            if target.kept and self.saving.due():
                target.sync()
                self.at.batch = number
                self.at.recording, self.at.begun = instruction.target, target.written
                self.checkpoint()
        target.close()
        del session
        self.release()
        self.at.recording = self.at.begun = None
        source = self.recordings.pop(instruction.source, None)
        self.recordings[instruction.target] = target
        self.advance()
        # The source is deleted after the checkpoint, which until then refers to it.
        if source is not None:
            source.remove()

    def recording(self, name: str, done: int) -> Recording:
        """Open the recording `name`, of which `done` samples are on disk already."""
        schedule = self.bundle.manifest.schedule
        made_by = next(s for s in schedule if isinstance(s, Record) and s.target == name)
        (output,) = self.bundle.manifest.signatures[made_by.signature].outputs
        shape = tuple(size for size in output.shape if size is not None)
        path = self.scratch / f"{name}.npy"
        return Recording(path, len(self.local), shape, done=done, memory_bytes=self.spare_bytes)

    def record_batch(self) -> int:
        """Batch size for recordings: the largest of the training batches.

        A graph takes any batch size, but the predicted memory is that of this one.
        """
        sizes = [s.batch_size for s in self.bundle.manifest.schedule if isinstance(s, Train)]
        return max(sizes, default=1)

    def initialise(self, instruction: Initialise) -> None:
        """Compute initial personal tensors, unless the device has them from an earlier round."""
        signature = self.bundle.manifest.signatures[instruction.signature]
        wanted = {port.state for port in signature.outputs}
        if not wanted <= self.personal.keys():
            session = self.open(instruction.signature)
            self.update_state(
                signature, session.run(self.feeds(signature, SAMPLES, np.empty(0, int), {}))
            )
            self.personal = {name: self.state[name] for name in wanted if name is not None}
            self.release()
        self.advance()

    def train(self, instruction: Train) -> None:
        """Run the remaining epochs of a training."""
        sessions: dict[str, Session] = {}
        while self.at.epoch < instruction.epochs:
            sessions = sessions or self.sessions(instruction)
            self.train_epoch(instruction, sessions)
            if len(self.held_out):
                # Frees the memory of the training sessions for that of the evaluation.
                sessions.clear()
                self.at.validation.append(self.evaluate(instruction, self.held_out))
            if self.at.epoch < instruction.epochs:
                self.checkpoint()
            self.report(instruction)
        self.advance()

    def train_epoch(self, instruction: Train, sessions: Mapping[str, Session]) -> None:
        """Run the steps on the remaining batches of the current epoch.

        Raises UpdateError at the first loss that is not finite, because training cannot recover.
        """
        # The order depends only on seed and epoch, so a resumed epoch sees the same batches.
        order = np.random.default_rng([self.options.seed, self.at.epoch])
        parts = batches(len(self.trained), instruction.batch_size, order)
        for indices in parts[self.at.batch :]:
            self.on_batch()
            begun = time.perf_counter()
            losses = self.train_batch(instruction, sessions, self.trained[indices])
            self.batch_seconds.append(time.perf_counter() - begun)
            self.at.loss_sum += sum(losses)
            if not math.isfinite(self.at.loss_sum):
                raise UpdateError(DIVERGED, code="update.diverged")
            self.at.loss_count += len(losses)
            self.at.batch += 1
            self.tell(f"epoch {self.at.epoch + 1}", self.at.batch, len(parts))
            if self.saving.due():
                self.checkpoint()
        count = self.at.loss_count
        self.at.losses.append(self.at.loss_sum / count if count else math.nan)
        self.at.loss_sum, self.at.loss_count = 0.0, 0
        self.at.epoch, self.at.batch = self.at.epoch + 1, 0

    def report(self, instruction: Train) -> None:
        """Report the results of the epoch that has just ended."""
        epoch, epochs = self.at.epoch, instruction.epochs
        loss = self.at.losses[-1]
        about = fields(epoch=epoch, epochs=epochs, loss=loss)
        log.info("epoch %d of %d: loss %.4f", epoch, epochs, loss, extra=about)
        self.on_epoch(epoch, epochs, loss)
        if self.at.validation:
            log.info("epoch %d of %d: validation %s", epoch, epochs, self.at.validation[-1])

    def sessions(self, instruction: Train) -> dict[str, Session]:
        """Open a session for each signature that `instruction` runs."""
        return {step.signature: self.open(step.signature) for step in instruction.steps}

    def train_batch(
        self, instruction: Train, sessions: Mapping[str, Session], indices: np.ndarray
    ) -> list[float]:
        """Run all steps on the samples `indices`, and return the losses that they report."""
        losses = []
        for step in instruction.steps:
            signature = self.bundle.manifest.signatures[step.signature]
            for _ in range(step.times):
                feeds = self.feeds(signature, instruction.source, indices, step.inputs)
                results = sessions[step.signature].run(feeds)
                self.update_state(signature, results)
                if LOSS in results:
                    losses.append(float(results[LOSS]))
        self.at.steps += 1
        return losses
