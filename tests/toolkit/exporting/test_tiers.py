"""Families of bundles: several submodels of one model in one go."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from bundles import everything
from command_models import TINY
from commands import edgetailor, refused
from device_agent.formats.bundle import open_bundle
from exporters.verification.verdict import Verdict
from profiles.errors import ExportError, InputError, SpecError, VerificationError
from refusals import refused as refused_by
from toolkit.cli.printed.export_table import explain_repeated, explain_unknown, show_tiers
from toolkit.exporting.model_export import Exported, SignatureCost
from toolkit.exporting.tier_files import read_tiers, tiers_of
from toolkit.exporting.tiers import TierResult, exit_code
from toolkit.inspection import Inspection
from toolkit.toml_files import Tier

TIERS = """
[[tiers]]
name = "desktop"
submodel = "full"

[[tiers]]
name = "board"
submodel = "slice:0.01"

[[tiers]]
name = "phone"
submodel = "slice:classifier"
"""
TABLE = r"""bundle   submodel          params  peak memory     size    error
desktop  full                 340 +[\d.]+ MB +[\d.]+ kB  \d\.\de-\d\d
board    slice:0\.01 +failed
phone    slice:classifier     296 +[\d.]+ MB +[\d.]+ kB  \d\.\de-\d\d
peak memory: predicted, of the whole training, above the idle agent
error: relative, against PyTorch in float64; the one nearest to its limit
board: 'slice:0\.01': the smallest slice of this model has capacity 0\.636\. Allow
  at least that\.
"""


def test_a_family_of_bundles_of_which_one_fails(folder: Path) -> None:
    (folder / "tiers.toml").write_text(TIERS)
    done = edgetailor(
        "export", *TINY, "--tiers", "tiers.toml", "--out", "family",
        "--save-weights", "global", "--no-cache", cwd=folder,
    )  # fmt: skip
    assert done.code == 2
    assert re.fullmatch(TABLE, done.stdout), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [line[11:] for line in done.stderr.splitlines()] == [
        "loading PyTorch",
        "loading the model",
        "desktop: splitting full",
        *(f"desktop: lowering {name}" for name in ("train", "predict", "evaluate")),
        "desktop: verifying against PyTorch",
        "board: splitting slice:0.01",
        "board: failed",
        "phone: splitting slice:classifier",
        *(f"phone: lowering {n}" for n in ("forward_0", "train", "predict", "evaluate")),
        "phone: verifying against PyTorch",
    ]
    assert sorted(path.name for path in (folder / "family").iterdir()) == ["desktop", "phone"]
    bundles = [open_bundle(folder / "family" / name) for name in ("desktop", "phone")]
    assert [b.manifest.submodel for b in bundles] == ["full", "slice:classifier"]
    assert bundles[0].manifest.base == bundles[1].manifest.base
    assert "classifier.weight" in load_file(folder / "global")


def test_several_submodels_as_json(folder: Path) -> None:
    specs = ("--submodel", "slice:classifier", "--submodel", "slice:9")
    arguments = ("export", *TINY, *specs, "--out", "f", "--no-verify", "--json")
    done = edgetailor(*arguments, cwd=folder)
    assert done.code == 2
    document = json.loads(done.stdout)
    first, second = document["bundles"]
    assert document["version"] == 1
    assert (first["name"], second["name"]) == ("slice-classifier", "slice-9")
    assert first["bundle_bytes"] == sum(
        len(data) for data in everything(folder / "f" / "slice-classifier").values()
    )
    (train,) = [s for s in first["signatures"] if s["name"] == "train"]
    # The classifier on 4 samples, forward and the gradient of its weight: 36 x 8 each.
    assert train["macs"] == 2 * 4 * 36 * 8
    assert second == {
        "name": "slice-9",
        "submodel": "slice:9",
        "error": "Invalid size in 'slice:9': the capacity must be a number above 0 and at most 1, "
        "for example slice:0.42.",
        "code": "spec.invalid-size",
        "exit_code": 2,
    }


def test_a_dry_run_of_several(folder: Path) -> None:
    specs = ("--submodel", "full", "--submodel", "slice:classifier")
    done = edgetailor("export", *TINY, *specs, "--out", "f", "--dry-run", cwd=folder).succeeded()
    assert done.stdout == (
        "bundle            submodel          params  weights\n"
        "full              full                 340   1.4 kB\n"
        "slice-classifier  slice:classifier     296   1.4 kB\n"
        "dry run: nothing was written\n"
    )
    assert not (folder / "f").exists()


def test_an_unknown_peak_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown = (SignatureCost("a", 1, 1, 1, peak, 0.0) for peak in (7, None))
    explain_unknown([known])
    assert capsys.readouterr().out == ""
    explain_unknown([known, unknown])
    assert "edgetailor-agent profile" in capsys.readouterr().out


def test_it_is_said_what_is_computed_again(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"predict": 0.0, "unknown": None, "train": 0.001, "local_step": 0.114}
    explain_repeated([SignatureCost(name, 1, 1, 1, 7, share) for name, share in shares.items()])
    end = "of its work again to save memory; recompute=no turns this off"
    assert capsys.readouterr().out.splitlines() == [
        f"train computes less than 1% {end}",
        f"local_step computes 11% {end}",
    ]


def test_an_earlier_verdict_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(error=1.25e-7, signature="train", output="loss", seed=1, tolerance=1e-5)
    sizes = Inspection("full", 340, 1, 1, 1360, 1, 1.0, ())
    made = Exported(Path("b"), sizes, "0" * 64, 9000, (), (2_500_000, "train"), verdict)
    tiers = (Tier(name=name, submodel="full") for name in ("desktop", "phone"))
    show_tiers(
        [TierResult(tier, replace(made, verified_earlier=tier.name == "phone")) for tier in tiers]
    )
    assert capsys.readouterr().out == (
        "bundle   submodel  params  peak memory    size    error\n"
        "desktop  full         340       2.5 MB  9.0 kB  1.2e-07\n"
        "phone    full         340       2.5 MB  9.0 kB  1.2e-07\n"
        "error: relative, against PyTorch in float64; the one nearest to its limit\n"
        "error of phone: from an earlier export of the same graphs; --verify compares\n"
        "  them again\n"
    )


def test_the_exit_code_is_the_worst() -> None:
    (tier,) = tiers_of(["full"])
    errors = [None, SpecError(""), VerificationError(""), ExportError("")]
    results = [TierResult(tier, error=error) for error in errors]
    assert [exit_code(results[:count]) for count in range(5)] == [0, 0, 2, 4, 4]


def test_submodels_name_their_folders() -> None:
    specs = ["low-rank:0.25,keep=3", "slice:blocks.3", "slice:0.42+low-rank:0.25"]
    assert [tier.name for tier in tiers_of(specs)] == [
        "low-rank-0.25-keep-3", "slice-blocks.3", "slice-0.42-low-rank-0.25",
    ]  # fmt: skip
    with refused_by("option.repeated-submodel", folders=["full"]):
        tiers_of(["full", "full"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"desktop"', '"Desk top"', r"`tiers\[0\]\.name` is 'Desk top': String should match"),
        ('"board"', '"phone"', "tiers are named twice: phone; give each its own name"),
        ('"full"', '"half"', r"`tiers\[0\]\.submodel` is 'half': Unknown family 'half'"),
        (
            "submodel",
            "model",
            r"`tiers\[0\]\.model`: did you mean 'submodel'\? The keys here are name, submodel\.$",
        ),
        ("[[tiers]]", "[[devices]]", "unknown key `devices`. The keys here are tiers"),
        ("[[tiers]]", "tiers = ", "is not a TOML file"),
        (TIERS, "tiers = 3", r"`tiers` is 3; it must be a list of one or more\.$"),
        (TIERS, "tiers = []", r"`tiers` is \[\]; it must be a list of one or more\.$"),
        (TIERS, "tiers = [true]", r"`tiers\[0\]` is true; it must be a table\.$"),
        (TIERS, "[tiers]\na = 1", r"`tiers` is a table; it must be a list of one or more\.$"),
        ('"desktop"', "2026-01-01", r"name` is 2026-01-01; it must be a string in quotes\.$"),
        ('"desktop"', str([1] * 99), r"is \[(1, ){26}1\.\.\.; it must be a string in quotes\.$"),
    ],
)
def test_mistakes_in_a_file_of_tiers(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS.replace(before, after, 1))
    with pytest.raises(InputError, match=message) as error:
        read_tiers(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiers", "none.toml"], r"^none\.toml cannot be read: No such file or directory"),
        (["--tiers", "t", "--submodel", "full"], "^Give --submodel or --tiers, not both"),
        (["--submodel", "full", "--submodel", "full"], "^Several submodels would be written to"),
        (
            ["--submodel", "full", "--submodel", "cp:2.0"],
            r"^family/cp-2\.0 exists already: give another place, or --force",
        ),
    ],
)
def test_families_that_cannot_be(folder: Path, arguments: list[str], message: str) -> None:
    """The refusal comes before the search for the model, which does not exist."""
    (folder / "family" / "cp-2.0").mkdir(parents=True)
    options = ("nets:nothing", "--input-shape", "1", "--out", "family", *arguments)
    assert re.search(message, refused(folder, "export", *options))
