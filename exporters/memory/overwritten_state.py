"""What the metadata of an ONNX graph say of the state that a run may overwrite.

`exporters/onnx/state_in_place.py` writes them.
"""

import json
from collections.abc import Mapping, Sequence

import onnx

METADATA = "in_place"
"""Key of the outputs' names."""


def note_in_place(model: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Write into `model` that `outputs` may be written over the state that they replace."""
    if outputs:
        model.metadata_props.add(key=METADATA, value=json.dumps(list(outputs)))


def in_place(metadata: Mapping[str, str]) -> frozenset[str]:
    """The outputs that may be written over the state that they replace, by name."""
    return frozenset(json.loads(metadata.get(METADATA, "[]")))


def in_place_of(graph: bytes) -> tuple[str, ...]:
    """The same for a serialized graph, in the order of their names."""
    entries = onnx.load_from_string(graph).metadata_props
    return tuple(sorted(in_place({entry.key: entry.value for entry in entries})))
