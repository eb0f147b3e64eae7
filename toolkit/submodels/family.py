"""The contract of every family. The families are in `toolkit/families/`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from device_agent.formats.manifest import TensorEntry
from exporters.recording.captured import Captured
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import SpecForm
from toolkit.submodels.submodel import Shapes, SplitRequest, Submodel, recover_dense


class Family(ABC):
    """A way to cut a model. Each file under `toolkit/families` has a family, called FAMILY.

    By default, a family keeps nothing between rounds, and its updates have tensors, not factors.
    """

    form: ClassVar[SpecForm]
    """The specs that it accepts."""
    averages_factors = False
    """Whether the server averages the factors of equal specs before it recovers them."""
    trains_personal_model = False
    """Whether devices train a personal model, and move the tensors that they send towards this
    model. Tensors that are moved in this way change less than tensors that are trained directly."""

    @abstractmethod
    def split(self, request: SplitRequest) -> Submodel:
        """Cut a model.

        The submodel does not hold weights: `Submodel.cut` takes them from a global model.

        Raises:
            SpecError: If the spec is not possible for the model.
            ModelError: If the model cannot be recorded.
        """

    def strength(self, spec: Spec) -> float | None:
        """The strength (FedHM eq. 2) of a submodel, in (0, 1], if `spec` alone determines it.

        Otherwise None: the strength is then computed from the trained tensors.

        Raises:
            SpecError: If the size is missing or out of range.
        """
        return None

    def most_strength(self, spec: Spec) -> float:
        """The largest strength that a submodel of this size can have, whatever the model is.

        Raises:
            SpecError: If the size is missing or out of range.
        """
        stated = self.strength(spec)
        return 1.0 if stated is None else stated

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """Compute the global tensors from the tensors of an update, for example from its factors.

        To check an update, this is called with tensors that have shapes but no numbers (PyTorch's
        device `meta`). It must raise KeyError, RuntimeError or ValueError if factors do not fit
        together.

        Args:
            tensors: The uploaded tensors by their names in the bundle.
            table: Their entries, which say what each tensor stands for.
            shapes: Shapes of the global tensors, or of their slices in the update.

        Returns:
            Each global tensor by its name, with the shape that `shapes` gives.
        """
        return recover_dense(tensors, table)

    def received(
        self, key: str, table: Sequence[TensorEntry], model: GlobalModel
    ) -> Mapping[str, Tensor]:
        """The factors that devices receive in the round that starts from `model`.

        Called only for families that make factors.

        Args:
            key: The key of the submodel's factors in `model.kept`.
            table: The entries of the factors.
            model: The global model of the round.

        Returns:
            The factors by name.
        """
        return {}

    def refit(
        self,
        factors: Mapping[str, Tensor],
        table: Sequence[TensorEntry],
        weights: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Compute factors of the new global `weights` for the next round, close to `factors`.

        Called only for families that average factors.
        """
        return {}


class ExchangesLayers(Family):
    """A family that only replaces layers. So another family can select the layers to replace.

    The `SpecForm` of such a family has `exchanges_layers=True`. `slice` uses such a family for
    specs like `slice:0.42+low-rank:0.25`.
    """

    @abstractmethod
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
            spec: This family's spec, without the spec of the family that selects layers.
            among: Names of the layers that may be replaced; None means all layers.

        Returns:
            The new model. Its `origins` are empty if no layer was replaced.
        """
