"""`edgetailor` as a person meets it: whole outputs, exit codes, and rounds through files alone."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save, save_file
from torch import Tensor

from bundles import everything, samples, tiny_bundle, tiny_model, write_data
from commands import Done, edgetailor, refusal, run
from device_agent.files import fingerprint
from device_agent.training import train_bundle
from device_agent.update import RECORD, TENSORS
from exporters import compile_graphs, export
from exporters.program import Program, Tensors
from exporters.verify import verify
from profiles.errors import VerificationError
from toolkit import GlobalModel, load_model, split
from toolkit.weights import from_model

DIGITS = ("toolkit.models:digits_cnn", "--input-shape", "1,8,8")
NETS = '''
from collections import OrderedDict

import torch
from torch import nn


def tiny():
    """(N, 1, 6, 6) -> (N, 8)."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
            bn=nn.BatchNorm2d(4),
            act=nn.ReLU(),
            flat=nn.Flatten(),
            classifier=nn.Linear(36, 8),
        )
    )


class Glance(nn.Module):
    """Looks at one spot of the image: sampling has a gradient that is no graph yet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.classifier = nn.Linear(8, 8)

    def forward(self, x):
        spot = torch.zeros(1, 2, 2, 2).expand(x.shape[0], 2, 2, 2)
        seen = nn.functional.grid_sample(self.conv(x), spot, align_corners=False)
        return self.classifier(seen.flatten(1))


def table():
    return {}


def broken():
    raise LookupError("the weights are on the other machine")


def alone():
    return nn.Linear(4, 2)


def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5))


number = 3
'''
TINY = ("nets:tiny", "--input-shape", "1,6,6", "--batch", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of the commands, with somebody's models in it."""
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def refused(folder: Path, *arguments: object, code: int = 2) -> str:
    """What `edgetailor` says when it refuses `arguments`; nothing in `folder` may change."""
    before = everything(folder)
    sentence = refusal(edgetailor(*arguments, cwd=folder), code)
    after = {name: data for name, data in everything(folder).items() if "__pycache__" not in name}
    assert after == before
    return sentence


# help, inspect


def test_help_lists_commands_and_exit_codes(tmp_path: Path) -> None:
    done = run("edgetailor", "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert re.findall(r"^  (\w+)  +[A-Z]", done.stdout, re.M) == [
        "aggregate", "demo", "evaluate", "export", "inspect", "serve",
    ]  # fmt: skip
    assert done.stdout.endswith(
        """
  Exit codes:
    0    done
    2    usage or bad input
    3    export failed
    4    verification failed
    5    nothing fits
    6    connection or authorisation
    70   a fault of the program's own
    130  interrupted
"""
    )


@pytest.mark.parametrize("command", ["aggregate", "demo", "evaluate", "export", "inspect", "serve"])
def test_every_command_explains_itself_in_80_columns(tmp_path: Path, command: str) -> None:
    done = edgetailor(command, "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: edgetailor {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.findall(r"^  --[a-z-]+(?: [A-Z]+)?$", done.stdout, re.M) == []


RESNET20 = (
    "inspect", "toolkit.models:resnet20", "--input-shape", "3,32,32", "--batch", "32",
    "--submodel", "full", "--submodel", "slice:blocks.3",
)  # fmt: skip
TABLE = """\
submodel         params  activations       MACs  capacity  weights
full            272,762    6,947,136  1,314.4 M      1.00   1.1 MB
slice:blocks.3  257,994    2,752,832    838.9 M      0.42   1.1 MB
activations and MACs for a batch of 32

slice:blocks.3
layer                    form    why
ahead of blocks.3.conv1  frozen  2 stages of the multi-step forward pass
"""


def test_inspect_prints_table_1_of_embracing_fl(tmp_path: Path) -> None:
    done = run("edgetailor", *RESNET20, cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == TABLE
    assert everything(tmp_path) == {}


def test_inspect_gives_the_same_as_json(tmp_path: Path) -> None:
    done = edgetailor(*RESNET20, "--submodel", "slice:blocks.6", "--json", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["version"] == 1
    found = [
        (
            entry["submodel"], entry["params"], entry["activations"],
            round(entry["capacity"], 2), entry["macs"], entry["bytes"],
        )
        for entry in document["submodels"]
    ]  # fmt: skip
    received = 4 * (272_762 + 2 * (16 * 8 + 32 * 7 + 64 * 7))  # running means and variances too
    assert found == [
        ("full", 272_762, 6_947_136, 1.0, macs(), received),
        ("slice:blocks.3", 257_994, 2_752_832, 0.42, macs(3), received),
        ("slice:blocks.6", 206_346, 917_824, 0.16, macs(6), received),
    ]


CUT_POINTS = """\
submodel  params  activations    MACs  capacity   weights
full      33,338      147,776  23.9 M      1.00  134.5 kB
activations and MACs for a batch of 32

cut ahead of  params  activations  capacity  recorded
units.0.bn    33,194      115,008      0.82     1,024
units.1.conv  33,162      115,008      0.82     1,024
units.1.bn    28,554       49,472      0.43     2,048
units.2.conv  28,490       49,472      0.43     2,048
units.2.bn    19,274       33,088      0.29       512
units.3.conv  19,210       33,088      0.29       512
units.3.bn       778          320      0.01     1,024
classifier       650          320      0.01        64
recorded: numbers on the device's disk for each sample
"""
NOWHERE = """\
submodel  params  activations   MACs  capacity  weights
full          10           64  0.0 M      1.00     40 B
activations and MACs for a batch of 32

This model can be cut nowhere: a cut needs parameters on both sides and a single
activation that crosses.
"""


def test_inspect_lists_the_places_to_cut(tmp_path: Path) -> None:
    done = run("edgetailor", "inspect", *DIGITS, "--cut-points", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == CUT_POINTS.splitlines()


def test_the_places_to_cut_as_json(tmp_path: Path) -> None:
    done = edgetailor("inspect", *DIGITS, "--cut-points", "--json", cwd=tmp_path)
    places = json.loads(done.stdout)["cut_points"]
    assert [place["module"] for place in places] == [
        line.split()[0] for line in CUT_POINTS.splitlines()[5:-1]
    ]
    capacity = (28_490 + 49_472) / (33_338 + 147_776)
    assert places[3] == {
        "module": "units.2.conv", "params": 28_490, "activations": 49_472, "capacity": capacity,
        "recorded": 32 * 8 * 8,
    }  # fmt: skip
    without = edgetailor("inspect", *DIGITS, "--json", cwd=tmp_path)
    assert "cut_points" not in json.loads(without.stdout)


def test_a_model_that_can_be_cut_nowhere(folder: Path) -> None:
    done = run(
        "edgetailor", "inspect", "nets:alone", "--input-shape", "4", "--cut-points", cwd=folder
    )
    assert (done.code, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == NOWHERE.splitlines()


def macs(first_block: int = 0) -> int:
    """Multiplications of ResNet-20 on 32 samples from block `first_block` on, by hand."""
    stem, classifier = 3 * 16 * 9 * 32**2, 64 * 10
    total = classifier + (stem if first_block == 0 else 0)
    for block in range(first_block, 9):
        width, side = 16 << block // 3, 32 >> block // 3
        inputs = width // 2 if block in (3, 6) else width
        shortcut = inputs * width if block % 3 == 0 else 0
        total += (9 * inputs * width + 9 * width * width + shortcut) * side**2
    return 32 * total


# what a model reference, a spec and a shape may be


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nonsense", r"^'nonsense' is no model: write package\.module:callable"),
        ("nets:", r"^'nets:' is no model: write package\.module:callable"),
        ("nosuch:tiny", r"^'nosuch:tiny': nosuch cannot be imported: No module named 'nosuch'"),
        ("nets:nosuch", r"^'nets:nosuch': nets has no callable 'nosuch'"),
        ("nets:number", r"^'nets:number': nets has no callable 'number'"),
        ("nets:table", r"^'nets:table' returned a dict, not an nn\.Module"),
        ("nets:broken", r"^'nets:broken' failed: LookupError: the weights are on the other"),
        ("nets:dropping", r"random numbers when it trains .*; set dropout to 0\."),
        ("raises:tiny", r"^'raises:tiny'.* no camera here"),
        ("typo:tiny", r"^'typo:tiny'.* invalid syntax"),
        ("leaves:tiny", r"^'leaves:tiny'"),
        ("lacks:tiny", r"^'lacks:tiny': lacks cannot be imported: No module named 'nosuch'"),
        (".nets:tiny", r"^'\.nets:tiny'"),
    ],
)
def test_models_that_cannot_be_used(folder: Path, model: str, message: str) -> None:
    (folder / "raises.py").write_text("raise RuntimeError('no camera here')\n")
    (folder / "typo.py").write_text("def tiny(:\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit()\n")
    (folder / "lacks.py").write_text("import nosuch\n")
    assert re.search(message, refused(folder, "inspect", model, "--input-shape", "1,6,6"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tiny:1", r"^There is no submodel family 'tiny'; there are cp:RATE, full, low-rank:"),
        ("", r"^'' is no submodel spec; write it like full, low-rank:0\.25 or slice:0\.42"),
        ("full:", r"^'full:' is no submodel spec"),
        ("full:1", r"^'full:1': full takes no number, write 'full'"),
        ("full,depth=2", r"^'full,depth=2': full has no option 'depth'; it has none"),
        ("low-rank", r"^'low-rank' needs a rank ratio: write it like low-rank:0\.25"),
        ("low-rank:0", r"^'low-rank:0': the rank ratio must be a number above 0 and at most 1"),
        ("low-rank:2", r"^'low-rank:2': the rank ratio must be a number above 0 and at most 1"),
        ("low-rank:nan", r"^'low-rank:nan': the rank ratio must be a number"),
        ("low-rank:0.5,keep", r"^'low-rank:0\.5,keep': 'keep' is no option"),
        ("low-rank:0.5,keep=a", r"keep must be a number of at least 0"),
        ("low-rank:0.5,kept=1", r"low-rank has no option 'kept'; it knows keep, decay"),
        (
            "low-rank:0.5",
            r"^'low-rank:0\.5': no layer of this model gets smaller; conv: the first layer;",
        ),
        ("slice", r"^'slice' needs the first module to train or the largest capacity allowed"),
        (
            "slice:nope",
            r"^'slice:nope': the model cannot be cut there; it can be cut at bn, classifier\.",
        ),
        ("slice:0.0001", r"the smallest slice of this model has capacity 0\.\d+; allow at least"),
        ("slice:1.5", r"^'slice:1\.5': the capacity must be a number above 0 and at most 1"),
        ("cp:0", r"^'cp:0': the compression rate must be a number above 0, like cp:2\.0"),
        ("cp:-1", r"^'cp:-1': the compression rate must be a number above 0"),
        ("cp:2,personal-steps=0", r"personal-steps must be a number of at least 1"),
    ],
)
def test_specs_that_cannot_be_met(folder: Path, spec: str, message: str) -> None:
    assert re.search(message, refused(folder, "inspect", *TINY, "--submodel", spec))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("", r"^Invalid value for '--input-shape': '' is no shape: write a sample's sizes like"),
        ("1,6,x", r"'1,6,x' is no shape"),
        ("1,0,6", r"'1,0,6' is no shape"),
        ("1,-6,6", r"'1,-6,6' is no shape"),
        ("1,8,8", r"^The model cannot be recorded for samples of shape \(1, 8, 8\): "),
        ("3,6,6", r"^The model cannot be recorded for samples of shape \(3, 6, 6\): "),
        ("36", r"^The model cannot be recorded for samples of shape \(36,\): "),
    ],
)
def test_shapes_that_do_not_fit(folder: Path, shape: str, message: str) -> None:
    assert re.search(message, refused(folder, "inspect", "nets:tiny", "--input-shape", shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"^Missing argument 'MODEL'"),
        (["nets:tiny"], r"^Missing option '--input-shape'"),
        ([*TINY, "--batch", "1"], r"'--batch': 1 is not in the range x>=2"),
        ([*TINY, "--seed", "9" * 30], r"seed"),
        ([*TINY, "--sudmodel", "full"], r"^No such option.*--sudmodel"),
    ],
)
def test_options_that_cannot_be(folder: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(folder, "inspect", *arguments))


def digits_weights() -> dict[str, np.ndarray]:
    tensors = from_model(load_model(DIGITS[0])).tensors
    return {name: value.numpy() for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"^w cannot be read: No such file"),
        ("folder", r"^w cannot be read: Is a directory"),
        ("text", r"^w is not a safetensors file"),
        ("truncated", r"^w is not a safetensors file"),
        ("nan", r"^w: 'classifier\.bias' holds a number that is not finite"),
        ("lacking", r"^w lacks the tensor 'classifier\.bias': it is not from this model"),
        ("foreign", r"^w has, beyond the model, the tensor 'extra': it is not from this model"),
        ("shape", r"^w: 'classifier\.bias' is \(11,\), the model's is \(10,\)"),
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
    assert re.search(message, refused(folder, "inspect", *DIGITS, "--weights", "w"))


# export


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "there"], r"^there exists already: give another place, or --force"),
        (
            ["--out", "nets.py/b"],
            r"^nets\.py/b cannot be written: nets\.py is a file, not a folder",
        ),
        (
            ["--out", "b", "--save-weights", "nets.py"],
            r"^nets\.py exists already: give another pla",
        ),
        (["--out", "b", "--epochs", "0"], r"^epochs must be at least 1; it is 0"),
        (["--out", "b", "--learning-rate", "nan"], r"^learning_rate must be a number from 0 up"),
        (["--out", "b", "--momentum", "1"], r"^momentum must be below 1; it is 1\.0"),
        (["--out", "b", "--weight-decay", "-1"], r"^weight_decay must be a number from 0 up"),
        (["--out", "b", "--format", "pickle"], r"'pickle' is not one of 'onnx', 'tflite'"),
        (["--out", "b", "--submodel", "slice:9"], r"^'slice:9': the capacity must be a number"),
        ([], r"^Missing option '--out'"),
    ],
)
def test_exports_that_cannot_be(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "there").mkdir()
    assert re.search(message, refused(folder, "export", *TINY, *arguments))


IS_FOLDER = "there is a folder: give the name of a file."
ITS_OWN = "the bundle {} is a folder of its own. Give a place outside it."


@pytest.mark.parametrize(
    ("out", "saved", "message"),
    [
        ("b", "b", f"The weights cannot be saved as b: {ITS_OWN.format('b')}"),
        ("b", "b/w", f"The weights cannot be saved as b/w: {ITS_OWN.format('b')}"),
        ("there", "b/../there/w",
         f"The weights cannot be saved as b/../there/w: {ITS_OWN.format('there')}"),
        ("w/b", "w", "The bundle cannot be written to w/b: the weights are saved as the file w. "
         "Give another place."),
        ("b", "there", IS_FOLDER),
        ("b", "nets.py/g.st",
         "nets.py/g.st cannot be written: nets.py is a file, not a folder."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_weights_that_cannot_be_saved(
    folder: Path, out: str, saved: str, message: str, force: list[str]
) -> None:
    """Refused before the model, which is none, is looked for."""
    if out != "there" or force:
        (folder / "there").mkdir()
    arguments = ("--input-shape", "1", "--out", out, "--save-weights", saved, *force)
    assert refused(folder, "export", "nets:nothing", *arguments) == message


def test_a_failed_export_leaves_nothing(folder: Path) -> None:
    sentence = refused(
        folder, "export", "nets:Glance", "--input-shape", "1,6,6", "--out", "b",
        "--save-weights", "w", code=3,
    )  # fmt: skip
    assert re.search(
        r"^Signature 'train' needs the operator aten::grid_sampler_2d_backward", sentence
    )


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    before = everything(folder)
    done = edgetailor("export", *TINY, "--out", "b", "--save-weights", "w", "--dry-run", cwd=folder)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert everything(folder) == before
    assert (done.code, done.stdout) == (
        0,
        "full: 340 trained parameters, capacity 1.00, 1.4 kB of weights\n"
        "dry run: b was not written\n",
    )


def predicting() -> tuple[Program, dict[str, Tensor]]:
    """The tiny model's program, cut down to its predictions, and its weights."""
    model, source = tiny_model()
    submodel = split(model, "full", (1, 6, 6))
    predict = next(s for s in submodel.program.signatures if s.name == "predict")
    return replace(submodel.program, signatures=(predict,)), submodel.cut(source)


def another_when_traced(program: Program) -> Program:
    """`program` as an exporter with a fault would turn it into a graph: twice what it should be.

    Verification runs the function in float64, tracing in float32.
    """
    (predict,) = program.signatures

    def function(feeds: Tensors) -> dict[str, Tensor]:
        output = predict.function(feeds)["output"]
        return {"output": output if feeds["x"].dtype == torch.float64 else 2 * output}

    return replace(program, signatures=(replace(predict, function=function),))


def test_a_wrong_graph_does_not_pass(tmp_path: Path) -> None:
    program, values = predicting()
    right = compile_graphs(program)
    wrong = compile_graphs(another_when_traced(program))
    assert right["predict"] != wrong["predict"]
    assert verify(program, right, values).passed
    verdict = verify(program, wrong, values)
    assert not verdict.passed
    assert verdict.error == pytest.approx(1, rel=1e-3)
    assert str(verdict) == (
        f"verification failed: relative error 1.0e+00 (tolerance 5e-03, seed {verdict.seed}), "
        "worst tensor: 'output' of 'predict'"
    )


def test_a_bundle_that_fails_verification_is_kept_apart(tmp_path: Path) -> None:
    program, values = predicting()
    faulty = another_when_traced(program)
    with pytest.raises(VerificationError, match=r"bundle\.failed-verification; do not deploy it"):
        export(faulty, values, tmp_path / "bundle", base="")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.failed-verification"]
    export(faulty, values, tmp_path / "unchecked", base="", check=False)
    assert (tmp_path / "unchecked" / "predict.onnx").is_file()


# aggregate


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the global model `global.safetensors` and two updates of it, `one`, `two`."""
    folder = tmp_path_factory.mktemp("round")
    (folder / "global.safetensors").write_bytes(tiny_model()[1].save())
    for seed, (name, family) in enumerate([("one", "slice"), ("two", "cp")]):
        data = write_data(folder / f"{name}.npz", seed=seed)
        train_bundle(tiny_bundle(tmp_path_factory, family), str(data), folder / name, threads=1)
    return folder


@pytest.fixture
def round_(updates: Path, tmp_path: Path) -> Path:
    """A copy of that folder to work in."""
    return shutil.copytree(updates, tmp_path / "round")


def edit(update: Path, **changes: object) -> None:
    record = json.loads((update / RECORD).read_bytes())
    (update / RECORD).write_text(json.dumps({**record, **changes}))


def retensor(update: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of an update and make its hash right again."""
    tensors = load_file(update / TENSORS)
    change(tensors)
    data = save(tensors)
    (update / TENSORS).write_bytes(data)
    entry = fingerprint(data)
    edit(update, file={"size": entry.size, "sha256": entry.sha256})


def test_aggregate(round_: Path) -> None:
    done = edgetailor("aggregate", "global.safetensors", "one", "two", "--out", "new", cwd=round_)
    assert (done.code, done.stderr) == (0, "")
    assert re.fullmatch(
        r"submodel          samples  steps  +loss *\n"
        r"slice:classifier       21     10  \d\.\d{3} to \d\.\d{3} *\n"
        r"cp:2\.0                 21     10  \d\.\d{3} to \d\.\d{3} *\n"
        r"global model: new\n",
        done.stdout,
    )
    before, after = load_file(round_ / "global.safetensors"), load_file(round_ / "new")
    assert {n: a.shape for n, a in after.items() if not n.startswith("kept|")} == {
        n: a.shape for n, a in before.items()
    }


def test_one_epoch_has_one_loss_in_the_table(round_: Path) -> None:
    edit(round_ / "one", loss_first=0.5, loss_last=0.5)
    done = edgetailor("aggregate", "global.safetensors", "one", "--out", "new", cwd=round_)
    assert done == Done(
        0,
        "submodel          samples  steps   loss\n"
        "slice:classifier       21     10  0.500\n"
        "global model: new\n",
        "",
    )


def test_aggregate_as_json_and_by_force(round_: Path) -> None:
    (round_ / "new").write_bytes(b"old")
    done = edgetailor(
        "aggregate", "global.safetensors", "one", "--out", "new", "--force", "--json", cwd=round_
    )
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "version": 1,
        "out": "new",
        "updates": [{"submodel": "slice:classifier", "samples": 21}],
    }
    assert (round_ / "new").read_bytes() != b"old"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def another_round(folder: Path) -> None:
    tensors = load_file(folder / "global.safetensors")
    tensors["classifier.bias"] += 1
    save_file(tensors, folder / "global.safetensors")


def another_model(folder: Path) -> None:
    model = GlobalModel({name: torch.from_numpy(a) for name, a in digits_weights().items()})
    (folder / "global.safetensors").write_bytes(model.save())


def passed_off(folder: Path) -> None:
    """An update that claims to be of another model's round."""
    another_model(folder)
    base = fingerprint((folder / "global.safetensors").read_bytes()).sha256
    for name in ("one", "two"):
        edit(folder / name, base=base)


def not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["classifier.bias"] = tensors["classifier.bias"] * np.float32("nan")


def in_place_of_two(folder: Path) -> None:
    shutil.rmtree(folder / "two")
    shutil.move(folder / "two.npz", folder / "two")


REFUSED = {
    "another round": (another_round, r"^one was trained from another global model than global\.s"),
    "another model": (another_model, r"it is of another round\. Aggregate it into the weights"),
    "passed off": (passed_off, r"'classifier\.weight'.* (global model|model's)"),
    "altered": (lambda f: flip_a_bit(f / "two" / TENSORS), r"^two/update\.safetensors is not the "),
    "nan": (lambda f: retensor(f / "one", not_finite), r"'classifier\.bias' .* is not finite"),
    "foreign": (lambda f: retensor(f / "one", dict.clear), r"^one lacks the tensor 'classifier\."),
    "no update": (lambda f: shutil.rmtree(f / "two"), r"^two is no update: update\.json is missi"),
    "a file": (in_place_of_two, r"^two is a file; an update is a folder"),
    "family": (lambda f: edit(f / "one", submodel="no:1"), r"^There is no submodel family 'no'"),
    "version": (lambda f: edit(f / "one", version=2), r"^one/update\.json has version 2"),
    "no samples": (lambda f: edit(f / "one", samples=0), r"^An update of 0 samples has no weight"),
    "no global": (lambda f: (f / "global.safetensors").unlink(), r"^global\.safetensors cannot be"),
    "bad global": (
        lambda f: (f / "global.safetensors").write_text("x"),
        r"^global\.safetensors is not a safetensors file",
    ),
    "out exists": (lambda f: (f / "new").write_bytes(b"old"), r"^new exists already: give another"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_aggregate_refuses(round_: Path, case: str) -> None:
    damage, message = REFUSED[case]
    damage(round_)
    command = ("aggregate", "global.safetensors", "one", "two", "--out", "new")
    assert re.search(message, refused(round_, *command))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("one", "one is a folder: give the name of a file."),
        ("one.npz/new", "one.npz/new cannot be written: one.npz is a file, not a folder."),
    ],
)
def test_aggregate_refuses_places_first(round_: Path, out: str, message: str) -> None:
    command = ("aggregate", "missing.safetensors", "one", "--out", out, "--force")
    assert refused(round_, *command) == message


def test_each_update_counts_once(round_: Path) -> None:
    shutil.copytree(round_ / "one", round_ / "copy")
    command = ("aggregate", "global.safetensors", "one", "two", "copy", "--out", "new")
    assert refused(round_, *command) == "copy is the same update as one: give each once."


def test_aggregate_needs_updates(round_: Path) -> None:
    assert refused(round_, "aggregate", "global.safetensors", "--out", "new") == (
        "Give at least one UPDATE folder, as `edgetailor-agent train` wrote."
    )


# evaluate

SIGNS = """
import torch
from torch import nn


class Sign(nn.Module):
    # (N, 1, 1, 2) -> (N, 2): the logits are the numbers themselves.
    def forward(self, x):
        return x.flatten(1)


def signs():
    return Sign()


def vector():
    return nn.Flatten(0)
"""


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    """A folder with a model whose logits are its inputs, its weights `w` and four samples."""
    (tmp_path / "signs.py").write_text(SIGNS)
    (tmp_path / "w").write_bytes(GlobalModel({}).save())
    x = np.log(np.array([[3, 1], [3, 1], [1, 3], [1, 1.5]], np.float32))
    np.savez(tmp_path / "held.npz", x=x.reshape(4, 1, 1, 2), y=np.array([0, 0, 0, 1]))
    return tmp_path


EVALUATE = ("evaluate", "signs:signs", "--weights", "w", "--input-shape", "1,1,2", "--data")
LOSS = -np.mean(np.log([0.75, 0.75, 0.25, 0.6]))
"""By hand: the logits are logarithms of odds."""


def test_evaluate(signs: Path) -> None:
    done = run("edgetailor", *EVALUATE, "held.npz", cwd=signs)
    assert done == Done(0, f"accuracy 75.0%, loss {LOSS:.4f} on 4 samples\n", "")


def test_evaluate_as_json_and_on_a_single_sample(signs: Path) -> None:
    done = edgetailor(*EVALUATE, "held.npz", "--json", cwd=signs)
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "version": 1, "samples": 4, "accuracy": 0.75, "loss": pytest.approx(LOSS, rel=1e-6),
    }  # fmt: skip
    np.savez(signs / "held.npz", x=np.zeros((1, 1, 1, 2), np.float32), y=np.array([0]))
    done = edgetailor(*EVALUATE, "held.npz", cwd=signs)
    assert done == Done(0, "accuracy 100.0%, loss 0.6931 on 1 sample\n", "")


def test_many_samples_are_judged_in_pieces(signs: Path) -> None:
    order = np.random.default_rng(0)
    x = order.standard_normal((1000, 1, 1, 2), dtype=np.float32)
    np.savez(signs / "held.npz", x=x, y=order.integers(2, size=1000))
    done = edgetailor(*EVALUATE, "held.npz", "--json", cwd=signs)
    with np.load(signs / "held.npz") as file:
        wide, y = file["x"].reshape(1000, 2).astype(np.float64), file["y"]
    losses = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(1000), y]
    found = json.loads(done.stdout)
    assert found["samples"] == 1000
    assert found["accuracy"] == np.mean(wide.argmax(axis=1) == y)
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"y": np.array([0, 1, 2, 0])},
            r"^held\.npz: the label 2 is outside the model's classes 0 ",
        ),
        ({"x": np.zeros((4, 2), np.float32)}, r"^held\.npz: x must be \(n, 1, 1, 2\)"),
        (
            {"x": np.zeros((0, 1, 1, 2), np.float32), "y": np.zeros(0, np.int64)},
            r"^held\.npz holds 0 samples; give some\.",
        ),
    ],
)
def test_data_that_cannot_be_judged(
    signs: Path, change: dict[str, np.ndarray], message: str
) -> None:
    with np.load(signs / "held.npz") as file:
        arrays = {**file, **change}
    np.savez(signs / "held.npz", **arrays)
    assert re.search(message, refused(signs, *EVALUATE, "held.npz"))


def test_models_that_cannot_be_judged(signs: Path) -> None:
    (signs / "digits").write_bytes(from_model(load_model(DIGITS[0])).save())
    shape = ("--input-shape", "3,8,8", "--data", "held.npz")
    assert refused(signs, "evaluate", DIGITS[0], "--weights", "digits", *shape).startswith(
        "The model cannot take samples of shape (3, 8, 8): "
    )
    assert refused(signs, "evaluate", "signs:vector", "--weights", "w", *shape) == (
        "The model must return one tensor of shape (batch, classes)."
    )
    assert refused(signs, "evaluate", "signs:signs", *shape) == "Missing option '--weights'."


# serve

FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "digits.npz"
port = {port}

[[devices]]
name = "desk"
submodel = "{submodel}"
"""


def configure(folder: Path, port: int = 0, submodel: str = "full") -> None:
    np.savez(folder / "digits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    (folder / "fleet.toml").write_text(FLEET.format(port=port, submodel=submodel))


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configure(tmp_path, port)
        assert refused(tmp_path, "serve", "fleet.toml") == (
            f"Port {port} on 127.0.0.1 is in use: stop what uses it or set another `port` in "
            "fleet.toml."
        )


def test_no_configuration(tmp_path: Path) -> None:
    sentence = refused(tmp_path, "serve", "fleet.toml")
    assert sentence == "fleet.toml cannot be read: No such file or directory."


def test_no_held_out_data(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "digits.npz").unlink()
    assert re.search(r"digits\.npz does not exist", refused(tmp_path, "serve", "fleet.toml"))


@pytest.mark.parametrize(
    ("submodel", "message"),
    [
        ("low-rank:", r"`devices\[0\]\.submodel` is 'low-rank:': .* is no submodel spec"),
        ("nope:1", r"There is no submodel family 'nope'"),
        ("slice:nope", r"'slice:nope': the model cannot be cut there"),
    ],
)
def test_a_fleet_that_cannot_be(tmp_path: Path, submodel: str, message: str) -> None:
    configure(tmp_path, submodel=submodel)
    assert re.search(message, refused(tmp_path, "serve", "fleet.toml"))


# the whole way without a server

EXPORTED = r"""cp:2\.0: 510 trained parameters, capacity 1\.33, 712 B of weights
fit of the factors 0\.\d\d, least 0\.\d\d for '\w+\.weight'
signature +operators +graph
personal_init +\d+ +[\d.]+ kB
personal_step +\d+ +[\d.]+ kB
factor_step +\d+ +[\d.]+ kB
predict +\d+ +[\d.]+ kB
predict_local +\d+ +[\d.]+ kB
verified: relative error \d\.\de-\d\d \(tolerance 5e-03, seed \d+\)
  worst tensor: '\S+' of '\w+'
bundle: cp-1
"""


def test_two_rounds_through_files_alone(folder: Path) -> None:
    """Export here, train there, aggregate here, and again; every step in a process of its own."""

    def here(*arguments: str) -> Done:
        done = run("edgetailor", *arguments, cwd=folder)
        assert done.code == 0, done.stderr
        return done

    def there(bundle: str, seed: int) -> Done:
        data = write_data(folder / f"{bundle}.npz", seed=seed)
        out = bundle.replace("-", "-update-")
        done = run("edgetailor-agent", "train", bundle, "--data", data, "--out", out, cwd=folder)
        assert done.code == 0, done.stderr
        return done

    first = here(
        "export", *TINY, "--submodel", "cp:2.0", "--out", "cp-1", "--save-weights", "global-0"
    )
    assert re.fullmatch(EXPORTED, first.stdout), first.stdout
    assert max(map(len, first.stdout.splitlines())) <= 80
    assert [line[11:] for line in first.stderr.splitlines()] == [
        "loading the model", "splitting cp:2.0", "factorizing the weights",
        "lowering personal_init",
        "lowering personal_step", "lowering factor_step", "lowering predict",
        "lowering predict_local",
        "verifying against PyTorch",
    ]  # fmt: skip
    here(
        "export",
        *TINY,
        "--submodel",
        "slice:classifier",
        "--out",
        "slice-1",
        "--weights",
        "global-0",
    )
    there("cp-1", seed=1)
    there("slice-1", seed=2)
    here("aggregate", "global-0", "cp-update-1", "slice-update-1", "--out", "global-1")
    before, after = load_file(folder / "global-0"), load_file(folder / "global-1")
    kept = {name: array for name, array in after.items() if name.startswith("kept|")}
    assert set(kept) == {
        f"kept|cp:2.0|{name}#{mode}"
        for name, modes in {"conv.weight": 4, "classifier.weight": 2}.items()
        for mode in range(modes)
    }
    assert after.keys() - kept.keys() == before.keys()
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    assert unchanged == {"bn.num_batches_tracked"}

    here("inspect", *TINY, "--weights", "global-1")  # the model takes it
    here("export", *TINY, "--submodel", "cp:2.0", "--out", "cp-2", "--weights", "global-1")
    sent = load_file(folder / "cp-2" / "weights.safetensors")
    for name, factor in kept.items():
        np.testing.assert_array_equal(sent[name.removeprefix("kept|cp:2.0|")], factor)
    there("cp-2", seed=1)
    late = ("aggregate", "global-1", "cp-update-2", "cp-update-1", "--out", "global-2")
    assert "cp-update-1 was trained from another global model" in refused(folder, *late)
    here("aggregate", "global-1", "cp-update-2", "--out", "global-2")
    assert load_file(folder / "global-2").keys() == after.keys()
    x, _ = samples(2, seed=3)
    assert len({outputs(folder, name, x) for name in ("global-0", "global-1", "global-2")}) == 3


def outputs(folder: Path, weights: str, x: np.ndarray) -> bytes:
    """What the model of `weights` makes of `x`."""
    namespace: dict[str, Callable[[], torch.nn.Module]] = {}
    exec(NETS, namespace)
    model = namespace["tiny"]().eval()
    state = load_file(folder / weights)
    model.load_state_dict({n: torch.from_numpy(state[n]) for n in model.state_dict()})
    with torch.no_grad():
        return bytes(model(torch.from_numpy(x)).numpy().tobytes())
