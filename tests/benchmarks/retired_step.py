"""The training step of onnxruntime-training 1.19.2, the last one released, in its own environment.

`python retired_step.py GRAPH` makes its artifacts beside GRAPH, an inference graph whose output is
the logits, and tries them once; `retired` opens them.
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

IR_VERSION = 8
"""The newest that its tools read."""

# The package's own __init__ imports helpers for torch, which its training steps do without.
package = types.ModuleType("onnxruntime.training")
package.__path__ = [str(Path(onnxruntime.__file__).with_name("training"))]
sys.modules[package.__name__] = package

RATE = 0.01


def make_artifacts(path: Path) -> None:
    """Graphs of loss, gradients and update by plain SGD, and the weights."""
    import onnx
    from onnxruntime.training import artifacts

    model = onnx.load(str(path))
    model.ir_version = IR_VERSION
    binary = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 1
    losses = artifacts.LossType
    frozen = {i.name for i in model.graph.initializer if not trains(i.name, i.data_type)}
    artifacts.generate_artifacts(
        model,
        requires_grad=[i.name for i in model.graph.initializer if i.name not in frozen],
        frozen_params=sorted(frozen),
        loss=losses.BCEWithLogitsLoss if binary else losses.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD,
        artifact_directory=path.parent,
    )


def trains(name: str, data_type: int) -> bool:
    """Whether the initializer `name` is a parameter: not a statistic, nor a whole number."""
    return data_type == 1 and "running_" not in name


def retired(graph: str, threads: int) -> Callable[[], float]:
    """The step of the artifacts beside `graph`: the loss of the batch."""
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    folder = Path(graph).parent
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    model = Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), model)
    optimizer.set_learning_rate(RATE)
    feeds = np.load(Path(graph).with_suffix(".npz"))
    x, y = feeds["x"], feeds["y"]

    def step() -> float:
        loss = float(model(x, y))
        optimizer.step()
        model.lazy_reset_grad()
        return loss

    return step


if __name__ == "__main__":
    make_artifacts(Path(sys.argv[1]))
    retired(sys.argv[1], 1)()  # some graphs are refused only when they are opened or run
