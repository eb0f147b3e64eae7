"""`edgetailor inspect`: its tables, the places to cut, and both as JSON."""

import json
import re
from pathlib import Path

import pytest

from bundles import everything
from command_models import DIGITS
from commands import edgetailor, stages
from profiles.text_formatting import format_capacity
from toolkit.terminal_output import filled

RESNET20 = (
    "inspect", "toolkit.models:resnet20", "--input-shape", "3,32,32", "--batch", "32",
    "--submodel", "full", "--submodel", "slice:blocks.3",
)  # fmt: skip
TABLE = """\
submodel         params  activations       MACs  capacity  weights
full            272,762    6,947,136  1,314.4 M      1.00   1.1 MB
slice:blocks.3  257,994    2,752,832    838.9 M      0.42   1.1 MB
activations and MACs for a batch of 32
a sample: 3,32,32 float32; its output: 10

slice:blocks.3
layer                    form    why
ahead of blocks.3.conv1  frozen  2 stages of the multi-step forward pass
"""


LOADING = ["loading PyTorch", "loading the model", "recording the model"]


def test_inspect_prints_table_1_of_embracing_fl(tmp_path: Path) -> None:
    done = edgetailor(*RESNET20, cwd=tmp_path)
    assert (done.code, done.stdout) == (0, TABLE)
    assert stages(done) == [*LOADING, "splitting full", "splitting slice:blocks.3"]
    assert everything(tmp_path) == {}


@pytest.mark.long
def test_inspect_gives_the_same_as_json(tmp_path: Path) -> None:
    done = edgetailor(*RESNET20, "--submodel", "slice:blocks.6", "--json", cwd=tmp_path).succeeded()
    assert stages(done)[-1] == "splitting slice:blocks.6"
    document = json.loads(done.stdout)
    assert document["version"] == 1
    assert document["sample"] == {"shape": [3, 32, 32], "dtype": "float32", "below": None}
    assert document["output"] == [10]
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
a sample: 1,8,8 float32; its output: 10

cut ahead of  params  activations  capacity  recorded
units.0.bn    33,194      115,008      0.82     1,024
units.1.conv  33,162      115,008      0.82     1,024
units.1.bn    28,554       49,472      0.43     2,048
units.2.conv  28,490       49,472      0.43     2,048
units.2.bn    19,274       33,088      0.29       512
units.3.conv  19,210       33,088      0.29       512
units.3.bn       778          320      0.01     1,024
classifier       650          320      0.01        64
recorded: numbers that the device stores on disk for each sample
"""
NOWHERE = """\
submodel  params  activations   MACs  capacity  weights
full          10           64  0.3 k      1.00     40 B
activations and MACs for a batch of 32
a sample: 4 float32; its output: 2

This model can be cut at no place: a cut needs parameters on both sides, and
activations with an axis for the samples.
"""


def test_inspect_lists_the_places_to_cut(tmp_path: Path) -> None:
    done = edgetailor("inspect", *DIGITS, "--cut-points", cwd=tmp_path).succeeded()
    assert stages(done) == [*LOADING, "splitting full", "looking for places to cut"]
    assert [line.rstrip() for line in done.stdout.splitlines()] == CUT_POINTS.splitlines()


def test_the_places_to_cut_as_json(tmp_path: Path) -> None:
    done = edgetailor("inspect", *DIGITS, "--cut-points", "--json", cwd=tmp_path)
    places = json.loads(done.stdout)["cut_points"]
    assert [place["module"] for place in places] == [
        line.split()[0] for line in CUT_POINTS.splitlines()[6:-1]
    ]
    capacity = (28_490 + 49_472) / (33_338 + 147_776)
    assert places[3] == {
        "module": "units.2.conv", "params": 28_490, "activations": 49_472, "capacity": capacity,
        "recorded": 32 * 8 * 8,
    }  # fmt: skip
    without = edgetailor("inspect", *DIGITS, "--json", cwd=tmp_path)
    assert "cut_points" not in json.loads(without.stdout)


def test_a_model_that_can_be_cut_nowhere(folder: Path) -> None:
    done = edgetailor("inspect", "nets:alone", "--input-shape", "4", "--cut-points", cwd=folder)
    assert done.code == 0
    assert stages(done)[-1] == "looking for places to cut"
    assert [line.rstrip() for line in done.stdout.splitlines()] == NOWHERE.splitlines()


WORDS = """\
submodel             params  activations     MACs  capacity  weights
width:0.5               389       11,616   46.7 k      0.49   1.6 kB
low-rank:0.5,keep=0     991       23,136  191.2 k      0.99   4.0 kB
activations and MACs for a batch of 32
a sample: 6 int64 below 20; its output: 3
not possible: 'low-rank:0.5': no layer of this model gets smaller; embedding:
Embedding has no factorized form; lstm: the first layer; classifier: the
classifier. With keep=0 lstm would get smaller.
not possible: 'tiny:1': Unknown family 'tiny'. Use one of cp:RATE, depth:RATIO,
full, low-rank:RATIO, pfedme, slice:CAPACITY or slice:MODULE, width:RATIO.

width:0.5
layer       form                             why
embedding   4 of 8 channels out
lstm        4 of 8 channels in, 6 of 12 out
classifier  6 of 12 channels in, 3 of 3 out

low-rank:0.5,keep=0
layer       form    why
embedding   dense   Embedding has no factorized form
lstm        rank 6
classifier  dense   the classifier

cut ahead of  params  activations  capacity  recorded
lstm           1,095       23,136      0.99        48
classifier        39           96      0.01        12
recorded: numbers that the device stores on disk for each sample
This model can be cut at two places: a cut needs parameters on both sides, and
activations with an axis for the samples.
"""


def test_what_is_not_possible_leaves_the_rest_of_the_table(folder: Path) -> None:
    specs = ("low-rank:0.5", "width:0.5", "tiny:1", "low-rank:0.5,keep=0")
    arguments = (
        "inspect", "nets:Words", "--input-shape", "6", "--cut-points",
        *(word for spec in specs for word in ("--submodel", spec)),
    )  # fmt: skip
    done = edgetailor(*arguments, cwd=folder)
    assert done.code == 2
    assert stages(done)[-1] == "looking for places to cut"
    assert [line.rstrip() for line in done.stdout.splitlines()] == WORDS.splitlines()
    as_json = edgetailor(*arguments, "--json", cwd=folder)
    document = json.loads(as_json.stdout)
    assert as_json.code == 2
    assert stages(as_json) == stages(done)
    assert [entry["submodel"] for entry in document["submodels"]] == list(specs)
    errors = [entry.get("error", "").partition(";")[0] for entry in document["submodels"]]
    assert errors == [
        "'low-rank:0.5': no layer of this model gets smaller", "",
        "Unknown family 'tiny'. Use one of cp:RATE, depth:RATIO, full, low-rank:RATIO, pfedme, "
        "slice:CAPACITY or slice:MODULE, width:RATIO.",
        "",
    ]  # fmt: skip
    codes = [entry.get("code") for entry in document["submodels"]]
    assert codes[1::2] == [None, None]
    assert codes[2] == "spec.unknown-family"
    assert len(document["cut_points"]) == 2


def test_a_submodel_that_saves_little_is_noted(folder: Path) -> None:
    specs = (
        "low-rank:0.25",
        "low-rank:1",
        "width:0.99",
        "width:0.5",
        "slice:4",
        "cp:2.0",
        "pfedme",
    )
    done = edgetailor(
        "inspect", "nets:separable", "--input-shape", "1,8,8",
        *(word for spec in specs for word in ("--submodel", spec)), cwd=folder,
    ).succeeded()  # fmt: skip
    assert not re.search(r"^note: .* $", done.stdout, re.M)
    said = " ".join(done.stdout.split())
    # Of 3 x 3 kernels in 80 groups, 9 numbers become 6; factors add as many outputs as they read.
    params = 10 * 16 + 10 * 16 + 17 * 64 + 10 * 64 + 65 * 128 + 129 * 3
    outputs = 64 * (16 + 16 + 64 + 64 + 128) + 3
    macs = 64 * (9 * 16 + 9 * 16 + 16 * 64 + 9 * 64 + 64 * 128) + 128 * 3
    load = 1 + (32 * 64 * 80 - 3 * 80) / (params + 32 * outputs)
    assert re.findall(r"note: (.*?\w)\. ", said) == [
        f"low-rank:0.25 saves {3 * 80 / params:.0%} of the weights and "
        f"{64 * 3 * 80 / macs:.0%} of the MACs at capacity {load:.2f}; width or slice may "
        "suit this model better",
        "width:0.99 saves 1% of the weights and 1% of the MACs at capacity 1.00; a smaller ratio "
        "saves more",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "1.00"), (0.0061, "0.01"), (0.0049, "0.0049"), (0.00123, "0.0012"), (1e-6, "0.0000010")],
)
def test_no_capacity_reads_as_zero(value: float, words: str) -> None:
    assert format_capacity(value) == words


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


def test_names_are_not_broken_between_lines() -> None:
    assert filled("use slice or low-rank", 17, indent="  ") == "use slice or\n  low-rank"


def test_inspect_refuses_what_only_the_other_format_has(tmp_path: Path) -> None:
    asked = ("inspect", "constructs:Unpooled", "--input-shape", "6")
    assert edgetailor(*asked, cwd=tmp_path).code == 0
    refused = edgetailor(*asked, "--format", "tflite", cwd=tmp_path)
    reason = "the indices of max pooling, which max unpooling reads. Export with --format onnx"
    assert reason in refused.stderr.replace("\n", " ")
    assert "constructs.py, line" in refused.stderr
    exported = edgetailor(
        "export", *asked[1:], "--format", "tflite", "--out", "bundle", cwd=tmp_path
    )
    assert (refused.code, exported.code) == (3, 3)
    assert exported.stderr.splitlines()[-1] == refused.stderr.splitlines()[-1]
