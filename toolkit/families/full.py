"""`full`: the whole model, trained as it is (FedAvg)."""

from torch import Tensor, nn

from exporters.programs.capture import capture
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import whole_network
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import Stateless, Submodel
from toolkit.submodels.tensor_entries import dense_entries, statistics_role
from toolkit.submodels.training_config import TrainingConfig


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
