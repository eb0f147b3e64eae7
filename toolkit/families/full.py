"""`full`: the whole model, without changes (FedAvg)."""

from torch import Tensor, nn

from exporters.recording.capture import capture
from toolkit.submodels.family import Stateless
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.one_step_submodel import one_step_submodel
from toolkit.submodels.spec import Spec
from toolkit.submodels.spec_form import SpecForm
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.tensor_entries import dense_tensor_entries, statistics_role

FORM = SpecForm(family="full", usage="full", summary="the whole model")


class Full(Stateless):
    """Every layer is sent, trained and averaged."""

    form = FORM

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        captured = capture(model, sample_shape)
        entries = (
            *dense_tensor_entries(captured, captured.parameters, "parameter"),
            *dense_tensor_entries(captured, captured.frozen, "frozen"),
            *dense_tensor_entries(captured, captured.buffers, statistics_role(training)),
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return {entry.name: weights.tensors[entry.name] for entry in entries}

        return one_step_submodel(spec, captured, entries, training, cut)


FAMILY = Full()
