"""The graph of a signature (such as `train`) for one runtime.

Writers make graphs, and bundles contain them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from device_agent.formats.manifest import Runtime
from exporters.memory.liveness import in_place_of
from exporters.memory.onnx_footprint import Footprint
from exporters.memory.tflite_footprint import MemoryPlan
from exporters.programs.tracing import TracedGraph


@dataclass(frozen=True)
class Form:
    """Another form of an ONNX graph, for some devices.

    Attributes:
        data: Content of its file.
        footprint: Memory of a run on the batch for which the form was made; None if shapes depend
            on the data.
    """

    data: bytes = field(repr=False)
    footprint: Footprint | None = field(compare=False, repr=False)


@dataclass(frozen=True)
class Figures:
    """The needs of a run of a graph on `batch` samples, without the graph's other forms.

    Attributes:
        batch: Number of samples.
        footprint: Memory of the run; None if shapes depend on the data.
        computed_again: Share of the work that computes activations a second time; None if shapes
            depend on the data.
    """

    batch: int
    footprint: Footprint | None
    computed_again: float | None


@dataclass(frozen=True)
class Graph:
    """One signature, lowered for one runtime.

    Attributes:
        runtime: The runtime that reads the file.
        file: Name of the file. Several signatures may share a file.
        data: Content of the file.
        operators: Number of operators of this signature, without other signatures in the file.
        size: Bytes of this signature, without other signatures in the file.
        footprint: A function from the number of samples to the memory of a run. The function raises
            ExportError if shapes depend on the data.
        held: Inputs of the signature that are constants in the file instead of inputs of the graph;
            see `embedded_weights.py`.
        dropped: Values that the traced graph computes but the file does not.
        plan: The memory plan that gives the footprint of a TFLite graph; None for ONNX.
        forms: Other forms by name, see `device_agent/formats/graph_forms.py`.
        figures: The needs of a run on the largest batch of the program; None if not computed yet.
        traced: The traced graph that was lowered; None if the graph comes from the cache.
    """

    runtime: Runtime
    file: str
    data: bytes
    operators: int
    size: int
    footprint: Callable[[int], Footprint] = field(compare=False)
    held: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    plan: MemoryPlan | None = field(default=None, compare=False, repr=False)
    forms: Mapping[str, Form] = field(default_factory=dict, compare=False, repr=False)
    figures: Figures | None = field(default=None, compare=False, repr=False)
    traced: TracedGraph | None = field(default=None, compare=False, repr=False)

    @cached_property
    def in_place(self) -> tuple[str, ...]:
        """The names of outputs that may overwrite the state that they replace."""
        return in_place_of(self.data) if self.plan is None else tuple(sorted(self.plan.over))


Graphs = Mapping[str, Graph]
"""The graphs of one program for one runtime, by signature name."""
