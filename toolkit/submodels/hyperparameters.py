"""The hyper-parameters of local training that all families share."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from device_agent.formats.label_rule import LabelRule
from exporters.objectives.loss_text import canonical, mixes_samples
from exporters.objectives.open_labels import labels_of
from exporters.programs.training.augmentation import parse_augmentation
from profiles.errors import InputError

Loss = str
"""The text of a loss, see `exporters/objectives/loss_text.py`."""
Optimizer = Literal["sgd", "nesterov", "adam", "adamw"]

MASKABLE = ("cross-entropy", "binary-cross-entropy", "ctc")
"""Losses with logits of classes. `split` checks whether they fit the model's output."""
LARGEST_COUNT = 2**31 - 1
"""The largest batch size, number of epochs and number of steps. All runtimes can count to it."""

LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest float32."""


class LocalWork(NamedTuple):
    """The most epochs and batches of a device in a round. If no limit is set, `batches` is None."""

    epochs: int
    batches: int | None


@dataclass(frozen=True)
class TrainingConfig:
    """Local training of one round.

    To train with other values than these defaults, pass a `TrainingConfig` to `split`, `plan` or
    `Federation`.

    Families with a personal model do not use `proximal`. Their own option `penalty` keeps the
    personal model close to the received weights. With `sgd`, they use Nesterov's momentum, as in
    their papers.

    Attributes:
        batch_size: Samples in a batch.
        epochs: Passes over the local data in each round.
        steps: Number of batches in each round, instead of `epochs`. A device with fewer batches
            repeats its data.
        learning_rate: Learning rate of the first round.
        momentum: Momentum of `sgd` and `nesterov`.
        weight_decay: The optimizer adds the parameter, multiplied by this factor, to the gradient.
            `adamw` instead multiplies the parameter by 1 - learning rate * this factor.
        round_decay: Factor by which learning rates are multiplied after each round.
        milestones: Round numbers, ascending. If given, `round_decay` applies only after these
            rounds.
        batch_norm: `global` averages the statistics of batch norms over the devices. With `static`,
            devices neither update nor send statistics. The server computes them from its own
            training samples (`Federation`'s `statistics`). Without such samples, it uses the
            held-out samples.
        masked: Whether to set the logit of a class to zero if the device has no samples of the
            class, as HeteroFL's authors do. The logit stays in the softmax. Each row of the
            classifier is averaged over the devices that have samples of the row's class. Only for
            outputs (batch, n).
        loss: The loss: the name of a built-in loss with its options, the sum of losses of several
            outputs, or `module:function` for a loss of your own. See the guide about losses.
            `cross-entropy` is binary if the output's class axis has size one.
        optimizer: The optimizer that devices use.
        proximal: FedProx's mu, which keeps parameters close to the received parameters.
        augment: Random changes of the samples in each training step, such as `flip`, `shift:4`,
            `noise:0.1` or `mask:10:first`. The changes follow from the agent's seed. Slices train
            on recorded activations, which these changes do not affect.
        sample_clip: Differential privacy for samples (DP-SGD): the gradient of each sample is
            clipped to this L2 norm, and noise is added. `batch_size` is then the expected size of
            a batch. See the guide about differential privacy.
        sample_noise: The standard deviation of the noise, divided by `sample_clip`. The noise is
            added to the sum of a batch's gradients. Set both `sample_clip` and `sample_noise`, or
            neither.
        sample_delta: The delta for which devices report epsilon to their owners.

    Raises:
        InputError: If a value is not allowed.

    Examples:
        >>> TrainingConfig(epochs=2, optimizer="adam").batch_size
        32
    """

    batch_size: int = 32
    epochs: int = 1
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    round_decay: float = 1.0
    milestones: tuple[int, ...] = ()
    batch_norm: Literal["global", "static"] = "global"
    masked: bool = False
    loss: str = "cross-entropy"
    optimizer: Optimizer = "sgd"
    proximal: float = 0.0
    steps: int | None = None
    augment: tuple[str, ...] = ()
    sample_clip: float | None = None
    sample_noise: float | None = None
    sample_delta: float = 1e-5

    def __post_init__(self) -> None:
        # A batch norm needs two samples to compute a variance.
        for name, lowest in (("batch_size", 2), ("epochs", 1)):
            value = getattr(self, name)
            if value < lowest:
                raise invalid(name, value, f"at least {lowest}")
            if value > LARGEST_COUNT:
                raise invalid(name, value, f"at most {LARGEST_COUNT:,}")
        if self.steps is not None:
            if not 1 <= self.steps <= LARGEST_COUNT:
                raise invalid("steps", self.steps, f"from 1 to {LARGEST_COUNT:,}")
            if self.epochs != 1:
                raise InputError(
                    "steps is {steps} and epochs is {epochs}, but only one of them can set the "
                    "length of a round. Remove one of them.",
                    code="option.conflict",
                    options=["steps", "epochs"],
                    steps=self.steps,
                    epochs=self.epochs,
                )
        if list(self.milestones) != sorted({round_ for round_ in self.milestones if round_ >= 1}):
            raise invalid("milestones", self.milestones, "ascending rounds from 1")
        # Devices compute in float32: a larger value would become infinite.
        for name in ("learning_rate", "momentum", "weight_decay", "proximal"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise invalid(name, value, "a number of at least 0")
            if value > LARGEST_FLOAT:
                raise invalid(name, value, f"at most {LARGEST_FLOAT:g}, the largest float32")
        if self.batch_norm not in ("global", "static"):
            raise invalid("batch_norm", self.batch_norm, '"global" or "static"')
        # Write the loss in its canonical form, so that equal settings compare equal.
        object.__setattr__(self, "loss", canonical(self.loss))
        if self.optimizer not in get_args(Optimizer):
            allowed = "one of " + ", ".join(f'"{word}"' for word in get_args(Optimizer))
            raise invalid("optimizer", self.optimizer, allowed)
        # With a momentum of 1 or more, the velocity would grow without bound.
        if self.momentum >= 1:
            raise invalid("momentum", self.momentum, "below 1")
        if self.optimizer == "nesterov" and self.momentum == 0:
            raise InputError(
                'The optimizer "nesterov" needs a momentum above 0, but momentum is 0. '
                'Use the optimizer "sgd".',
                code="option.conflict",
                options=["optimizer", "momentum"],
            )
        if self.masked and self.loss.partition(",")[0] not in MASKABLE:
            raise InputError(
                "masked sets the logits of absent classes to zero. The loss {loss!r} has no such "
                "logits, or takes several outputs. Use either masked or this loss.",
                code="option.conflict",
                options=["masked", "loss"],
                loss=self.loss,
            )
        for text in self.augment:
            parse_augmentation(text)
        if not 0 < self.round_decay <= 1:
            raise invalid("round_decay", self.round_decay, "above 0 and at most 1")
        self._check_privacy()

    def _check_privacy(self) -> None:
        """Raise InputError if differential privacy for samples is not possible."""
        for name in ("sample_clip", "sample_noise"):
            value = getattr(self, name)
            if value is not None and not 1e-6 <= value <= 1e6:
                raise invalid(name, value, "from 0.000001 to 1000000")
        if not 1e-15 <= self.sample_delta < 1:
            raise invalid("sample_delta", self.sample_delta, "from 1e-15, below 1")
        if (self.sample_clip is None) != (self.sample_noise is None):
            raise InputError(
                "sample_clip and sample_noise belong together: set both, or neither.",
                code="option.conflict",
                options=["sample_clip", "sample_noise"],
            )
        if not self.is_private:
            return
        if self.masked:
            raise InputError(
                "sample_clip cannot be combined with masked, which tells the coordinator the "
                "classes of a device. Use one of them.",
                code="option.conflict",
                options=["sample_clip", "masked"],
            )
        if (mixing := mixes_samples(self.loss)) is not None:
            raise InputError(
                "sample_clip needs a loss of single samples, but {mixing} compares or weighs the "
                "samples of a batch. Use another loss.",
                code="option.conflict",
                options=["sample_clip", "loss"],
                mixing=mixing,
            )

    @property
    def is_private(self) -> bool:
        """Whether devices train with differential privacy for their samples."""
        return self.sample_clip is not None

    def rate_factor(self, round_: int) -> float:
        """The factor of all learning rates in round `round_` (from 1)."""
        passed = sum(end < round_ for end in self.milestones) if self.milestones else round_ - 1
        return self.round_decay**passed

    @property
    def local_work(self) -> LocalWork:
        """The most epochs and batches of a device in a round."""
        if self.steps is None:
            return LocalWork(self.epochs, None)
        return LocalWork(self.steps, self.steps)  # an epoch has at least one batch

    @property
    def labels(self) -> LabelRule:
        """The rule that labels must follow, as far as it depends on the loss.

        The number of classes and the shape depend on the model, so they are left open.
        """
        return labels_of(self.loss)


def invalid(name: str, value: object, allowed: str) -> InputError:
    """The error for a wrong value of `name`. The text `allowed` says which values are allowed."""
    shown = repr(value) if isinstance(value, str) else value
    return InputError(
        "{option} must be {allowed}; it is {given}.",
        code="option.invalid-value",
        option=name,
        value=str(value),
        allowed=allowed,
        given=shown,
    )
