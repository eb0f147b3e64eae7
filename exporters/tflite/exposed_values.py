"""Reads tensors inside a TFLite graph, for verification."""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from device_agent.runtime.litert_runtime import without_remarks

PREFIX = "tensor "
OUTPUTS = 8
"""Offset of the field `outputs` in the vtable of the schema's SubGraph."""


def exposed_name(index: int) -> str:
    """Return the name by which `exposed_values` finds the tensor at `index`."""
    return f"{PREFIX}{index}"


def exposed_values(
    signature: str, data: bytes, feeds: Mapping[str, np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Run a signature of a file and return the tensors with these `names` (see `exposed_name`)."""
    model = schema.Model.GetRootAs(data)
    entries = [model.SignatureDefs(n) for n in range(model.SignatureDefsLength())]
    (subgraph,) = [e.SubgraphIndex() for e in entries if e.SignatureKey().decode() == signature]
    indices = [int(name.removeprefix(PREFIX)) for name in names]
    with without_remarks():
        interpreter = Interpreter(
            model_content=with_outputs(data, model.Subgraphs(subgraph), indices)
        )
        interpreter.get_signature_runner(signature)(**feeds)
    return {
        name: interpreter.get_tensor(index, subgraph)
        for name, index in zip(names, indices, strict=True)
    }


def with_outputs(data: bytes, subgraph: schema.SubGraph, indices: Sequence[int]) -> bytes:
    """Return the file `data`, changed so that `subgraph` also returns the tensors at `indices`.

    The new list of outputs is appended to the file, and the reference to the old list is changed to
    the new list. To parse and write the whole file would take seconds.
    """
    outputs = dict.fromkeys([*subgraph.OutputsAsNumpy().tolist(), *indices])
    field = subgraph._tab.Pos + subgraph._tab.Offset(OUTPUTS)
    padded = data + bytes(-len(data) % 4)
    reference = struct.pack("<I", len(padded) - field)
    listed = struct.pack(f"<{1 + len(outputs)}i", len(outputs), *outputs)
    return padded[:field] + reference + padded[field + 4 :] + listed
