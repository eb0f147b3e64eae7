"""`full`: the whole model, trained as it is (FedAvg)."""

from torch import Tensor, nn

from exporters.capture import capture
from toolkit.assembly import whole_network
from toolkit.entries import dense_entries, statistics_role
from toolkit.spec import Spec
from toolkit.submodel import Stateless, Submodel
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel


class Full(Stateless):
    """Every layer is sent, trained and averaged."""

    name = "full"
    usage = "full"
    summary = "the whole model"

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_no_size()
        spec.check_no_inner()
        spec.check_options()
        captured = capture(model, sample_shape)
        entries = (
            *dense_entries(captured, captured.parameters, "parameter"),
            *dense_entries(captured, captured.frozen, "frozen"),
            *dense_entries(captured, captured.buffers, statistics_role(training)),
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return {entry.name: weights.tensors[entry.name] for entry in entries}

        return whole_network(spec, captured, entries, training, cut)


FAMILY = Full()
