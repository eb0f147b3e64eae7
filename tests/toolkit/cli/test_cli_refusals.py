"""What a model reference, a spec, a shape and a weights file may be, by `edgetailor inspect`."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from command_models import DIGITS, TINY, digits_weights
from commands import ROOT, refusal, refused, run

NET = "def tiny(): ...\n"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nonsense", r"^Invalid model 'nonsense': write package\.module:callable"),
        ("nets:", r"^Invalid model 'nets:': write package\.module:callable"),
        ("nosuch:tiny", r"^Cannot import nosuch: No module named 'nosuch'"),
        (
            "nets:nosuch",
            r"^Module nets has no callable 'nosuch'\. It defines tiny, table, broken, ",
        ),
        ("nets:number", r"^'nets:number': .* no callable 'number'"),
        ("nets:table", r"^'nets:table' returned a dict\b.* nn\.Module"),
        ("builtins:int", r"^'builtins:int' returned an int\b.* nn\.Module"),
        ("nets:broken", r"^'nets:broken' failed: LookupError: the weights are on the other"),
        ("nets:dropping", r"random numbers when it trains .* or use nn.Dropout\."),
        ("raises:tiny", r"^'raises:tiny'.* no camera here"),
        ("typo:tiny", r"^'typo:tiny'.* invalid syntax"),
        ("leaves:tiny", r"^'leaves:tiny'"),
        ("lacks:tiny", r"^'lacks:tiny': .*lacks cannot be imported: No module named 'nosuch'"),
        ("vision:tiny", r"nms does not exist\. This torchvision was built for another torch\. "),
        (".nets:tiny", r"^'\.nets:tiny'"),
    ],
)
def test_models_that_cannot_be_used(folder: Path, model: str, message: str) -> None:
    (folder / "raises.py").write_text("raise RuntimeError('no camera here')\n" + NET)
    (folder / "typo.py").write_text("def tiny(:\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit()\n" + NET)
    (folder / "vision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n" + NET
    )
    (folder / "lacks.py").write_text("import nosuch\n" + NET)
    assert re.search(message, refused(folder, "inspect", model, "--input-shape", "1,6,6"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "tiny:1",
            r"^Unknown family 'tiny'\. Use one of cp:RATE, depth:RATIO, full, low-rank:RATIO",
        ),
        ("", r"^Invalid spec '': write for example full, low-rank:0\.25 or slice:0\.42"),
        ("full:", r"^Invalid spec 'full:'"),
        ("full:1", r"^Invalid spec 'full:1': full takes no size\. Write 'full'"),
        (
            "full,depth=2",
            r"^Unknown option 'depth' of full in 'full,depth=2'\. Use one of recompute",
        ),
        ("full,recompute=1", r"'full,recompute=1': recompute must be one of some, yes, no\."),
        (
            "slice:0.5,recompute=no+low-rank:0.5,recompute=yes",
            r"^Invalid spec 'slice:.*': recompute is for the whole submodel, so write it once\.",
        ),
        (
            "low-rank",
            r"^Missing size in 'low-rank': write the rank ratio, for example low-rank:0\.25",
        ),
        ("low-rank:0", r"'low-rank:0': the rank ratio must be a number above 0 and at most 1"),
        ("low-rank:2", r"'low-rank:2': the rank ratio must be a number above 0 and at most 1"),
        ("low-rank:nan", r"'low-rank:nan': the rank ratio must be a number"),
        ("low-rank:0.5,keep", r"^Invalid option 'keep' in 'low-rank:0\.5,keep': "),
        ("low-rank:0.5,keep=a", r"keep must be a whole number of at least 0"),
        ("low-rank:0.5,kept=1", r"^Unknown option 'kept' of low-rank in .*did you mean 'keep'\?"),
        (
            "low-rank:0.5",
            r"^'low-rank:0\.5': no layer of this model gets smaller; conv: the first layer;",
        ),
        ("slice", r"^Missing size in 'slice': write the first module "),
        (
            "slice:nope",
            r"^'slice:nope': the model cannot be cut there.* bn, classifier\.",
        ),
        (
            "slice:0.0001",
            r"the smallest slice of this model has capacity 0\.\d+\W+[Aa]llow at least",
        ),
        ("slice:1.5", r"'slice:1\.5': the capacity must be a number above 0 and at most 1"),
        ("cp:0", r"'cp:0': the compression rate must be a number above 0, for example cp:2\.0"),
        ("cp:-1", r"'cp:-1': the compression rate must be a number above 0"),
        ("cp:2,personal-steps=0", r"personal-steps must be a whole number of at least 1"),
    ],
)
def test_specs_that_cannot_be_met(folder: Path, spec: str, message: str) -> None:
    assert re.search(message, refused(folder, "inspect", *TINY, "--submodel", spec))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("", r"^Invalid value for '--input-shape': Invalid shape '': write a sample's sizes"),
        ("1,6,x", r"Invalid shape '1,6,x'"),
        ("1,0,6", r"Invalid shape '1,0,6'"),
        ("1,-6,6", r"Invalid shape '1,-6,6'"),
        ("1,8,8", r"^Wrong input shape \(1, 8, 8\): .*'classifier'.*36"),
        ("3,6,6", r"^Wrong input shape \(3, 6, 6\): .*'conv'"),
        ("36", r"^Wrong input shape \(36,\): .*'conv'"),
    ],
)
def test_shapes_that_do_not_fit(folder: Path, shape: str, message: str) -> None:
    assert re.search(message, refused(folder, "inspect", "nets:tiny", "--input-shape", shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"^Missing argument 'MODEL'"),
        (["nets:tiny"], r"^Give --input-shape, or --input for each"),
        ([*TINY, "--batch", "1"], r"'--batch': 1 is not in the range x>=2"),
        ([*TINY, "--seed", "9" * 30], r"seed"),
        ([*TINY, "--sudmodel", "full"], r"^No such option.*--sudmodel"),
    ],
)
def test_options_that_cannot_be(folder: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(folder, "inspect", *arguments))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"^w cannot be read: No such file"),
        ("folder", r"^w is a folder, but the weights of the global model are one file\."),
        ("text", r"^w is not a safetensors file"),
        ("truncated", r"^w is not a safetensors file"),
        ("nan", r"^w: .*'classifier\.bias' contains a number that is not finite"),
        ("lacking", r"^w lacks the tensor 'classifier\.bias'"),
        ("foreign", r"^w has .*the .*tensor 'extra'"),
        ("shape", r"^w: 'classifier\.bias' .*\(11,\).* the model.* \(10,\)"),
        (
            "type",
            r"^w: 'classifier\.bias' is torch\.float64, .*torch\.float32\. Convert the tensor\.",
        ),
    ],
)
def test_weights_that_do_not_fit(folder: Path, kind: str, message: str) -> None:
    tensors = digits_weights()
    bias = tensors["classifier.bias"]
    match kind:
        case "folder":
            (folder / "w").mkdir()
        case "text":
            (folder / "w").write_text("weights\n" * 10)
        case "truncated":
            (folder / "w").write_bytes(save(tensors)[:-1])
        case "nan":
            save_file({**tensors, "classifier.bias": bias * np.float32("nan")}, folder / "w")
        case "lacking":
            del tensors["classifier.bias"]
            save_file(tensors, folder / "w")
        case "foreign":
            save_file({**tensors, "extra": bias}, folder / "w")
        case "shape":
            save_file({**tensors, "classifier.bias": np.append(bias, bias[:1])}, folder / "w")
        case "type":
            save_file({**tensors, "classifier.bias": bias.astype(np.float64)}, folder / "w")
    assert re.search(message, refused(folder, "inspect", *DIGITS, "--weights", "w"))


def test_a_package_that_is_not_installed_is_named(folder: Path) -> None:
    """As on a device, where only the agent is."""
    blocked = folder / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    path = os.pathsep.join(map(str, (blocked, ROOT)))
    done = run("edgetailor", "inspect", TINY, "--input-shape", "1,6,6", cwd=folder, PYTHONPATH=path)
    assert refusal(done) == (
        "The Python package torch is not installed. Run `pip install '.[toolkit]'` in the folder "
        "of EdgeTailor's source to install it and all packages of the server side."
    )
