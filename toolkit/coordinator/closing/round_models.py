"""The interface of a global model for the rounds of a coordinator. `Federation` implements it."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from toolkit.aggregation.influence import Gradient, TensorInfluences
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.limits.update_bounds import Scales
from toolkit.aggregation.privacy.budget import RoundNoise
from toolkit.coordinator.rounds.upload_validation import Update

if TYPE_CHECKING:
    from toolkit.evaluation_sums import Evaluation

Samples = tuple[np.ndarray, np.ndarray]
"""Samples and labels."""


class Model(Protocol):
    """The methods that every round needs. `Federation` implements them."""

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle for the current round `round_`: contents by file name."""

    def check(self, update: Update, origin: str) -> None:
        """Raise UpdateError unless `update` fits the model; `origin` names it in the error.

        Any thread may call this method while the rounds use the model.
        """

    def scales(self, update: Update) -> Scales:
        """How large the numbers in each tensor of `update` are; `check` has accepted the update."""

    def figures(self, update: Update) -> Figures:
        """The figures of `update` before it is limited; `check` has accepted the update."""

    def fold_checked(self, updates: Iterable[Update], limits: RoundLimits | None = None) -> None:
        """Aggregate updates, which `check` has accepted, each within `limits`."""

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> "Evaluation":
        """How good the global model is on samples."""

    def check_weights(self) -> None:
        """Raise UpdateError if a weight of the global model is not finite.

        Called instead of `evaluation` if the coordinator has no samples.
        """

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UpdateError if a training step on samples gives a number that is not finite."""

    def save(self) -> bytes:
        """Return the whole state."""

    def load(self, data: bytes) -> None:
        """Restore a state that `save` returned."""


@runtime_checkable
class VersionedModel(Model, Protocol):
    """A global model for asynchronous rounds. `Federation` implements it."""

    def fold_versions(
        self,
        updates: Iterable[Update],
        stale: Iterable[tuple[int, bytes, Iterable[Update]]],
        limits: RoundLimits | None = None,
    ) -> None:
        """Aggregate checked updates of this model and of earlier versions into the global model.

        `stale` has for each version its staleness, the saved state, and the updates. Each update is
        limited by `limits`.
        """


@runtime_checkable
class JudgedModel(Model, Protocol):
    """A global model whose rounds are judged. `Federation` implements it."""

    def gradient(self, x: np.ndarray, y: np.ndarray) -> Gradient:
        """The gradient of the loss on samples."""

    def influence(
        self, update: Update, gradient: Gradient, reference: Reference | None
    ) -> TensorInfluences:
        """The effect of a checked update on the loss, within the limits of `reference`."""


@runtime_checkable
class ComparingModel(Model, Protocol):
    """A global model that compares the updates of a round. `Federation` implements it.

    Attributes:
        held_out: The samples with which its aggregation rule compares updates.
    """

    held_out: Samples | None

    def disagreeing(self, updates: Iterable[Update]) -> list[int]:
        """The numbers of the checked updates that point against most others."""


@runtime_checkable
class PrivateModel(Model, Protocol):
    """A global model for rounds with differential privacy. `Federation` implements it."""

    def fold_noised(
        self,
        updates: Iterable[Update],
        devices: Mapping[str, float],
        round_: int,
        noise: RoundNoise,
    ) -> float | None:
        """Aggregate the clipped changes of the checked updates of `round_`, with noise.

        `devices` says how many devices of each submodel are expected in the sum. If `noise` also
        covers the share of changes that are within the clip, returns this share with noise.
        """

    def fold_changes(
        self, changes: Iterable[Update], devices: Mapping[str, float], round_: int
    ) -> None:
        """Aggregate the sums of the changes of groups in `round_`. The sums already have noise."""


@runtime_checkable
class CarryingModel(Model, Protocol):
    """A global model that can take over weights of another model. `Federation` implements it."""

    def carried(self, data: bytes) -> tuple[bytes, str]:
        """A state whose weights come from `data` (a saved state of another model), and a report."""

    def keeps_personal(self, spec: str) -> bool:
        """Whether devices that train `spec` keep tensors of their own from round to round."""

    def loss_code(self) -> str | None:
        """A description of the user's own loss; None for other losses."""
