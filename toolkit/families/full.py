"""`full`: the whole model, without changes (FedAvg)."""

from torch import Tensor

from toolkit.families import forms
from toolkit.submodels.family import Family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.one_step_submodel import one_step_submodel
from toolkit.submodels.submodel import SplitRequest, Submodel, dense_tensor_entries, statistics_role


class Full(Family):
    """Every layer is sent, trained and averaged."""

    form = forms.FULL

    def split(self, request: SplitRequest) -> Submodel:
        """See Family."""
        captured = request.capture(changing=True)
        entries = (
            *dense_tensor_entries(captured, captured.parameters, "parameter"),
            *dense_tensor_entries(captured, captured.frozen, "frozen"),
            *dense_tensor_entries(
                captured, captured.buffers, statistics_role(request.training, captured)
            ),
        )

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return {entry.name: weights.tensors[entry.name] for entry in entries}

        return one_step_submodel(request, captured, entries, cut)


FAMILY = Full()
