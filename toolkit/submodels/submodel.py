"""A submodel: the part of a model that a kind of device trains. Families make it (`family.py`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from device_agent.formats.manifest import Role, TensorEntry
from exporters.int8_scales import int8_bytes
from exporters.objectives.loss_text import is_own
from exporters.programs.program import Program
from exporters.programs.recorded_graph import names_of_kept_values
from exporters.recording.capture import capture
from exporters.recording.captured import Captured
from exporters.recording.sizes.divided_batches import check_whole
from profiles.errors import ModelError, SpecError, UpdateError
from toolkit.submodels.capacity import Counts
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import Spec

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each global tensor, by name."""

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""For each axis, the ranges [start, stop) of a slice of a tensor, in the order of the slice."""


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of global `tensors`."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


@dataclass(frozen=True)
class SplitRequest:
    """The input from which a family makes a submodel.

    Attributes:
        model: The global model.
        sample_shape: Shape of one sample, without the batch.
        spec: A spec that `families.check_spec` has accepted.
        training: How devices train.
    """

    model: nn.Module
    sample_shape: tuple[int, ...]
    spec: Spec
    training: TrainingConfig

    def capture(self, *, changing: bool = False) -> Captured:
        """Record the graphs of the model.

        Args:
            changing: Whether the family can train a model that changes its own parameters.

        Raises:
            ModelError: The model cannot be recorded.
            SpecError: The model changes its own parameters, and the family cannot train such a
                model.
        """
        captured = capture(self.model, self.sample_shape, is_own(self.training.loss))
        # The last batch may have one sample more.
        check_whole(self.model, captured, self.training.batch_size + 1)
        if not changing:
            refuse_changed_parameters(captured, str(self.spec))
        return captured


def refuse_changed_parameters(captured: Captured, spec: str) -> None:
    """Raise SpecError if the model changes its own parameters: only `full` can train it."""
    if captured.changed:
        raise SpecError(
            "{spec!r}: the model changes its own parameter {tensor!r} before it uses the "
            "parameter, and only `full` can train such a model. Use `full`, or leave the parameter "
            "as it is and compute with a changed copy, as in F.linear(x, weight.clamp(-1, 1)).",
            code="spec.changed-parameter",
            spec=spec,
            tensor=min(captured.changed),
        )


@dataclass(frozen=True)
class LayerDecision:
    """The form of one weighted layer in a submodel.

    Attributes:
        layer: Name of the layer.
        form: Its form in the submodel, for example `dense` or `rank 8`.
        reason: The reason for this form; empty if the spec explains it.
    """

    layer: str
    form: str
    reason: str = ""


@dataclass(frozen=True)
class Submodel:
    """The part of a model that a kind of device trains: the result of `split`.

    Keep it for all rounds: only the weights that `cut` returns change.

    Attributes:
        spec: Its spec.
        program: The functions that are exported as graphs. They are the same in every round.
        counts: Its sizes for one batch.
        layer_decisions: The form of each weighted layer.
        cut: Takes the global model of a round and computes the tensors that the device receives.
        windows: A function of the number of a round (from 1). It maps the name of each tensor to
            the part of a global tensor that the tensor has in this round; see `in_round`. None if
            the parts are the same in every round.
    """

    spec: Spec
    program: Program
    counts: Counts
    layer_decisions: tuple[LayerDecision, ...]
    cut: Callable[[GlobalModel], dict[str, Tensor]]
    windows: Callable[[int], Mapping[str, Ranges]] | None = None

    @property
    def bytes(self) -> int:
        """Size of the tensors that the device receives, in bytes."""
        int8 = self.program.int8
        return sum(
            int8_bytes(entry.shape) if entry.name in int8 else 4 * element_count(entry.shape)
            for entry in self.program.tensors
            if entry.stored
        )


def recover_dense(tensors: Mapping[str, Tensor], table: Sequence[TensorEntry]) -> dict[str, Tensor]:
    """Select the uploaded tensors that are not factors. Keys are names of global tensors."""
    return {
        entry.stands_for: tensors[entry.name]
        for entry in table
        if entry.stands_for is not None and entry.factor is None
    }


def factors_of(
    tensors: Mapping[str, Tensor], table: Sequence[TensorEntry]
) -> dict[str, dict[str, Tensor]]:
    """Group the uploaded factors by the global tensor that they replace.

    The result maps the name of each global tensor to the values of its factors, by their labels.

    Raises UpdateError if a factor stands for no global tensor.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for entry in table:
        if entry.factor is not None:
            if entry.stands_for is None:
                raise UpdateError(
                    "The factor {tensor!r} stands for no global parameter.",
                    code="update.unknown-tensor",
                    tensor=entry.name,
                )
            groups.setdefault(entry.stands_for, {})[entry.factor] = tensors[entry.name]
    return groups


def element_count(shape: Sequence[int]) -> int:
    """The number of elements in a tensor of `shape`."""
    total = 1
    for size in shape:
        total *= size
    return total


def statistics_role(training: TrainingConfig, captured: Captured) -> Role:
    """The role of running statistics: `buffer` if devices update them, else `frozen`.

    Raises ModelError if devices must not update statistics, but the model's code writes a tensor.
    """
    if training.batch_norm == "global":
        return "buffer"
    for name in names_of_kept_values(captured.training):
        raise ModelError(
            'With batch_norm = "static" devices change no statistics, but the model changes its '
            'own tensor {tensor!r}. Set batch_norm to "global".',
            code="model.static-state",
            tensor=name,
        )
    return "frozen"


def dense_tensor_entries(
    captured: Captured, names: Iterable[str], role: Role
) -> tuple[TensorEntry, ...]:
    """An entry with `role` for each parameter or buffer in `names`."""
    return tuple(
        TensorEntry(
            name=name, role=role, dtype="float32", shape=captured.shape(name), stands_for=name
        )
        for name in names
    )
