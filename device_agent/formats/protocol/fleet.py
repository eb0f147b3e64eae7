"""The status of the whole fleet: devices, rounds, and the quality of each model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from profiles.text_formatting import counted

LEFT = "left"
"""State of a device that has ended its membership."""
ABSENT = "absent"
"""State of a device that lost its place because it was away for too long. It may come back."""
STOPPED = "stopped"
"""State of a device after it has reported that it stops, until it asks for work again."""
INELIGIBLE = "ineligible"
"""State of a device that its owner's conditions keep from the next round. It asks again when the
conditions hold."""
LEFT_OUT = "left out"
"""State of a device whose updates are not used, because one of them may have damaged the model."""


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """A device's status on the coordinator. Bytes count message bodies over all rounds so far.

    `round` is the round that the device works on now. `note` is one of these texts: the reason for
    a pause or a stop, the round that closed before the device's update arrived, a failure of its
    submodel, or the reason why the device did not take a release. `release` is the release with
    which the device predicts, by its last report; 0 if there is none.
    """

    device: str
    name: str
    submodel: str
    state: str
    loss: float | None
    rounds_trained: int
    bytes_down: int
    bytes_up: int
    idle_s: float
    note: str | None = None
    round: int | None = None
    release: int | None = None


@dataclass(frozen=True, kw_only=True)
class KindEvaluation:
    """How the devices of a kind judge the received model, and their own models after training.

    The figures are pooled: they are computed from sums over all devices. `counted` is the number of
    labels that count, and `loss` is the mean over these labels. `accuracy` and `correct` are None
    for a regression. `rmse` and `mae` are None for other models. `metrics` are means over the
    samples, computed by the loss. `rmse`, `mae` and `metrics` exist only for the received model. If
    the devices did not train, the figures of their own models are None.
    """

    devices: int
    samples: int
    counted: int
    correct: int | None
    accuracy: float | None
    loss: float
    trained_accuracy: float | None
    trained_loss: float | None
    rmse: float | None = None
    mae: float | None = None
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class FederatedEvaluation(KindEvaluation):
    """How all devices judge a global model, which they received in `round`.

    In `mean_accuracy` and `mean_loss` all devices have equal weight, even if their numbers of
    samples differ. `worst_accuracy` is the mean over the tenth of the devices with the lowest
    accuracy, and `worst_loss` the mean over the tenth with the highest loss. `kinds` has the pooled
    figures of each kind of devices. A kind with a reduced submodel judges the reduced model. Under
    secure aggregation the means and worst figures are None, and the keys of `kinds` are submodels.
    `classes` has, for each class, the number of labels and of correct predictions, over the
    `reporting_classes` devices that report them.
    """

    round: int
    mean_accuracy: float | None
    mean_loss: float | None
    worst_accuracy: float | None
    worst_loss: float | None
    kinds: dict[str, KindEvaluation]
    classes: list[tuple[int, int]] | None = None
    reporting_classes: int = 0

    def text(self) -> str:
        """The main figures in one line."""
        received = _figures(self.accuracy, self.loss)
        worst = ""
        if self.worst_loss is not None:
            worst = f" (worst tenth: {_figures(self.worst_accuracy, self.worst_loss)})"
        trained = ""
        if self.trained_loss is not None:
            trained = f"; after local training {_figures(self.trained_accuracy, self.trained_loss)}"
        received += further_text(self)
        on = "1 device" if self.devices == 1 else f"{self.devices:,} devices"
        return f"{received} on {on}{worst}{trained}"


class Measured(Protocol):
    """An evaluation that may have further figures in addition to accuracy and loss."""

    @property
    def rmse(self) -> float | None:
        """Root of the mean squared error, of a regression."""

    @property
    def mae(self) -> float | None:
        """Mean absolute error, of a regression."""

    @property
    def metrics(self) -> Mapping[str, float] | None:
        """Metrics that the loss computes: means over the samples, by name."""


def further_figures(figures: Measured | None) -> dict[str, float]:
    """The errors of a regression and the metrics of a loss, by the names that people read.

    Examples:
        >>> further_figures(HeldOutFigures(rmse=0.5, mae=0.4, metrics={"iou": 0.3}))
        {'RMSE': 0.5, 'MAE': 0.4, 'iou': 0.3}
    """
    if figures is None:
        return {}
    known = {"RMSE": figures.rmse, "MAE": figures.mae, **(figures.metrics or {})}
    return {name: value for name, value in known.items() if value is not None}


def further_text(figures: Measured | None) -> str:
    """Write `further_figures` as text, with a comma before each figure."""
    return "".join(f", {name} {value:.4g}" for name, value in further_figures(figures).items())


def _figures(accuracy: float | None, loss: float) -> str:
    return f"loss {loss:.4f}" if accuracy is None else f"accuracy {accuracy:.4f}"


@dataclass(frozen=True, kw_only=True)
class HeldOutFigures:
    """Further figures on the coordinator's held-out data, in addition to accuracy and loss.

    `classes` has, for each class, the number of labels and of correct predictions. It is None for a
    regression, for label sequences and if there are more than 1,000 classes. Only a regression has
    `rmse`, the root of the mean squared error, and `mae`, the mean absolute error. `metrics` are
    further figures that the loss computes, by name, as means over the samples.
    """

    classes: list[tuple[int, int]] | None = None
    rmse: float | None = None
    mae: float | None = None
    metrics: dict[str, float] | None = None


FAR = 3.0
"""An update this many times beyond its limit is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Limited:
    """What the coordinator limited in an update.

    `tensors` is the number of limited tensors. The change of `tensor` exceeded its limit most, by
    the factor `times`. The device reported `samples` samples, but only `counted` of them count.
    `samples` and `counted` are None if all samples count. If `too_far` is set, the judge found that
    the model is better if the update counts less.
    """

    times: float = 1.0
    tensor: str = ""
    tensors: int = 0
    samples: int | None = None
    counted: int | None = None
    too_far: bool = False

    @property
    def is_far(self) -> bool:
        """Whether the update was far beyond its limit, which honest updates rarely are."""
        if self.times > FAR:
            return True
        return not self.too_far and (self.samples or 0) > FAR * (self.counted or 1)

    def text(self) -> str:
        """What was limited, for people."""
        parts = []
        if self.tensors:
            more = f", and {counted(self.tensors - 1, 'further tensor')} too"
            parts.append(
                f"its change of {self.tensor!r} was {self.times:.3g} times the limit"
                + (more if self.tensors > 1 else "")
            )
        if self.samples is not None:
            why = ", because with all of them the model is worse" if self.too_far else ""
            parts.append(f"of its {self.samples:,} samples {self.counted:,} count{why}")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class SpentPrivacy:
    """How much of a privacy budget all rounds until now have spent, and how this round adds noise.

    The models are (`epsilon`, `delta`)-differentially private for each device. `budget` is the
    largest allowed epsilon; None without a limit. `probability` is the probability with which each
    device was asked. The noise in the sum of the changes has the standard deviation
    `noise_multiplier` * `clip`. If `clip` follows a quantile, the noise is a little larger, and
    `within` is the noised share of the round's devices whose change was at most `clip`.
    """

    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    probability: float
    budget: float | None = None
    within: float | None = None

    def text(self) -> str:
        """What was spent, for people."""
        limit = "" if self.budget is None else f" of {self.budget:g}"
        return f"epsilon {self.epsilon:.3g}{limit} spent, delta {self.delta:g}"


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The quality of the global model after `round` (0: before training).

    `accuracy` and `loss` are measured on the coordinator's held-out data. Without such data, both
    are None. For a regression, `accuracy` is None. `held_out` has further figures on the held-out
    data, if there are any. `devices` is the judgement of the devices that received this model. It
    is None if these devices are not asked or have not answered yet. `left_out` states for each
    device why its update was not used. `limited` states for each device what was limited in its
    update. If the round selected its devices, `asked` is the number of selected devices. `changes`
    are the settings that changed before this round, like "training.epochs: 1 -> 2". In asynchronous
    rounds, `staleness` counts the updates with staleness 0, 1, 2 and so on. With differential
    privacy, `privacy` is the spent budget.
    """

    round: int
    accuracy: float | None
    loss: float | None
    updates: int
    left_out: dict[str, str] = field(default_factory=dict)
    limited: dict[str, Limited] = field(default_factory=dict)
    devices: FederatedEvaluation | None = None
    held_out: HeldOutFigures | None = None
    asked: int | None = None
    changes: list[str] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    privacy: SpentPrivacy | None = None

    def judgement(self) -> tuple[float | None, float] | None:
        """The accuracy and loss by which rounds are compared; None if they are not known yet.

        They are measured on the coordinator's held-out data, or on the devices if there are no such
        data.
        """
        if self.loss is not None:
            return self.accuracy, self.loss
        return None if self.devices is None else (self.devices.accuracy, self.devices.loss)

    def quality(self) -> str:
        """Accuracy and loss as text, and whether devices have judged."""
        judged = self.judgement()
        if judged is None:
            return "not judged yet"
        accuracy = "" if judged[0] is None else f"accuracy {judged[0]:.4f}, "
        where = " on the devices" if self.loss is None else ""
        return f"{accuracy}loss {judged[1]:.4f}{where}"


@dataclass(frozen=True, kw_only=True)
class SelectedDevices:
    """The open round of a federation that selects some devices for each round.

    The round has asked `asked` devices. It closes after `goal` updates; `came` updates have arrived
    so far. `last_round` is the last closed round. In it, the updates of `not_needed` devices came
    too late and were no longer needed.
    """

    asked: int
    goal: int
    came: int
    not_needed: int
    last_round: int

    def text(self) -> str:
        """The numbers in one line."""
        text = f"{self.asked:,} devices selected, {self.came:,} of {self.goal:,} updates came"
        if self.last_round:
            were = "was" if self.not_needed == 1 else "were"
            text += f"; {counted(self.not_needed, 'device')} {were} not needed in round "
            text += f"{self.last_round}"
        return text


@dataclass(frozen=True, kw_only=True)
class KeyFollowed:
    """How many of the `devices` members are known to trust the coordinator's newest key.

    Other devices can follow until the time `until`, in seconds since 1970.
    """

    followed: int
    devices: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The coordinator is preparing `submodel`. It is submodel `number` (from 1) of `total`.

    `task` tells what is prepared: bundles of the next round, or workloads for the coordinator's
    plan.
    """

    task: Literal["bundles", "plan"]
    submodel: str
    number: int
    total: int

    def __str__(self) -> str:
        verb = "preparing" if self.task == "bundles" else "planning"
        return f"{verb} {self.number} of {self.total}: {self.submodel}"


MOST_LISTED = 200
"""A status lists at most this many devices, so that it stays small in a large fleet."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole fleet.

    `devices` lists the first MOST_LISTED devices, in the order in which they joined. `states` has
    the number of devices in each state. Earlier versions do not send `states`, and list all
    devices.

    `round` counts from 1; it is 0 while devices enrol. If `rounds` is 0, there is no last round.

    `kinds` is the number of kinds of devices. For `kinds_ready` of these kinds, the bundle of the
    next or present round is ready. In the state `judging`, all rounds are over, and devices judge
    the last model. `preparing` lists the present preparations of the coordinator. `warnings` are
    sentences for the operator, for example that the model gets worse. `model_round` is the round
    that produced the global model. After a rollback, this is not the last round of `history`.
    `history` has the last 1,000 rounds.

    `closed_connections` counts the connections that the coordinator has closed since its start
    because too many were open. `key` is the public key of the coordinator's signatures. Earlier
    versions do not send `key`. `release` is the number of the newest release, if there is one.
    `selected` is None unless a round is open for selected devices only. `new_key` is None if the
    coordinator's key was never replaced, or if all devices trust the new key.
    """

    version: int = 1
    state: Literal["enrolling", "training", "aggregating", "judging", "finished"]
    round: int
    rounds: int
    expected_devices: int
    devices: list[DeviceStatus]
    history: list[RoundResult]
    model_round: int | None = None
    kinds: int = 0
    kinds_ready: int = 0
    preparing: list[Preparation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    closed_connections: int = 0
    key: str = ""
    release: int | None = None
    selected: SelectedDevices | None = None
    states: dict[str, int] = field(default_factory=dict)
    new_key: KeyFollowed | None = None
