"""The position of a training in its schedule, and the checkpoints from which it can resume."""

import json
from dataclasses import dataclass, field

from device_agent.formats.manifest import Initialise, Record, Train
from device_agent.training.activation_cache import Recording
from device_agent.training.checkpoint import Checkpoint, Checkpoints, Position
from device_agent.training.signature_runs import SignatureRuns


@dataclass
class ResumableRun(SignatureRuns):
    """Runs signatures at a position of the schedule. Checkpoints store the position.

    Attributes:
        checkpoints: Stores checkpoints. If it is None, no checkpoints are stored.
        spare_bytes: Memory in bytes for recordings that do not fit on the disk.
        position: How far the training has come.
        has_checkpoint: Whether a checkpoint of this training has been stored.
    """

    checkpoints: Checkpoints | None = field(default=None, kw_only=True)
    spare_bytes: int = field(default=0, kw_only=True)
    position: Position = field(default_factory=Position, init=False)
    has_checkpoint: bool = field(default=False, init=False)

    def advance(self) -> None:
        """Move to the next instruction."""
        self.position.instruction += 1
        self.position.epoch = self.position.batch = 0

    def save_checkpoint(self) -> None:
        """Store a checkpoint of the current position."""
        if self.checkpoints is None:
            return
        # A recording that no later instruction reads is deleted after this checkpoint.
        needed = self.sources_from(self.position.instruction)
        self.position.recorded = {
            name: stored
            for name, recording in self.recordings.items()
            if name in needed and (stored := recording.stored()) is not None
        }
        self.position.dropout = json.dumps(self.dropout.bit_generator.state)
        # Frozen tensors never change, so a resumed training reads them from the bundle.
        frozen = {e.name for e in self.bundle.manifest.tensors if e.role == "frozen"}
        state = {name: array for name, array in self.state.items() if name not in frozen}
        if self.position.recording is not None:
            state = {}  # a recording only reads its tensors, which are in the bundle
        self.checkpoints.save(Checkpoint(self.position, state, {} if state else self.personal))
        self.has_checkpoint = True

    def sources_from(self, instruction: int) -> set[str]:
        """The names of the data sets that `instruction` and later instructions read."""
        rest = self.bundle.manifest.schedule[instruction:]
        return {later.source for later in rest if not isinstance(later, Initialise)}

    def reopen_recordings(self, position: Position) -> None:
        """Open the recordings that are complete on disk at `position`."""
        for name in position.recorded:
            self.recordings[name] = self.open_recording(name, len(self.local))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take position, tensors and the dropout generator from a checkpoint."""
        self.has_checkpoint = True
        self.position, self.state = checkpoint.position, checkpoint.state
        self.personal.update(checkpoint.personal)
        self.dropout.bit_generator.state = json.loads(self.position.dropout)

    def open_recording(self, name: str, done: int) -> Recording:
        """Open the recording `name`. Its first `done` samples are already on disk."""
        return Recording(
            self.scratch / f"{name}.npy",
            len(self.local),
            self.recorded_shape(name),
            dtype=self.recorded_by(name).dtype,
            done=done,
            memory_bytes=self.spare_bytes,
        )

    def recorded_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the activations of one sample in the recording `name`."""
        (output,) = self.bundle.manifest.signatures[self.recorded_by(name).signature].outputs
        return tuple(size for size in output.shape if size is not None)

    def recorded_by(self, name: str) -> Record:
        """The instruction that writes the recording `name`."""
        schedule = self.bundle.manifest.schedule
        return next(s for s in schedule if isinstance(s, Record) and s.target == name)

    def describe_position(self) -> str:
        """Describe the current position, for a message."""
        schedule = self.bundle.manifest.schedule
        if self.position.instruction == len(schedule):
            return "writing the update"
        match schedule[self.position.instruction]:
            case Record(target=target):
                what = f"recording {target}"
            case Initialise():
                return "initialising the personal model"
            case Train():
                what = f"epoch {self.position.epoch + 1}"
        return f"{what}, batch {self.position.batch + 1}"
