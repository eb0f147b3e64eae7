"""What `retired_step.py` takes: a case as an inference graph that torch exports, and its batch."""

import subprocess
import warnings
from pathlib import Path

import numpy as np
import torch
from step_cases import Case

from profiles.errors import ExportError

STEP = Path(__file__).with_name("retired_step.py")
OPSET = 15


def write_retired(case: Case, folder: Path, python: str) -> Path:
    """The graph of `case`, its batch and onnxruntime-training's artifacts, made by `python`.

    A penalty is left out: torch's older exporter lacks its operators, the newer one writes the
    batch norm of a training model in pieces. Raises ExportError where onnxruntime-training refuses
    the graph.
    """
    model, x, y = case.problem()
    graph = folder / "retired.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            case.trained(model).model,
            (x,),
            graph,
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=OPSET,
            input_names=["x"],
        )
    labels = y if case.classes > 2 else y[:, None].float()
    np.savez(graph.with_suffix(".npz"), x=x.numpy(), y=labels.numpy())
    run = subprocess.run([python, str(STEP), str(graph)], capture_output=True, text=True)
    if run.returncode:
        raise ExportError(run.stderr.strip().split("\n")[-1])
    return graph
