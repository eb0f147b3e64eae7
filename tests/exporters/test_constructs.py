"""Models as their users write them train as in plain PyTorch, after an export as written."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from constructs import CONSTRUCTS, REFUSALS
from device_agent.inference.predictor import Predictor
from edgetailor import TrainingConfig, export, split
from parameters import some_long
from profiles.errors import EdgeTailorError
from toolkit.inspection import inspect_each
from toolkit.submodels.global_model import from_model
from trainings import train_bundle

SAMPLES, RATE = 8, 0.1
ROWS = [(name, format) for name, row in CONSTRUCTS.items() for format in row.formats]
TFLITE = ("root mean square", "quantile", "mean of neighbours", "float64 constants")
SLOW = ("mask of a transformer", "packed sequences")
LONG = [
    (name, format)
    for name, format in ROWS
    if (format == "tflite" and name not in TFLITE) or name in SLOW
]


@pytest.mark.parametrize(("name", "format"), some_long(ROWS, *LONG))
def test_one_step_equals_pytorchs(name: str, format: str, seed: int, tmp_path: Path) -> None:
    if format == "tflite":
        pytest.importorskip("ai_edge_litert", reason="needs the extras [tflite] and [litert]")
    torch.manual_seed(seed)
    construct = CONSTRUCTS[name]
    model = construct.build()
    shape = (SAMPLES, *construct.shape)
    x = torch.randn(shape) if construct.tokens is None else torch.randint(construct.tokens, shape)
    y = torch.randint(3, (SAMPLES,))
    config = TrainingConfig(batch_size=SAMPLES, momentum=0.0, learning_rate=RATE)
    submodel = split(model, "full", construct.shape, config)
    bundle = tmp_path / "bundle"
    export(submodel, from_model(model), bundle, format=format)
    data = tmp_path / "data.npz"
    np.savez(data, x=x.numpy(), y=y.numpy())

    right = copy.deepcopy(model).double()
    before = {n: p.detach().clone() for n, p in right.named_parameters()}
    output = right(x if construct.tokens else x.double())
    functional.cross_entropy(output, y).backward()
    predicted = Predictor(bundle).predict(x.numpy())
    assert np.abs(predicted - output.softmax(1).detach().numpy()).max() < 1e-5

    train_bundle(bundle, data, tmp_path / "update")
    (file,) = (tmp_path / "update").glob("*.safetensors")
    trained = load_file(file)
    for parameter, value in right.named_parameters():
        change = RATE * value.grad.numpy()
        actual = before[parameter].numpy() - trained[parameter]
        # float32 rounds the weight that the change is taken from.
        rounding = 2**-24 * np.linalg.norm(before[parameter].numpy())
        assert np.linalg.norm(actual - change) <= 1e-5 * np.linalg.norm(change) + 2 * rounding


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_at_inspect_names_the_line_and_what_to_write_instead(name: str) -> None:
    build, shape, code, words, instead, line = REFUSALS[name]
    try:
        [result] = inspect_each(build(), shape, ["full"], 4)
        error = getattr(result, "cause", None)
    except EdgeTailorError as raised:
        error = raised
    assert error is not None
    assert error.code == code
    assert words in str(error)
    assert ("constructs.py, line" in str(error)) is line
    assert instead is None or instead in CONSTRUCTS
