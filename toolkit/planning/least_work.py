"""Lower bounds of the work of a signature, from its ports and the recorded model alone.

These bounds take milliseconds, because nothing is traced or lowered. So the planner does not have
to export a submodel that cannot fit.
"""

import math

from torch.fx import GraphModule

from device_agent.formats.manifest import Port
from exporters.programs.program import ProgramSignature
from exporters.programs.recorded_graph import output_node
from exporters.programs.tracing import DTYPES
from profiles.cost_model.workload import AT_BEST, Operation, SignatureWork
from toolkit.submodels.capacity import WEIGHTED, count_elements

FEWEST_PRODUCTS = 0.25
"""A graph computes at least this share of the multiply-accumulates of the recorded model.
Winograd's form needs 16 of 36. Passes that shorten a step may leave out a few more."""


def of_signature(
    signature: ProgramSignature, batch: int, times: int = 1, macs: int = 0
) -> SignatureWork:
    """A lower bound of the work that `signature_work` reads from the graph of `signature`.

    Inputs and state are exact. An output that replaces state may be written over the old state, so
    this output does not count. The arena must hold the largest output of a layer: even a step that
    computes activations again has this output in memory once.

    Args:
        signature: A signature of a program.
        batch: Number of samples.
        times: How often a step of the schedule runs the signature.
        macs: Multiply-accumulates of one forward pass of the signature's recorded model.
    """
    replacing = set(signature.replacing)
    return SignatureWork(
        name=signature.name,
        times=times,
        operations=(Operation(AT_BEST, (int(FEWEST_PRODUCTS * macs),)),) if macs else (),
        nodes=0,
        ports=len(signature.inputs) + len(signature.outputs),
        state=sum(
            port_bytes(p, batch) for p in signature.inputs if p.kind in ("state", "gradient")
        ),
        inputs=sum(port_bytes(port, batch) for port in signature.inputs),
        outputs=sum(
            port_bytes(port, batch) for port in signature.outputs if port.name not in replacing
        ),
        arena=0 if signature.source is None else largest_layer_bytes(signature.source, batch),
    )


def port_bytes(port: Port, batch: int) -> int:
    """The bytes of a port for `batch` samples."""
    sizes = (batch if size is None else size for size in port.shape)
    return math.prod(sizes) * DTYPES[port.dtype].itemsize


def largest_layer_bytes(graph: GraphModule, batch: int) -> int:
    """The bytes of the largest output of a layer in `graph`, except for the output of `graph`."""
    last = output_node(graph)
    return max(
        (
            count_elements(node, batch) * node.meta["val"].dtype.itemsize
            for node in graph.graph.nodes
            if node.target in WEIGHTED and node is not last
        ),
        default=0,
    )
