"""The result of recording a model: two graphs and the model's tensors."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.input_range import InputRange
from device_agent.formats.manifest import Dtype, Part
from exporters.programs.changed_parameters import names_of_changed
from exporters.programs.training.losses import class_count
from exporters.recording.model_output import SINGLE, OutputForm


@dataclass(frozen=True)
class Captured:
    """A recorded model. Both graphs map one input (batch, *sample_shape) to one output.

    Attributes:
        training: The graph of the model in training mode.
        inference: The graph of the model in inference mode.
        sample_shape: Shape of one sample, without the batch.
        output_shape: Shape of the output for one sample, without the batch.
        parameters: Trained parameters by name.
        buffers: Floating-point buffers by name, for example running statistics.
        frozen: Parameters that are only read (requires_grad=False).
        sample_dtype: Type of the samples.
        sample_limit: int64 samples must be below this number, because they index an embedding
            with this number of rows. None if no embedding reads the samples directly.
        input_range: The range of the numbers in random samples. Empty for standard normal numbers.
        parts: The inputs that are packed into a sample. Empty if a sample is one array.
        outputs: The outputs of the model, which the graphs return as one tensor.
    """

    training: GraphModule
    inference: GraphModule
    sample_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    sample_dtype: Dtype = "float32"
    sample_limit: int | None = None
    input_range: InputRange = ()
    parts: tuple[Part, ...] = ()
    outputs: OutputForm = SINGLE

    @property
    def changed(self) -> set[str]:
        """The names of the trained parameters that the model changes before it uses them."""
        return names_of_changed(self.training) | names_of_changed(self.inference)

    @property
    def classes(self) -> int:
        """The size of the output's class axis, see `losses`."""
        return class_count(self.output_shape)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parameters, trained and frozen, and buffers."""
        return {**self.parameters, **self.frozen, **self.buffers}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter or buffer `name`."""
        return tuple(self.tensors[name].shape)
