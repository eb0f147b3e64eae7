"""Runs the schedule of a bundle: its signatures and instructions, for every submodel family."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from device_agent.formats.evaluation_counts import DIVERGED, EvaluationCounts
from device_agent.formats.manifest import LOSS, SAMPLES, Initialise, Record, Step, Train
from device_agent.log_format import fields
from device_agent.privacy.sample_accountant import sampling_probability
from device_agent.privacy.sample_gradients import add_clipped, poisson_batch, to_noised_mean
from device_agent.runtime.runtime_choice import Session
from device_agent.system.interval_timer import IntervalTimer
from device_agent.training.batching import batches
from device_agent.training.checkpoint import Checkpoint
from device_agent.training.resumable_run import ResumableRun
from profiles.errors import UpdateError
from profiles.text_formatting import loss_figure

log = logging.getLogger(__name__)
OnEpoch = Callable[[int, int, float], None]
"""Called after each local epoch with its number from 1, the number of epochs and the mean loss."""

CHECKPOINT_S = 120.0
"""Time between checkpoints within an epoch or a recording. A kill loses at most this much work."""
PROGRESS_S = 30.0
"""Time between two progress messages about the same epoch or recording."""


def ignore_epoch(epoch: int, epochs: int, loss: float) -> None:
    """Do nothing."""


@dataclass
class ScheduleRun(ResumableRun):
    """Trains one bundle, instruction by instruction.

    Attributes:
        on_epoch: Called after each epoch.
        batch_seconds: Durations of the training batches that this process ran.
    """

    on_epoch: OnEpoch = ignore_epoch
    batch_seconds: "array[float]" = field(default_factory=lambda: array("d"), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checkpoint_timer = IntervalTimer(CHECKPOINT_S)
        self.progress_timer = IntervalTimer(PROGRESS_S)

    def run_schedule(self) -> None:
        """Run the schedule from the current position to its end."""
        schedule = self.bundle.manifest.schedule
        while self.position.instruction < len(schedule):
            match schedule[self.position.instruction]:
                case Record() as instruction:
                    self.record(instruction)
                case Initialise() as instruction:
                    self.initialise(instruction)
                case Train() as instruction:
                    self.train(instruction)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the same training."""
        self.reopen_recordings(checkpoint.position)
        # Recording moves the position, so the checkpoint's position is restored after it.
        self.record_again(checkpoint.position.instruction)
        self.restore(checkpoint)
        log.info("Continuing the interrupted training: %s.", self.describe_position())

    def record_again(self, instruction: int) -> None:
        """Repeat the needed recordings that were only in the memory of the killed process."""
        schedule = self.bundle.manifest.schedule
        before = [done for done in schedule[:instruction] if isinstance(done, Record)]
        needed = self.sources_from(instruction)
        if (needed & {done.target for done in before}) <= self.recordings.keys():
            return
        # Store no checkpoint here: it would replace the later one, from which the training resumes.
        kept, self.checkpoints = self.checkpoints, None
        for done in before:
            self.record(done)
        self.checkpoints = kept

    def report_progress(self, what: str, batch: int, count: int) -> None:
        """Report progress, at most once every `PROGRESS_S` seconds."""
        if self.progress_timer.due():
            log.info("%s: batch %d of %d", what, batch, count)

    def record(self, instruction: Record) -> None:
        """Run one frozen stage over all samples and store its activations.

        The stage's graph and tensors are in memory only during this call.
        """
        signature = self.bundle.manifest.signatures[instruction.signature]
        parts = batches(len(self.local), self.record_batch(), None)
        target = self.open_recording(
            instruction.target, sum(map(len, parts[: self.position.batch]))
        )
        session = self.open(instruction.signature)
        for number, indices in enumerate(parts[self.position.batch :], self.position.batch + 1):
            self.on_batch()
            begun = time.perf_counter()
            feeds = self.feeds(signature, instruction.source, indices, {})
            target.append(session.run(feeds)[signature.outputs[0].name])
            self.spend(time.perf_counter() - begun)
            self.report_progress(f"recording {instruction.target}", number, len(parts))
            if target.kept and self.checkpoint_timer.due():
                self.position.batch = number
                self.position.recording, self.position.begun = instruction.target, target.stored()
                self.save_checkpoint()
        target.close()
        # The session holds the weights of this stage. If it stayed open, memory for two stages
        # would be needed.
        del session
        self.release()
        self.position.recording = self.position.begun = None
        source = self.recordings.pop(instruction.source, None)
        self.recordings[instruction.target] = target
        self.advance()
        # The last checkpoint may refer to the source, which is deleted now.
        if self.has_checkpoint or self.checkpoint_timer.due():
            self.save_checkpoint()
        if source is not None:
            source.remove()

    def record_batch(self) -> int:
        """The batch size for recordings: the largest of the training batches.

        A graph accepts any batch size, but the memory is predicted for the largest batch.
        """
        sizes = [s.batch_size for s in self.bundle.manifest.schedule if isinstance(s, Train)]
        return max(sizes, default=1)

    def initialise(self, instruction: Initialise) -> None:
        """Compute initial personal tensors, unless the device has them from an earlier round."""
        signature = self.bundle.manifest.signatures[instruction.signature]
        wanted = {port.state for port in signature.outputs}
        # Fill all or none: the tensors of one personal model belong together.
        if instruction.every_round or not wanted <= self.personal.keys():
            session = self.open(instruction.signature)
            self.update_state(
                signature, session.run(self.feeds(signature, SAMPLES, np.empty(0, int), {}))
            )
            self.personal = {name: self.state[name] for name in wanted if name is not None}
            self.release()
        self.advance()
        self.save_checkpoint()

    def train(self, instruction: Train) -> None:
        """Run the remaining epochs of a training.

        For a federated evaluation, the received model is evaluated before the training, and the
        trained model after the training. Counts have no noise, so a training with differential
        privacy for samples has no such evaluation.
        """
        private = instruction.privacy is not None
        request = self.options.evaluation if len(self.held_out) and not private else None
        if request is not None and self.position.before is None:
            self.position.before = self.judge_received(instruction)
        sessions: dict[str, Session] = {}
        while self.position.epoch < self.epochs(instruction) and self.has_time():
            sessions = sessions or self.open_sessions(instruction)
            self.train_epoch(instruction, sessions)
            if self.options.validation and len(self.held_out):
                # Close the training sessions to free memory for the evaluation.
                sessions.clear()
                counts = self.evaluate(instruction, self.held_out)
                self.position.validation.append(counts.means())
            if self.position.epoch < self.epochs(instruction):
                self.save_checkpoint()
            self.report_epoch(instruction)
        if self.position.epoch < self.epochs(instruction) or self.position.samples is not None:
            log.info("The time for this training is used up after %d batches.", self.position.steps)
        if request is not None:
            sessions.clear()
            self.position.after = self.evaluate(instruction, self.held_out, request.by_class)
        self.advance()
        self.save_checkpoint()

    def judge(self) -> EvaluationCounts:
        """Evaluate the received model on the held-out samples, without training it."""
        for instruction in self.bundle.manifest.schedule:
            if isinstance(instruction, Record):
                self.record(instruction)
            elif isinstance(instruction, Train):
                return self.judge_received(instruction)
        raise AssertionError("every schedule trains")

    def judge_received(self, instruction: Train) -> EvaluationCounts:
        """Evaluate the received model on the held-out samples, see `evaluate`.

        A personal model of an earlier round is not the received model. So the personal tensors get
        the values that they would have at the start of a first round.
        """
        assert self.options.evaluation is not None
        for first in self.bundle.manifest.schedule:
            if isinstance(first, Initialise):
                signature = self.bundle.manifest.signatures[first.signature]
                session = self.open(first.signature)
                feeds = self.feeds(signature, SAMPLES, np.empty(0, int), {})
                initial = session.run(feeds)
                del session
                self.release()
                self.update_state(signature, initial)
        counts = self.evaluate(instruction, self.held_out, self.options.evaluation.by_class)
        self.release()
        return counts

    def epochs(self, instruction: Train) -> int:
        """The number of epochs. The last epoch may end early, see `Train`."""
        if instruction.batches is None:
            return instruction.epochs
        batches_each = len(batches(len(self.trained), instruction.batch_size, None))
        return min(instruction.epochs, math.ceil(instruction.batches / batches_each))

    def train_epoch(self, instruction: Train, sessions: Mapping[str, Session]) -> None:
        """Run the steps on the remaining batches of the current epoch.

        Raises UpdateError at the first loss that is not finite, because training cannot recover.
        """
        # The order depends only on seed and epoch, so a resumed epoch sees the same batches.
        order = np.random.default_rng([self.options.seed, self.position.epoch])
        parts = batches(len(self.trained), instruction.batch_size, order)
        if instruction.batches is not None:
            parts = parts[: instruction.batches - self.position.epoch * len(parts)]
        for part in parts[self.position.batch :]:
            if not self.has_time():
                break
            self.on_batch()
            begun = time.perf_counter()
            indices = part
            if instruction.privacy is not None:
                # Do not use the seed: anybody who knows the batches can subtract more from the
                # noised sums.
                probability = sampling_probability(len(self.trained), instruction.batch_size)
                indices = poisson_batch(len(self.trained), probability, self.random_bytes)
            losses = self.train_batch(instruction, sessions, self.trained[indices])
            self.batch_seconds.append(time.perf_counter() - begun)
            self.spend(self.batch_seconds[-1])
            self.position.loss_sum += sum(losses)
            if not math.isfinite(self.position.loss_sum):
                raise UpdateError(DIVERGED, code="update.diverged")
            self.position.loss_count += len(losses)
            self.position.batch += 1
            self.report_progress(
                f"epoch {self.position.epoch + 1}", self.position.batch, len(parts)
            )
            if self.checkpoint_timer.due():
                self.save_checkpoint()
        if self.position.epoch == 0 and self.position.batch < len(parts):
            self.position.samples = sum(map(len, parts[: self.position.batch]))
        count, empty = self.position.loss_count, 0.0 if instruction.privacy else math.nan
        self.position.losses.append(self.position.loss_sum / count if count else empty)
        self.position.loss_sum, self.position.loss_count = 0.0, 0
        self.position.epoch, self.position.batch = self.position.epoch + 1, 0

    def has_time(self) -> bool:
        """Whether another batch may begin. The first batch may always begin."""
        budget = self.options.budget_s
        return budget is None or self.position.steps == 0 or self.position.spent_s < budget

    def spend(self, seconds: float) -> None:
        """Count the duration of a batch, if the time is limited."""
        if self.options.budget_s is not None:
            self.position.spent_s += seconds

    def report_epoch(self, instruction: Train) -> None:
        """Report the results of the epoch that has just ended."""
        epoch, epochs = self.position.epoch, self.epochs(instruction)
        loss = self.position.losses[-1]
        about = fields(epoch=epoch, epochs=epochs, loss=loss)
        log.info("epoch %d of %d: loss %s", epoch, epochs, loss_figure(loss), extra=about)
        self.on_epoch(epoch, epochs, loss)
        if self.position.validation:
            log.info("epoch %d of %d: validation %s", epoch, epochs, self.position.validation[-1])

    def open_sessions(self, instruction: Train) -> dict[str, Session]:
        """Open a session for each signature that `instruction` runs."""
        return {step.signature: self.open(step.signature) for step in instruction.steps}

    def train_batch(
        self, instruction: Train, sessions: Mapping[str, Session], indices: np.ndarray
    ) -> list[float]:
        """Run all steps on the samples `indices`, and return the losses that they report."""
        losses = []
        for step in instruction.steps:
            if instruction.privacy is not None and step.each_sample is True:
                losses += self.private_gradients(instruction, step, sessions, indices)
                continue
            signature = self.bundle.manifest.signatures[step.signature]
            for _ in range(step.times):
                feeds = self.feeds(signature, instruction.source, indices, step.inputs)
                results = sessions[step.signature].run(feeds, signature.overwritten())
                self.update_state(signature, results)
                if LOSS in results:
                    losses.append(float(results[LOSS]))
        self.position.steps += 1
        return losses

    def private_gradients(
        self,
        instruction: Train,
        step: Step,
        sessions: Mapping[str, Session],
        indices: np.ndarray,
    ) -> list[float]:
        """Compute the noised mean gradient of the samples `indices`. Returns their finite losses.

        A loss that is not finite must not end the training, because the end would tell the
        coordinator something about one sample. Clipping and noise are not part of the graph, so the
        owner does not have to trust the bundle.
        """
        assert instruction.privacy is not None
        signature, losses = self.bundle.manifest.signatures[step.signature], []
        ports = [port for port in signature.outputs if port.kind == "gradient"]
        sums = {port.name: self.gradient(port) for port in ports}
        for total in sums.values():
            total[...] = 0.0
        if any(port.kind == "seed" for port in signature.inputs):
            # From the seed of the training, a graph could tell how many samples came before.
            self.dropout = np.random.default_rng(int.from_bytes(self.random_bytes(16), "little"))
        for number in range(len(indices)):
            sample = indices[number : number + 1]
            feeds = self.feeds(signature, instruction.source, sample, step.inputs)
            session = sessions[step.signature]
            if self.bundle.manifest.runtime == "litert":
                # A TFLite graph can keep values of earlier samples; a new session has none.
                session = self.session(step.signature)
            results = session.run(feeds)
            loss = float(results.pop(LOSS))
            if math.isfinite(loss):
                losses.append(loss)
            add_clipped(sums, results, instruction.privacy.clip)
            del results  # free them before the next gradients are in memory
        to_noised_mean(sums, instruction.privacy, instruction.batch_size, self.random_bytes)
        return losses
