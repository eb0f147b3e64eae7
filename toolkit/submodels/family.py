"""What every family must be able to do. The families themselves are in `toolkit/families/`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from device_agent.formats.manifest import TensorEntry
from exporters.recording.captured import Captured
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import SpecForm
from toolkit.submodels.submodel import Shapes, Submodel, recover_dense


class Family(Protocol):
    """A way to cut a model. Each file under `toolkit/families` has one, called FAMILY."""

    form: SpecForm
    """The specs that it accepts."""
    averages_factors: bool
    """Whether the server averages the factors of equal specs before it recovers them."""

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """Cut a model.

        Args:
            model: The global model.
            sample_shape: Shape of one sample, without the batch.
            spec: A spec that `families.check_spec` has accepted.
            training: How devices train.

        Returns:
            The submodel. It does not hold weights: `Submodel.cut` takes them from a global model.

        Raises:
            SpecError: If the model cannot give what `spec` asks for.
            ModelError: If the model cannot be recorded.
        """
        ...

    def strength(self, spec: Spec) -> float | None:
        """Strength (FedHM eq. 2) in (0, 1] that the size of `spec` states, None if it states none.

        Raises:
            SpecError: If the size is missing or out of range.
        """
        ...

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """The global tensors that an update stands for.

        Args:
            tensors: The uploaded tensors by their names in the bundle.
            table: What each of them stands for.
            shapes: Shapes of the global tensors, or of the slices of them that the update holds.

        Returns:
            Each global tensor by its name, in its shape in `shapes`.
        """
        ...

    def received(
        self, key: str, table: Sequence[TensorEntry], model: GlobalModel
    ) -> Mapping[str, Tensor]:
        """The factors that devices receive in the round that starts from `model`.

        Only called for families that average factors.

        Args:
            key: The submodel, under which `model` keeps factors.
            table: The entries of the factors.
            model: The global model of the round.

        Returns:
            The factors by name.
        """
        ...

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Factors for the next round, close to `factors`, of the new global `weights`.

        Only called for families that average factors.
        """
        ...


@runtime_checkable
class ExchangesLayers(Family, Protocol):
    """A family that only replaces layers, so that another family can select which.

    Its form says `exchanges_layers=True`. `slice` uses it for specs such as
    `slice:0.42+low-rank:0.25`.
    """

    def rewrite(
        self,
        model: nn.Module,
        captured: Captured,
        spec: Spec,
        among: Collection[str] | None = None,
    ) -> Rewritten:
        """Replace layers of a copy of a model.

        Args:
            model: The global model.
            captured: The recording of `model`.
            spec: The family's own spec, without the selecting family's.
            among: Names of the layers that may be replaced; all if None.

        Returns:
            The new model. Its `origins` are empty if no layer was replaced.
        """
        ...


class Stateless:
    """For families that keep nothing between rounds; an update holds the tensors themselves."""

    averages_factors = False

    def strength(self, spec: Spec) -> float | None:
        """None: the strength follows from what is trained."""
        return None

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """See Family."""
        return recover_dense(tensors, table)

    def received(
        self, key: str, table: Sequence[TensorEntry], model: GlobalModel
    ) -> Mapping[str, Tensor]:
        """Return nothing, as there are no factors to keep."""
        return {}

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return nothing, as there are no factors to keep."""
        return {}
