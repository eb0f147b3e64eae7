"""A signature as a graph for one runtime: what the writers make and bundles hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from device_agent.formats.manifest import Runtime
from exporters.memory.memory_plan import MemoryPlan
from exporters.memory.onnx_footprint import Footprint


@dataclass(frozen=True)
class Graph:
    """One signature, lowered for `runtime`: the name and content of the file that holds it.

    `operators` and `size` (bytes) are of this signature alone, whatever else is in the file.
    `footprint` is the memory that a run takes, by samples; it raises ExportError where that does
    not follow from them. `held` are inputs of the signature that are constants of the file instead
    (exporters/embedded_weights.py). `plan` is what a TFLite graph's footprint is computed from.
    """

    runtime: Runtime
    file: str
    data: bytes
    operators: int
    size: int
    footprint: Callable[[int], Footprint] = field(compare=False)
    held: frozenset[str] = frozenset()
    plan: MemoryPlan | None = field(default=None, compare=False, repr=False)


Graphs = Mapping[str, Graph]
"""The graphs of one program for one runtime, by signature name."""
