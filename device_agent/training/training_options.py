"""Options of one training."""

from dataclasses import dataclass

from device_agent.formats.evaluation_counts import EvaluationRequest


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of a training. The command passes these options to the schedule interpreter.

    Attributes:
        threads: Threads of the runtime. 0 means one for each core.
        seed: Seed for the order of the samples and for dropout. With one thread, the same seed
            gives the same update, bit for bit.
        validation: Share of the samples, in [0, 1), that is held out for an evaluation after each
            epoch.
        max_memory: Bytes of memory that this process may use. None means that the owner sets no
            limit.
        evaluation: The evaluation that the federation asks for; None if it does not evaluate on
            devices. The command line has no such option.
        budget_s: The training ends after the batch in which the total time of recordings and
            batches reaches this many seconds. Pauses do not count. None means no limit. The command
            line has no such option, because the federation sets the limit.
    """

    threads: int = 0
    seed: int = 0
    validation: float = 0.0
    max_memory: int | None = None
    evaluation: EvaluationRequest | None = None
    budget_s: float | None = None

    @property
    def held_out(self) -> float:
        """The share of the samples on which this device does not train.

        It is the larger of two shares: the owner's `validation` and the share for federated
        evaluation. A larger share includes all samples of a smaller share. So the training never
        uses samples of a federated evaluation.
        """
        return max(self.validation, 0.0 if self.evaluation is None else self.evaluation.share)

    @property
    def validating(self) -> bool:
        """Whether samples are held out and evaluated."""
        return self.held_out > 0


DEFAULT_OPTIONS = TrainingOptions()
