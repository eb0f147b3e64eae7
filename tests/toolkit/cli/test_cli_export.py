"""`edgetailor export`: what it refuses, and that nothing is left behind then."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bundles import everything
from command_models import DIGITS, TINY
from commands import STAGE, edgetailor, refused
from device_agent.formats.bundle import open_bundle
from exporters.programs.operator_support import SUPPORTED, UNSUPPORTED


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
        (
            ["--out", "b", "--learning-rate", "nan"],
            r"^learning_rate must be a number of at least 0",
        ),
        (["--out", "b", "--momentum", "1"], r"^momentum must be below 1; it is 1\.0"),
        (["--out", "b", "--masked", "--loss", "mse"], r"^masked sets the logits of absent"),
        (["--out", "b", "--weight-decay", "-1"], r"^weight_decay must be a number of at least 0"),
        (["--out", "b", "--format", "pickle"], r"'pickle' is not one of 'onnx', 'tflite'"),
        (
            ["--out", "b", "--submodel", "slice:9"],
            r"^Invalid size in 'slice:9': the capacity must be a number",
        ),
        ([], r"^Missing option '--out'"),
    ],
)
def test_exports_that_cannot_be(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "there").mkdir()
    assert re.search(message, refused(folder, "export", *TINY, *arguments))


IS_FOLDER = "there is a folder: give the name of a file."
OUTSIDE = "inside the bundle {}: choose a file outside it."


@pytest.mark.parametrize(
    ("out", "saved", "message"),
    [
        ("b", "b", f"The weights cannot be saved as b, {OUTSIDE.format('b')}"),
        ("b", "b/w", f"The weights cannot be saved as b/w, {OUTSIDE.format('b')}"),
        ("there", "b/../there/w",
         f"The weights cannot be saved as b/../there/w, {OUTSIDE.format('there')}"),
        ("w/b", "w", "The bundle cannot be written to w/b, because w is the file for the weights. "
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
    """The refusal comes before the search for the model, which does not exist."""
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


@pytest.mark.parametrize(
    "options", [("--list-operators", "--json"), ("--json", "--list-operators")]
)
def test_operators_as_json(tmp_path: Path, options: tuple[str, str]) -> None:
    done = edgetailor("export", *options, cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"version", "operators", "not_covered"}
    assert document["version"] == 1
    assert [one["name"] for one in document["operators"]] == [group.name for group in SUPPORTED]
    assert [one["name"] for one in document["not_covered"]] == [row.name for row in UNSUPPORTED]
    assert {
        "name": "bicubic, reflecting and 3-D grid sampling",
        "aten_prefixes": ["grid_sampler", "affine_grid"],
        "reason": "no gradient", "instead": 'mode="bilinear" and padding_mode="zeros"',
    } in document["not_covered"]  # fmt: skip


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


def test_a_masked_loss_is_asked_for_by_an_option(folder: Path) -> None:
    """`classes` says which a device has; the manifest's ports are what an agent follows."""
    for name, options in (("plain", ()), ("masked", ("--masked",))):
        out = ("--submodel", "slice:classifier", "--out", name, "--no-verify")
        assert edgetailor("export", *TINY, *out, *options, cwd=folder).code == 0
    kinds = {
        name: {port.kind for port in open_bundle(folder / name).manifest.signatures["train"].inputs}
        for name in ("plain", "masked")
    }
    assert kinds["masked"] - kinds["plain"] == {"classes"}


def test_it_says_how_much_is_computed_again(folder: Path) -> None:
    digits = (*DIGITS, "--no-verify", "--submodel")
    shown = edgetailor("export", *digits, "full,recompute=yes", "--out", "yes", cwd=folder).stdout
    line = r"^train computes (\d+)% of its work again to save memory; recompute=no turns this off$"
    [percent] = re.findall(line, shown, re.MULTILINE)
    told = []
    for out, spec in (("a", "full,recompute=yes"), ("b", "full,recompute=no")):
        done = edgetailor("export", *digits, spec, "--out", out, "--json", cwd=folder)
        told.append({s["name"]: s["computed_again"] for s in json.loads(done.stdout)["signatures"]})
    yes, no = told
    assert 0 < yes["train"] < 0.3
    assert f"{yes.pop('train'):.0%}" == f"{percent}%"
    assert set(yes.values()) == set(no.values()) == {0}


REUSED = r"""slice:classifier: 296 trained parameters, capacity 0\.64, 1\.4 kB of weights
signature +operators +MACs +graph +peak memory
(?:(?:forward_0|train|predict|evaluate) .*\n){4}for a batch of 4; .*
training: .*
graphs: reused from the cache
verified: relative error \d\.\de-\d\d \(tolerance \de-\d\d, seed \d+\)
  worst (?:tensor|operator): .*(?:\n  (?!from).*)?
(?P<earlier>  from an earlier export of the same graphs; --verify compares them again
)?bundle: (?:second|third)
"""


@pytest.mark.long
def test_a_verdict_of_an_earlier_export_is_said_to_be_one(folder: Path) -> None:
    sliced = (*TINY, "--submodel", "slice:classifier")
    assert edgetailor("export", *sliced, "--out", "first", cwd=folder).code == 0
    for out, options, earlier in (("second", (), True), ("third", ("--verify",), False)):
        done = edgetailor("export", *sliced, "--out", out, *options, cwd=folder)
        found = re.fullmatch(REUSED, done.stdout)
        assert found, done.stdout
        assert (found["earlier"] is not None) == earlier
        assert max(map(len, done.stdout.splitlines())) <= 80


NOISY_LIBRARY = """
import logging, warnings
LOG = logging.getLogger(__name__)
LOG.addHandler(logging.StreamHandler())

def talk():
    LOG.warning("of a library")
    warnings.warn("of a library")
"""
NOISY_MODEL = """
import logging, sys, warnings
sys.path.append("site-packages")
import noisy
from nets import tiny
logging.basicConfig(level=logging.INFO, format="%(message)s")

def net():
    noisy.talk()
    logging.getLogger(__name__).info("of the user's model")
    warnings.warn("of the user's model")
    return tiny()
"""


def test_what_other_libraries_say_is_not_shown(folder: Path) -> None:
    """Also where the user's model lets every library write to the terminal."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "noisy.py").write_text(NOISY_LIBRARY)
    (folder / "own.py").write_text(NOISY_MODEL)
    done = edgetailor("export", "own:net", *TINY[1:], "--out", "b", "--no-cache", cwd=folder)
    others = [line for line in done.stderr.splitlines() if not STAGE.match(line)]
    assert [others[0], others[1].partition(": ")[2], others[2:]] == [
        "of the user's model",
        "UserWarning: of the user's model",
        ['  warnings.warn("of the user\'s model")'],
    ]
