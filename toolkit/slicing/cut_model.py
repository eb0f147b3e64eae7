"""A cut model: the stages that record activations, and the part that is trained on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from toolkit.cutting.cut_points import CutPoint, Cutter
from toolkit.slicing.cut_choice import choose_cut, is_within
from toolkit.slicing.time_cuts import cut_along_time
from toolkit.submodels.spec import Spec


@dataclass(frozen=True)
class CutModel:
    """The graphs of a cut model.

    Attributes:
        recorded: What the stages cover, for a person.
        stages: Graphs that run once, one after the other, on what the one before has recorded.
        trained: The rest of the model as it trains, from the last recording to the output.
        predicting: The same as it predicts.
    """

    recorded: str
    stages: Sequence[GraphModule]
    trained: GraphModule
    predicting: GraphModule


def cut_as_asked(cutter: Cutter, spec: Spec, batch: int, skip: int) -> CutModel:
    """The model cut as `spec` asks: after `skip` steps of an LSTM, or between layers if 0.

    Raises SpecError if the model cannot be cut so.
    """
    if not skip:
        return cut_at(cutter, choose_cut(cutter, spec, batch), batch)
    cut = cut_along_time(cutter, lambda module: is_within(module, str(spec.size)), skip, str(spec))
    ahead = cutter.stages(cut.ahead, cutter.load(cut.trained, batch), batch)
    recorded = f"the first {skip} steps of {cut.module}"
    return CutModel(recorded, (*ahead, cut.record), cut.trained, cut.predicting)


def cut_at(cutter: Cutter, point: CutPoint, batch: int) -> CutModel:
    """The model cut at `point`. No stage needs more than the part that is trained, if possible."""
    trained = cutter.trained(point.place)
    stages = cutter.stages(point.place, cutter.load(trained, batch), batch)
    return CutModel(f"ahead of {point.module}", stages, trained, cutter.predicting(point.place))
