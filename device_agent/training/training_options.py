"""Options of one training."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of a training. The command passes them on to the schedule interpreter.

    Attributes:
        threads: Threads of the runtime. 0 means one for each core.
        seed: Seed for the order of the samples and for dropout. With one thread, the same seed
            gives the same update, bit for bit.
        validation: Share of the samples, in [0, 1), that is held out and evaluated
            after each epoch.
        max_memory: Bytes of memory that this process may use. None means that the owner sets no
            limit.
    """

    threads: int = 0
    seed: int = 0
    validation: float = 0.0
    max_memory: int | None = None

    @property
    def validating(self) -> bool:
        """Whether samples are held out and evaluated."""
        return self.validation > 0


DEFAULT_OPTIONS = TrainingOptions()
