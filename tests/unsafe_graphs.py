"""Changes of a graph that no export makes, and by what name the agent and the page refuse each."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def with_function(model: onnx.ModelProto) -> None:
    model.functions.append(
        helper.make_function(
            "own", "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])],
            [helper.make_opsetid("", 20)],
        )
    )  # fmt: skip


def with_other_file(model: onnx.ModelProto) -> None:
    held = model.graph.initializer.add()
    held.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32), "held"))
    onnx.external_data_helper.set_external_data(held, "/etc/passwd")


def with_location_only(model: onnx.ModelProto) -> None:
    model.graph.initializer.add().data_location = TensorProto.EXTERNAL


def in_an_attribute(model: onnx.ModelProto) -> None:
    held = numpy_helper.from_array(np.ones(2, np.float32), "c")
    onnx.external_data_helper.set_external_data(held, "secret")
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=held))


def in_a_branch(model: onnx.ModelProto) -> None:
    inner = helper.make_node("Neg", ["x"], ["z"], domain="com.evil")
    branch = helper.make_graph([inner], "b", [], [])
    model.graph.node.append(helper.make_node("If", ["yes"], ["w"], then_branch=branch))


def with_training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.CopyFrom(model.graph)


def with_sparse(model: onnx.ModelProto) -> None:
    sparse = model.graph.sparse_initializer.add()
    sparse.values.data_location = TensorProto.EXTERNAL


UNSAFE = [
    (with_function, "functions"),
    (with_other_file, "values in another file"),
    (with_location_only, "values in another file"),
    (in_an_attribute, "values in another file"),
    (in_a_branch, "operators of the domain 'com.evil'"),
    (with_training, "a training of its own"),
    (with_sparse, "values in another file"),
]
