"""The cases that a page calibrates with: up to date, of every kind, and what they say they are."""

import base64
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from exporters import page_calibration
from profiles.cost_model.prediction import TIMED
from profiles.cost_model.workload import kind_of, sizes_of

FILE = Path(page_calibration.__file__).parents[1] / "toolkit/web/phone/agent/calibration_cases.json"
CASES = json.loads(FILE.read_text())


def test_the_file_is_what_the_program_writes() -> None:
    assert json.loads(json.dumps(page_calibration.document())) == CASES


def test_every_kind_is_timed_at_several_sizes() -> None:
    sizes: dict[str, set[tuple[int, ...]]] = {}
    for case in CASES["cases"]:
        sizes.setdefault(case["kind"], set()).add(tuple(case["sizes"]))
    assert sizes.keys() == TIMED
    assert min(map(len, sizes.values())) >= 4


@pytest.mark.parametrize("name", sorted({case["graph"] for case in CASES["cases"]}))
def test_an_operation_is_of_its_kind(name: str) -> None:
    """Of the shapes that ONNX Runtime computes when the result leaves the graph."""
    model = onnx.load_model_from_string(base64.b64decode(CASES["graphs"][name]))
    operation = model.graph.node[-2]
    del model.graph.node[-1], model.graph.output[:]
    model.graph.output.append(onnx.ValueInfoProto(name=operation.output[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for case in (case for case in CASES["cases"] if case["graph"] == name):
        given = {
            key: np.ones(shape, bool if key == page_calibration.CONDITION else np.float32)
            for key, shape in case["inputs"].items()
        }
        (result,) = session.run(None, given)
        constants = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        known = constants | {key: tensor.shape for key, tensor in given.items()}
        shapes = [known[key] for key in operation.input if key in known]
        assert kind_of(operation.op_type, shapes, [result.shape]) == case["kind"]
        assert list(sizes_of(case["kind"], shapes, [result.shape])) == case["sizes"]
