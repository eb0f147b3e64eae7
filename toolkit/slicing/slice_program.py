"""The program of a slice: stages that record activations, then training on the last recording.

EmbracingFL, Algorithm 1 (multi-step forward pass) and Algorithm 2 (training of the rest).
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from device_agent.formats.manifest import SAMPLES, Instruction, Record, TensorEntry
from exporters.objectives.objective import objective_of
from exporters.programs.program import Program, ProgramSignature
from exporters.programs.recorded_graph import output_node
from exporters.programs.training.training_signatures import (
    forward_signature,
    prediction_signatures,
    train_signature,
)
from exporters.recording.captured import Captured
from toolkit.cutting.cut_points import tensors_read
from toolkit.slicing.cut_model import CutModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.one_step_submodel import (
    make_optimizer,
    program_of,
    training_instruction,
    without_gradient,
)
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import Spec
from toolkit.submodels.submodel import dense_tensor_entries, statistics_role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SliceTensors:
    """The tensors that a device receives, by their use.

    Attributes:
        parameters: Trained parameters.
        buffers: Running statistics after the cut, which training updates.
        fixed: Tensors after the cut that are only read.
        before_cut: Tensors that only the stages read.
        int8: Names of the weights in `before_cut` that are received as 8-bit integers.
    """

    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    fixed: tuple[TensorEntry, ...]
    before_cut: tuple[TensorEntry, ...]
    int8: frozenset[str]

    @property
    def read_in_training(self) -> tuple[TensorEntry, ...]:
        """All tensors that the trained part reads."""
        return (*self.parameters, *self.buffers, *self.fixed)

    @property
    def received(self) -> tuple[TensorEntry, ...]:
        """All tensors, in the order of the manifest."""
        return (*self.before_cut, *self.fixed, *self.parameters, *self.buffers)


def slice_tensors(
    cut: CutModel,
    captured: Captured,
    rewritten: Rewritten,
    training: TrainingConfig,
    *,
    as_int8: bool,
) -> SliceTensors:
    """List the tensors of the slice `cut` of the recorded model `captured`.

    With `as_int8`, the stages' weights are received as 8-bit integers.
    """
    read_after = tensors_read([cut.trained])

    def read_from(group: Iterable[str]) -> Iterable[str]:
        return filter(set(group).__contains__, read_after)

    # Batch norms after the cut train; batch norms before the cut only predict.
    statistics = rewritten.tensor_entries(
        captured, read_from(captured.buffers), statistics_role(training, captured)
    )
    frozen = rewritten.tensor_entries(captured, read_from({*captured.frozen, *cut.fixed}), "frozen")
    trained = captured.parameters.keys() - cut.fixed
    # Both sides of a time cut read the LSTM's weights. These weights count as weights after the
    # cut, and are trained.
    before_cut = [
        n for n in tensors_read(cut.stages) if n not in read_after and n in captured.tensors
    ]
    return SliceTensors(
        parameters=rewritten.tensor_entries(captured, read_from(trained), "parameter"),
        buffers=tuple(entry for entry in statistics if entry.role == "buffer"),
        fixed=(*(entry for entry in statistics if entry.role == "frozen"), *frozen),
        before_cut=dense_tensor_entries(captured, before_cut, "frozen"),
        int8=stage_weights(cut, captured).intersection(before_cut) if as_int8 else frozenset(),
    )


def stage_weights(cut: CutModel, captured: Captured) -> frozenset[str]:
    """The names of the parameters with several axes that exactly one stage reads.

    Biases, scales and statistics are left out, because they have few elements. Tensors that several
    stages read are left out, because they stay in the weights file.
    """
    reads = Counter(name for stage in cut.stages for name in tensors_read([stage]))
    weights = {**captured.parameters, **captured.frozen}
    return frozenset(
        name
        for name, count in reads.items()
        if count == 1 and name in weights and weights[name].ndim > 1
    )


def slice_program(
    spec: Spec,
    captured: Captured,
    cut: CutModel,
    tensors: SliceTensors,
    rewritten: Rewritten,
    training: TrainingConfig,
) -> Program:
    """The program that records with the stages of `cut`, then trains the last part of `cut`."""
    recording = RecordingStages(cut, captured.sample_shape, tensors)
    shape, target = recording.output_shape, objective_of(training.loss, captured)
    if recording.signatures and training.augment:
        logger.info("%s trains on recorded activations, without augmentation", spec)
    still = without_gradient(cut.trained, tensors.parameters, target)
    optimizer = make_optimizer(training, rewritten.undecayed | still)
    train_step = train_signature(
        cut.trained,
        shape,
        tensors.parameters,
        tensors.buffers,
        optimizer,
        penalty=rewritten.penalty,
        reads=tensors.fixed,
        target=target,
        masked=training.masked,
        augment=() if recording.signatures else training.augment,
    )
    return program_of(
        spec,
        captured,
        target=target,
        signatures=(
            *recording.signatures,
            train_step,
            *prediction_signatures(cut.predicting, shape, tensors.read_in_training, target),
        ),
        tensors=(*tensors.received, *optimizer.state(tensors.parameters)),
        schedule=(*recording.schedule, training_instruction(recording.output, training)),
        int8=tensors.int8,
    )


class RecordingStages:
    """Signatures and schedule of the stages that run before training.

    Attributes:
        signatures: One signature for each stage.
        schedule: One instruction for each stage. It reads the recording of the stage before it.
        output: Name of the last recording; the samples themselves if there is no stage.
        output_shape: Shape of one sample in this recording.
    """

    def __init__(self, cut: CutModel, sample_shape: tuple[int, ...], tensors: SliceTensors) -> None:
        self.signatures: list[ProgramSignature] = []
        self.schedule: list[Instruction] = []
        self.output, self.output_shape = SAMPLES, sample_shape
        for number, stage in enumerate(cut.stages):
            name, target = f"forward_{number}", f"activation_{number}"
            wanted = set(tensors_read([stage]))
            reads = [entry for entry in tensors.received if entry.name in wanted]
            self.signatures.append(forward_signature(name, stage, self.output_shape, reads))
            self.schedule.append(
                Record(signature=name, source=self.output, target=target, dtype=cut.dtype)
            )
            self.output = target
            self.output_shape = tuple(
                int(size) for size in output_node(stage).meta["val"].shape[1:]
            )
