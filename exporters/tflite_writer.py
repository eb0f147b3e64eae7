"""Lower traced signatures to one TFLite file, with a named signature for each.

The operators are TFLite's own, without Flex, and are written here: litert-torch has no open
batch. Weights are inputs, as in the ONNX graphs.
"""

from collections.abc import Sequence

from exporters.program import ProgramSignature
from exporters.tflite import elementwise, products, shape
from exporters.tflite.flatbuffer import Subgraph, serialize
from exporters.tflite.lowering import Forms, lower
from exporters.tracing import trace

FORMS: Forms = {**elementwise.FORMS, **shape.FORMS, **products.FORMS}


def to_subgraph(signature: ProgramSignature) -> Subgraph:
    """One traced signature in TFLite's operators. Raises ExportError naming one without a form."""
    return lower(trace(signature), signature, FORMS)


def to_tflite(signatures: Sequence[ProgramSignature]) -> bytes:
    """A TFLite file of `signatures`, whose inputs and outputs have the ports' names.

    Raises ExportError naming the signature and the operator that has no TFLite form.
    """
    return serialize({s.name: to_subgraph(s) for s in signatures})
