"""`slice`: EmbracingFL's output-side layers, trained on recorded activations.

The device runs the input side once in inference mode, stage by stage, writing each stage's output
to disk (Algorithm 1), and then trains the rest on the last recording (Algorithm 2).

`slice:lstm,skip=128` also records the first 128 steps of the LSTM called `lstm`. Its weights are
then read in a stage and trained behind it: all stages run before the training begins, so that both
are the weights that the device received.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal

from torch import Tensor, nn
from torch.fx import GraphModule

from device_agent.formats.manifest import SAMPLES, Instruction, Record, TensorEntry
from exporters.programs.capture import capture, record
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.recorded_graph import output_node
from exporters.programs.training_signatures import (
    evaluation_signature,
    forward_signature,
    train_signature,
)
from profiles.errors import SpecError
from profiles.text_formatting import counted
from toolkit.families.low_rank import FAMILY as LOW_RANK
from toolkit.families.low_rank import reasons
from toolkit.slicing.time_cuts import time_cut
from toolkit.submodels.capacity import Counts, activations, macs, parameter_count
from toolkit.submodels.cut_points import CutPoint, Cutter, steps, subgraph, tensors_read
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.one_step_submodel import one_pass, optimizer_of
from toolkit.submodels.rewritten_model import Rewritten, with_factors
from toolkit.submodels.spec import Spec, as_number
from toolkit.submodels.submodel import LayerDecision, Shapes, Stateless, Submodel
from toolkit.submodels.tensor_entries import dense_entries, statistics_role
from toolkit.submodels.training_config import TrainingConfig
from toolkit.submodels.weighted_layers import weighted_layers


@dataclass(frozen=True)
class Pieces:
    """A cut model: `stages` run once, one after the other, and `trained` goes on from there.

    `where` says for a person what the stages are.
    """

    where: str
    stages: Sequence[GraphModule]
    trained: GraphModule
    predicting: GraphModule


def pieces(cutter: Cutter, spec: Spec, batch: int) -> Pieces:
    """The pieces that `spec` asks for. Raises SpecError where the model cannot be cut so."""
    skip = spec.whole("skip", 0)
    if skip:
        cut = time_cut(cutter, lambda module: within(module, str(spec.size)), skip, str(spec))
        ahead = cutter.stages(cut.ahead, cutter.load(cut.trained, batch), batch)
        where = f"the first {skip} steps of {cut.module}"
        return Pieces(where, (*ahead, cut.record), cut.trained, cut.predicting)
    return pieces_at(cutter, choose(cutter, spec, batch), batch)


def pieces_at(cutter: Cutter, point: CutPoint, batch: int) -> Pieces:
    """The pieces on both sides of `point`; no stage is larger than what is trained."""
    part = cutter.trained(point.place)
    stages = cutter.stages(point.place, cutter.load(part, batch), batch)
    return Pieces(f"ahead of {point.module}", stages, part, cutter.predicting(point.place))


Load = Callable[[CutPoint], int]
"""Trained parameters plus activations of the slice behind a cut point."""


def choose(cutter: Cutter, spec: Spec, batch: int, load: Load | None = None) -> CutPoint:
    """The cut point that `spec` asks for, by name or by largest capacity.

    `load` is the slice's own where it is not what `cutter` cuts.
    Raises SpecError naming what is possible where there is none.
    """
    if spec.size is None:
        raise SpecError(
            f"{str(spec)!r} needs the first module to train or the largest capacity allowed: "
            "write it like slice:blocks.3 or slice:0.42."
        )
    if not cutter.points:
        raise SpecError(f"{str(spec)!r}: at no place of this model does one activation cross.")
    # A module may be called by a number: nn.Sequential names its own so. A decimal is a capacity.
    value = as_number(spec.size)
    decimal = value is not None and "." in spec.size and 0 < value <= 1
    named = any(within(point.module, spec.size) for point in cutter.points)
    if (named and not decimal) or value is None:
        return by_name(cutter, spec)
    limit = spec.number("capacity", 0, 1, "slice:0.42")
    return by_capacity(cutter, spec, limit, batch, load or slice_load(cutter, batch))


def by_name(cutter: Cutter, spec: Spec) -> CutPoint:
    """The last cut point ahead of the module called `spec.size`."""
    own = [p for p in cutter.points if within(p.module, str(spec.size))]
    if not own:
        names = ", ".join(dict.fromkeys(p.module for p in cutter.points))
        raise SpecError(f"{str(spec)!r}: the model cannot be cut there; it can be cut at {names}.")
    first = own[0].module
    return [p for p in own if p.module == first][-1]


def within(module: str, name: str) -> bool:
    """Whether `module` is `name` or inside it."""
    return module == name or module.startswith(f"{name}.")


def by_capacity(cutter: Cutter, spec: Spec, limit: float, batch: int, load: Load) -> CutPoint:
    """The largest slice of at most `limit`; of equal ones that with the smallest recording."""
    full = cutter.load(cutter.captured.training, batch)
    # A slice is a part of those that begin before it, so that loads only fall. With `keep` inside
    # they may rise where another layer stays dense: what is found is within the limit all the same.
    first = bisect_left(cutter.points, True, key=lambda point: load(point) / full <= limit)
    if first == len(cutter.points):
        smallest = rounded_up(load(cutter.points[-1]) / full)
        raise SpecError(
            f"{str(spec)!r}: the smallest slice of this model has capacity {smallest}; "
            "allow at least that."
        )
    own = slice_load(cutter, batch)
    best = own(cutter.points[first])
    equal = [point for point in cutter.points if own(point) == best]
    return min(equal, key=lambda point: (point.recorded, -point.place))


def slice_load(cutter: Cutter, batch: int) -> Load:
    """The load of slices as `cutter` cuts them."""
    return lambda point: cutter.load(cutter.trained(point.place), batch)


def rounded_up(capacity: float) -> str:
    """`capacity` to three decimals or two digits, whichever says more, and no less than it is."""
    places = max(3, 1 - math.floor(math.log10(capacity)))
    step = Decimal(1).scaleb(-places)
    return f"{Decimal(capacity).quantize(step, ROUND_CEILING):f}"


def activation(stage: int) -> str:
    """Name of the data set that stage number `stage` records."""
    return f"activation_{stage}"


class Slice(Stateless):
    """See the module."""

    name = "slice"
    usage = "slice:CAPACITY or slice:MODULE"
    summary = (
        "the output-side layers, trained on recorded activations (EmbracingFL); skip=; "
        "slice:...+low-rank:... factorizes them too"
    )

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_options("skip")
        captured = capture(model, sample_shape)
        cutter = Cutter(captured)
        batch = training.batch_size
        rewritten = Rewritten(model)
        check_inner(spec)
        if spec.inner is None:
            cut_up = pieces(cutter, spec, batch)
        else:
            point = choose(cutter, spec, batch, lambda p: inner_load(model, cutter, p, spec, batch))
            rewritten = inside(model, cutter, point, spec)
            if not rewritten.origins and LOW_RANK.strength(spec.inner) < 1:
                raise SpecError(
                    f"{str(spec)!r}: no layer of the slice, which begins at {point.module}, gets "
                    f"smaller; {reasons(rewritten)}."
                )
            with with_factors(spec, rewritten.treatments):
                captured = capture(rewritten.model, sample_shape)
            cutter = Cutter(captured)
            cut_up = replace(
                pieces_at(cutter, same_place(cutter, point), batch),
                where=f"ahead of {point.module}",
            )
        part, stages = cut_up.trained, cut_up.stages
        read = tensors_read([part])
        parameters = rewritten.entries(
            captured, filter(captured.parameters.__contains__, read), "parameter"
        )
        tracked = rewritten.entries(
            captured, filter(captured.buffers.__contains__, read), statistics_role(training)
        )
        buffers = [entry for entry in tracked if entry.role == "buffer"]
        fixed = (
            *(entry for entry in tracked if entry.role == "frozen"),
            *rewritten.entries(captured, filter(captured.frozen.__contains__, read), "frozen"),
        )
        ahead = [n for n in tensors_read(stages) if n not in read and n in captured.tensors]
        frozen = (*dense_entries(captured, ahead, "frozen"), *fixed)
        optimizer = optimizer_of(training, rewritten.undecayed)

        signatures: list[ProgramSignature] = []
        schedule: list[Instruction] = []
        source, shape = SAMPLES, sample_shape
        for number, stage in enumerate(stages):
            wanted = set(tensors_read([stage]))
            reads = [e for e in (*frozen, *parameters, *buffers) if e.name in wanted]
            signatures.append(forward_signature(f"forward_{number}", stage, shape, reads))
            schedule.append(
                Record(signature=f"forward_{number}", source=source, target=activation(number))
            )
            source = activation(number)
            shape = tuple(int(size) for size in output_node(stage).meta["val"].shape[1:])
        signatures.append(
            train_signature(
                part,
                shape,
                parameters,
                buffers,
                optimizer,
                penalty=rewritten.penalty,
                reads=fixed,
                loss=training.loss,
                masked=training.masked,
            )
        )
        reads = [*parameters, *buffers, *fixed]
        signatures.append(forward_signature("predict", cut_up.predicting, shape, reads))
        signatures.append(evaluation_signature(cut_up.predicting, shape, reads, training.loss))
        program = Program(
            submodel=str(spec),
            sample_shape=sample_shape,
            classes=captured.classes,
            signatures=tuple(signatures),
            tensors=(*frozen, *parameters, *buffers, *optimizer.state(parameters)),
            schedule=(*schedule, one_pass(source, training)),
            sample_dtype=captured.sample_dtype,
            sample_limit=captured.sample_limit,
        )
        total = sum(captured.parameters[e.name].numel() for e in parameters)

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return rewritten.values(weights, (*frozen, *parameters, *buffers))

        return Submodel(
            spec=spec,
            program=program,
            counts=Counts(
                params=total,
                activations=activations(part, batch),
                macs=macs(part, batch),
                exchanged=total + sum(captured.buffers[e.name].numel() for e in buffers),
            ),
            treatments=(
                LayerDecision(
                    cut_up.where,
                    "frozen",
                    f"{counted(len(stages), 'stage')} of the multi-step forward pass",
                ),
                *rewritten.treatments,
            ),
            cut=cut,
        )

    def recover(
        self, tensors: Mapping[str, Tensor], table: Sequence[TensorEntry], shapes: Shapes
    ) -> Mapping[str, Tensor | Product]:
        """The layers as they are, and what the family inside makes of its factors."""
        return LOW_RANK.recover(tensors, table, shapes)


def check_inner(spec: Spec) -> None:
    """Raise SpecError where the slice `spec` cannot be combined with the spec inside it."""
    inner = spec.inner
    if inner is not None and "skip" in spec.options:
        raise SpecError(f"{str(spec)!r}: a slice along time takes no second family.")
    if inner is not None and (inner.family != LOW_RANK.name or inner.inner is not None):
        raise SpecError(
            f"{str(spec)!r}: a slice can be combined with low-rank only, "
            "like slice:0.42+low-rank:0.25."
        )


def inside(model: nn.Module, cutter: Cutter, point: CutPoint, spec: Spec) -> Rewritten:
    """`model` with the layers behind `point` as the spec inside `spec` says.

    No further layers stay dense unless that says so: those ahead of the cut do already.
    """
    assert spec.inner is not None
    trained = set(tensors_read([cutter.trained(point.place)]))
    behind = {
        layer.name
        for layer in weighted_layers(model, cutter.captured)
        if any(layer.path(weight) in trained for weight in layer.weights())
    }
    return LOW_RANK.rewrite(model, cutter.captured, spec.inner, among=behind, keep=0)


def inner_load(model: nn.Module, cutter: Cutter, point: CutPoint, spec: Spec, batch: int) -> int:
    """Trained parameters plus activations of the slice behind `point`, with factors in it."""
    rewritten = inside(model, cutter, point, spec)
    captured = cutter.captured
    with with_factors(spec, rewritten.treatments):
        graph = record(rewritten.model, captured.sample_shape, captured.sample_dtype, training=True)
    part = subgraph(graph, point.place, len(steps(graph)) - 1)
    trained = {n: v for n, v in rewritten.model.named_parameters() if v.requires_grad}
    return parameter_count(part, trained) + activations(part, batch)


def same_place(cutter: Cutter, point: CutPoint) -> CutPoint:
    """The cut point of a rewritten model that has the same operators ahead of it."""
    return next(p for p in cutter.points if p.place == point.place)


FAMILY = Slice()
