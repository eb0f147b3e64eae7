"""A cut model: the stages that record activations, and the part that is trained on them."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch.fx import GraphModule

from device_agent.formats.manifest import RecordedDtype
from toolkit.cutting.cut_points import CutPoint, Cutter
from toolkit.slicing.cut_choice import choose_cut, is_within
from toolkit.slicing.time_cuts import cut_along_time
from toolkit.submodels.spec import Spec


@dataclass(frozen=True)
class CutModel:
    """The graphs of a cut model.

    Attributes:
        recorded: A description of the part that the stages cover, for messages.
        dtype: Type of the recorded numbers.
        stages: Graphs that run once, in order. Each reads the recording of the stage before it.
        trained: The training graph from the last recording to the output.
        predicting: The inference graph from the last recording to the output.
        fixed: Names of the parameters that `trained` reads but does not train, because the stages
            read them too.
    """

    recorded: str
    dtype: RecordedDtype
    stages: Sequence[GraphModule]
    trained: GraphModule
    predicting: GraphModule
    fixed: Set[str] = frozenset()


def cut_as_asked(cutter: Cutter, spec: Spec, batch: int, skip: int) -> CutModel:
    """Cut the model as `spec` asks: after `skip` steps of an LSTM, or between layers if 0.

    Raises SpecError if the model cannot be cut in this way.
    """
    if not skip:
        return cut_at(cutter, choose_cut(cutter, spec, batch), batch)
    cut = cut_along_time(cutter, lambda module: is_within(module, str(spec.size)), skip, str(spec))
    ahead = cutter.stages(cut.ahead, cutter.load(cut.trained, batch), batch)
    recorded = f"the first {skip} steps of {cut.module}"
    stages, fixed = (*ahead, cut.record), cutter.fixed_after(cut.ahead)
    return CutModel(recorded, cutter.recording, stages, cut.trained, cut.predicting, fixed)


def cut_at(cutter: Cutter, point: CutPoint, batch: int) -> CutModel:
    """Cut the model at `point`. If possible, no stage has a larger load than the trained part."""
    trained = cutter.trained(point.position)
    stages = cutter.stages(point.position, cutter.load(trained, batch), batch)
    return CutModel(
        recorded=f"ahead of {point.module}",
        dtype=cutter.recording,
        stages=stages,
        trained=trained,
        predicting=cutter.predicting(point.position),
        fixed=cutter.fixed_after(point.position),
    )
