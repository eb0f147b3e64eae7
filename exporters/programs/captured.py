"""A recorded model: its two graphs and its tensors."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule

from device_agent.formats.manifest import Dtype


@dataclass(frozen=True)
class Captured:
    """A model as two ATen graphs of one input (batch, *sample_shape) and one output (batch, n).

    `parameters` are trained, `frozen` ones (requires_grad=False) only read. Whole numbers in
    samples that index an embedding are below `sample_limit`; it is None where there are none or the
    model computes with them first.
    """

    training: GraphModule
    inference: GraphModule
    sample_shape: tuple[int, ...]
    classes: int
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    sample_dtype: Dtype = "float32"
    sample_limit: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parameters, trained and frozen, and buffers."""
        return {**self.parameters, **self.frozen, **self.buffers}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter or buffer `name`."""
        return tuple(self.tensors[name].shape)
