"""`edgetailor` for samples with ids or of several inputs, and for several outputs.

Each refusal names the option that another run then takes.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from commands import edgetailor, refusal
from device_agent.formats.bundle import open_bundle
from device_agent.formats.packing import sample_parts
from device_agent.training.random_run import synthetic
from edgetailor import Predictor
from models_for_tests import two_towers

TOWERS = "models_for_tests:two_towers"
INPUTS = ("--input", "user:int64", "--input", "item:int64", "--input", "numbers:2")
COLUMNS = '''
import torch
from torch import nn


class Columns(nn.Module):
    """(N, 3) -> (N, 2); the first column holds ids below 5."""

    def __init__(self):
        super().__init__()
        self.embedded, self.last = nn.Embedding(5, 4), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.cat([self.embedded(x[:, 0].long()), x[:, 1:]], 1))
'''
EXPORTED = r"""full: {params} trained parameters, capacity 1\.00, {size} of weights
signature +operators +MACs +graph +peak memory
(?:(?:train|predict|evaluate) +\d+ +[\d.]+ k +[\d.]+ k?B +[\d.]+ MB
){{3}}for a batch of 4; peak memory: predicted, above the idle agent
training: peak memory [\d.]+ MB, running train
(?:graphs: (?:\d of \d )?reused from the cache
)?verified: relative error \d\.\de-\d\d \(tolerance \de-\d\d, seed \d+\)
  worst (?:tensor|operator): .*(?:\n  .*)*
bundle: {out}
"""


def run(folder: Path, *arguments: object) -> str:
    done = edgetailor(*arguments, cwd=folder).succeeded()
    return done.stdout


def refused(folder: Path, *arguments: object) -> str:
    return refusal(edgetailor(*arguments, cwd=folder))


def exported(folder: Path, params: int, size: str, *arguments: object) -> Path:
    """The bundle that a command wrote; the text that it printed is compared as a whole."""
    out = arguments[arguments.index("--out") + 1]
    printed = run(folder, "export", *arguments)
    assert re.fullmatch(EXPORTED.format(params=params, size=size, out=out), printed), printed
    return folder / str(out)


SEVERAL_INPUTS = """\
submodel  params  activations   MACs  capacity  weights
full         507           96  0.8 k      1.00   2.0 kB
activations and MACs for a batch of 32
a sample: 4 float32; its output: 3
its inputs: user int64 below 30, item int64 below 50, numbers 2 float32
"""


def test_several_inputs_from_inspect_to_deploy(seed: int, tmp_path: Path) -> None:
    """All commands take the same options."""
    assert refused(tmp_path, "inspect", TOWERS) == (
        "Give --input-shape, or --input for each of several inputs."
    )
    assert refused(tmp_path, "inspect", TOWERS, "--input-shape", "4") == (
        "TwoTowers.forward takes 3 inputs: user, item, numbers. Give the shape of each input: "
        "--input NAME:SHAPE, or --input NAME:SHAPE:int64 for ids, in place of --input-shape. In "
        "Python, use `pack_inputs`; in a federation's file, use the key `inputs`."
    )
    assert run(tmp_path, "inspect", TOWERS, *INPUTS) == SEVERAL_INPUTS
    untyped = [given.removesuffix(":int64") for given in INPUTS]
    assert run(tmp_path, "inspect", TOWERS, *untyped) == SEVERAL_INPUTS
    assert sum(own.numel() for own in two_towers().parameters()) == 507

    saved = ("--save-weights", "w.safetensors")
    arguments = (TOWERS, *INPUTS, "--batch", 4, "--out", "bundle", *saved)
    written = exported(tmp_path, 507, "2\\.0 kB", *arguments)
    parts = sample_parts(open_bundle(written).manifest)
    assert [part.name for part in parts] == ["user", "item", "numbers"]

    draw = np.random.default_rng(seed)
    x = {
        "user": draw.integers(30, size=20),
        "item": draw.integers(50, size=20),
        "numbers": draw.normal(size=(20, 2)).astype(np.float32),
    }
    y = draw.integers(3, size=20)
    np.savez(tmp_path / "held.npz", y=y, **{f"x_{name}": own for name, own in x.items()})
    model = two_towers()
    model.load_state_dict(load_file(tmp_path / "w.safetensors"))
    with torch.no_grad():
        output = model(**{name: torch.from_numpy(own) for name, own in x.items()})
    trained = (TOWERS, "--weights", "w.safetensors", *INPUTS, "--data", "held.npz", "--json")
    figures = json.loads(run(tmp_path, "evaluate", *trained))
    assert figures["accuracy"] == np.mean(output.argmax(1).numpy() == y)
    expected = functional.cross_entropy(output, torch.from_numpy(y))
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-5)

    run(tmp_path, "deploy", *trained, "--out", "deployed")
    predicted = Predictor(tmp_path / "deployed").predict(x)
    np.testing.assert_allclose(predicted, output.softmax(1).numpy(), atol=1e-6)


@pytest.mark.parametrize("given", [("--example", "rows.npz"), ("--input-range", "0:4")])
def test_ids_among_the_numbers(given: tuple[str, str], seed: int, tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text(COLUMNS)
    rows = np.random.default_rng(seed).normal(size=(50, 3)).astype(np.float32)
    rows[:, 0] = np.arange(50) % 5
    np.savez(tmp_path / "rows.npz", x=rows)
    arguments = ("table:Columns", "--input-shape", "3", "--batch", 4, "--out", "bundle")
    assert refused(tmp_path, "export", *arguments) == (
        "The model uses numbers of its samples as ids, but random samples contain ids that the "
        "model does not have (table.py, line 14: return self.last(torch.cat([self.embedded(x[:, "
        "0].long()), x[:, 1:]], 1))). Say which ids there are: give --input-range LOW:HIGH, or "
        "--example FILE with real samples. In Python use set_input_range; in a federation's file "
        "set input_range or example."
    )
    assert not (tmp_path / "bundle").exists()
    drawn = synthetic(open_bundle(exported(tmp_path, 34, "136 B", *arguments, *given)), 400).x
    assert set(drawn[:, 0].tolist()) == set(range(5))
    if given[0] == "--example":
        assert (drawn.min(0) >= rows.min(0)).all()
        assert (drawn.max(0) <= rows.max(0)).all()
        assert (drawn[:, 1:] != np.round(drawn[:, 1:])).mean() > 0.99
    else:
        assert set(drawn.flatten().tolist()) == set(range(5))


BOXES = ("inspect", "own_losses:Boxes", "--input-shape", "6")
SIZES = """\
submodel  params  activations   MACs  capacity  weights
full         175          608  5.0 k      1.00    700 B
activations and MACs for a batch of 32
a sample: 6 float32; its output: 7
"""
OWN_LOSS = """\
kind (3): passed to own_losses:detection; labels y_box float32 (N, 4), y_kind
int64 (N) below 3
box (4): passed to own_losses:detection; labels y_box float32 (N, 4), y_kind
int64 (N) below 3
"""
ONE_OUTPUT = """\
kind (3): logits of classes, trained by cross-entropy; labels y int64 (N) below
3
box (4): not trained: the loss does not name it
these get no gradient, so they do not train: box.weight, box.bias
"""


def test_the_outputs_that_a_loss_gets_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path, *BOXES) == (
        "The model returns several outputs: kind (batch, 3), box (batch, 4). The loss "
        "'cross-entropy' does not say which output it trains. Name one output, as in --loss "
        "'kind=cross-entropy', or give each output a loss, as in --loss 'kind=cross-entropy + "
        "box=cross-entropy'. Or give a loss of your own: --loss module:function."
    )
    # Both remedies of the refusal.
    assert run(tmp_path, *BOXES, "--loss", "own_losses:detection") == SIZES + OWN_LOSS
    assert run(tmp_path, *BOXES, "--loss", "kind=cross-entropy") == SIZES + ONE_OUTPUT
    document = json.loads(run(tmp_path, *BOXES, "--loss", "own_losses:detection", "--json"))
    use = "passed to own_losses:detection; labels y_box float32 (N, 4), y_kind int64 (N) below 3"
    assert document["outputs"] == [
        {"output": "kind", "shape": [3], "use": use},
        {"output": "box", "shape": [4], "use": use},
    ]


def test_changes_of_samples(tmp_path: Path) -> None:
    points = ("own_losses:Points", "--input-shape", "2,5,7", "--loss", "dice", "--batch", 4)
    assert refused(tmp_path, "export", *points, "--augment", "turn", "--out", "b") == (
        "Unknown augmentation 'turn'. It must be one of flip, flip-vertical, shift:N, noise:STD, "
        "mask:N. N is the largest number of pixels or steps that change, at least 1; STD is a "
        "standard deviation. For shift and mask of a time series, also name the axis of the steps: "
        "shift:N:first for samples (steps, columns), shift:N:last for (columns, steps)."
    )
    towers = (TOWERS, *INPUTS, "--augment", "noise:0.1", "--batch", 4)
    assert refused(tmp_path, "export", *towers, "--out", "b") == (
        "The augmentation 'noise:0.1' does not fit samples of the shape (4,): they contain ids or "
        "several inputs, but only arrays of numbers can be changed."
    )
    assert not (tmp_path / "b").exists()
    both = ("--augment", "flip", "--augment", "shift:2")
    # Only the training step of the second bundle draws random numbers.
    for out, given, expected in (("plain", (), set()), ("changed", both, {"train"})):
        bundle = open_bundle(exported(tmp_path, 135, "540 B", *points, *given, "--out", out))
        signatures = bundle.manifest.signatures.items()
        drawing = {name for name, own in signatures for port in own.inputs if port.kind == "seed"}
        assert drawing == expected


def test_a_range_is_that_of_the_inputs_that_are_numbers(tmp_path: Path) -> None:
    given = ("--input-range", "2.0:3.0")
    arguments = (TOWERS, *INPUTS, *given, "--batch", 4, "--out", "bundle")
    drawn = synthetic(open_bundle(exported(tmp_path, 507, "2\\.0 kB", *arguments)), 200).x
    assert drawn[:, 0].max() > 20  # ids
    assert drawn[:, 2:].min() >= 2
    assert drawn[:, 2:].max() <= 3
    shape = ("--input-shape", "4", "--example", "rows.npz")
    assert refused(tmp_path, "inspect", TOWERS, *shape, *given) == (
        "--input-range cannot be combined with --example. Leave out one of them."
    )
