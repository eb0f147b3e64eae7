"""`edgetailor plan` in processes of its own, on a device whose rates are made up."""

import datetime
import json
import shlex
from pathlib import Path

import msgspec
import pytest

from command_models import NETS, TINY
from commands import Done, edgetailor, stages
from made_calibration import DEVICE
from toolkit.cli.printed.plan_table import distinct

LOADING = ["loading PyTorch", "loading the model", "recording the model"]
SPECS = ("full", "width:0.5", "slice:classifier", "low-rank:0.5")
CHOSEN = f"""\
made-up: 88.0 MB of memory, 0.400 ms a step
submodel          strength        memory            step    sent
full                  1.00     >=84.8 MB      >=0.571 ms  2.8 kB
slice:classifier      0.85  84.4-85.0 MB  0.230-0.345 ms  2.6 kB
memory and step: predicted - upper bound; the budget must allow the upper bound.
  memory: peak of the agent's process. step: one batch. sent: both ways in a
  round
>=: estimated without an export; the upper bound is at least this

slice:classifier: chosen
over step-time by estimate: full
not needed, because weaker than slice:classifier: low-rank:0.5, width:0.5
note: the runtime's memory could not be measured: it is assumed as on x86-64
next: edgetailor export {" ".join(TINY)} --submodel slice:classifier --out bundle
"""
WEAKEST = """\
submodel          strength        memory            step    sent
full                  1.00     >=84.8 MB      >=0.571 ms  2.8 kB
slice:classifier      0.85     >=84.7 MB      >=0.330 ms  2.6 kB
width:0.5             0.50  84.8-85.5 MB  0.401-0.601 ms  1.4 kB
"""
IMPOSSIBLE = """\
low-rank:0.5: not possible: no layer of this model gets smaller; conv: the first
  layer; classifier: the classifier. With keep=0 conv would get smaller.
"""
NOTHING = """\
Error: No submodel fits made-up. width:0.5 comes nearest; memory: over by 31.5 MB (would fit \
with --memory 85.6MB).
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a device's profile and a cache of its own."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "nets.py").write_text(NETS)
    today = datetime.date.today().isoformat()
    device = msgspec.structs.replace(DEVICE, date=today)
    (folder / "device.json").write_bytes(msgspec.json.encode(device))
    return folder


def plan(desk: Path, *budgets: str, specs: tuple[str, ...] = SPECS) -> Done:
    chosen = [word for spec in specs for word in ("--submodel", spec)]
    profile = ("--profile", "device.json")
    cache = {"EDGETAILOR_CACHE": str(desk / "cache")}
    return edgetailor("plan", *TINY, *profile, *chosen, *budgets, cwd=desk, **cache)


def test_the_strongest_that_fits_is_chosen(desk: Path) -> None:
    done = plan(desk, "--memory", "88MB", "--step-time", "0.0004")
    assert (done.code, done.stdout) == (0, CHOSEN)
    *looked, last = [line.partition("] ")[2] for line in done.stderr.splitlines()]
    assert looked[:3] == LOADING
    assert looked[3].startswith("results are kept in")
    assert looked[4:] == ["estimating full", "estimating slice:classifier"]
    assert last == "exporting slice:classifier, seconds to a minute"
    # The cache keeps estimates and results, also for another learning rate.
    for options in ((), ("--learning-rate", "1", "--epochs", "3")):
        again = plan(desk, "--memory", "88MB", "--step-time", "0.0004", *options)
        assert again.stdout.splitlines()[:-1] == CHOSEN.splitlines()[:-1]
        assert stages(again) == LOADING


def test_a_budget_that_decides_nothing_is_named(desk: Path) -> None:
    done = plan(desk, "--memory", "200MB", "--no-cache").succeeded()
    skipped = "slice:classifier, low-rank:0.5, width:0.5"
    assert f"full: chosen\nnot needed, because weaker than full: {skipped}\n" in done.stdout
    assert "note: the budgets decide nothing: without them, full would be chosen, too" in (
        done.stdout
    )


def test_impossible_submodels_are_named_where_they_would_be_next(desk: Path) -> None:
    done = plan(desk, "--memory", "88MB", "--bandwidth", "2kB", "--no-cache").succeeded()
    assert WEAKEST in done.stdout
    assert IMPOSSIBLE in done.stdout


@pytest.mark.long
def test_what_is_planned_is_what_is_exported(desk: Path) -> None:
    """Adam keeps two tensors a parameter and its count, SGD with momentum one; here SGD none."""
    found = {}
    for options in ("--momentum 0.0", "", "--optimizer adam --weight-decay 0.1 --masked"):
        words = ("--memory", "200MB", *options.split())
        done = plan(desk, *words, "--json", specs=("full",))
        (one,) = json.loads(done.stdout)["candidates"]
        found[options] = one["memory_bytes"]
        said = plan(desk, *words, specs=("full",)).stdout.splitlines()[-1]
        command = ["edgetailor", "export", *TINY, *options.split()]
        assert sorted(shlex.split(said)) == sorted(
            ["next:", *command, "--submodel", "full", "--out", "bundle"]
        )
    plain, momentum, adam = found.values()
    numbers = 36 + 4 + 4 + 36 * 8 + 8
    # In and out of a step: each tensor more is twice in memory; a node more is 5300 bytes.
    assert momentum - plain >= 2 * 4 * numbers
    assert adam - momentum >= 2 * 4 * numbers


def test_step_times_have_units(desk: Path) -> None:
    same = [
        plan(desk, "--memory", "200MB", "--step-time", time, "--json", specs=("full",)).stdout
        for time in ("0.0005", "0.5 MS")
    ]
    assert len(set(same)) == 1
    assert json.loads(same[0])["budgets"]["step_s"] == 0.0005


def test_where_nothing_fits(desk: Path) -> None:
    done = plan(desk, "--memory", "54MB", "--no-cache", specs=SPECS[:3])
    assert done.code == 5
    assert done.stderr.endswith(NOTHING)
    assert "over memory by estimate: full, slice:classifier" in done.stdout
    assert "note: memory: every candidate needs at least 84." in done.stdout


def test_json(desk: Path) -> None:
    done = plan(
        desk, "--memory", "88MB", "--bandwidth", "2kB", "--json", "--no-cache", specs=SPECS[:3]
    )
    document = json.loads(done.stdout)
    assert done.code == 0
    assert (document["version"], document["chosen"]) == (2, "width:0.5")
    assert document["budgets"] == {
        "memory_bytes": 88_000_000, "step_s": None, "traffic_bytes": 2000,
    }  # fmt: skip
    width = document["candidates"][-1]
    assert (width["submodel"], width["binding"], width["fits"]) == ("width:0.5", None, True)
    [full, *_] = document["not_computed"]
    assert (full["submodel"], full["strength_at_most"]) == ("full", 1)
    # 36 + 4 + 4 + 36 * 8 + 8 parameters and 8 statistics of 4 bytes, both ways.
    assert full["traffic_bytes"] == 2 * 4 * (36 + 8 + 8 + 36 * 8 + 8)
    assert full["exceeded"] == [{"budget": "bandwidth", "over_at_least": 784}]


def test_strengths_that_differ_read_differently() -> None:
    strengths = [1.0, 0.99977, 0.5, 0.25, 0.0123, 0.0118, 0.0004]
    assert [distinct(one, strengths) for one in strengths] == [
        "1.00", "0.9998", "0.50", "0.25", "0.0123", "0.0118", "0.0004",
    ]  # fmt: skip
    assert distinct(0.5, [0.5, 0.5]) == "0.50"
    assert distinct(1 / 3, [1 / 3 + 1e-9]) == "0.333333"


def test_a_stale_profile_is_doubted(desk: Path) -> None:
    long_ago = datetime.date.today() - datetime.timedelta(days=400)
    old = msgspec.structs.replace(DEVICE, date=long_ago.isoformat())
    (desk / "device.json").write_bytes(msgspec.json.encode(old))
    done = plan(desk, specs=("full",)).succeeded()
    said = " ".join(done.stdout.split())
    assert "stale: the profile is 400 days old, over the limit of 90 days" in said
    assert "memory budget: 50% of all memory; the available memory is not known" in said


def test_built_in_profiles_are_listed(tmp_path: Path) -> None:
    done = edgetailor("plan", "--list-profiles", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.code, done.stderr, len(lines)) == (0, "", 13)
    assert lines[-2] == (
        "x86-mini-pc            x86 mini PC (Beelink S12 Pro)            17.2 GB        4"
    )


def test_built_in_profiles_as_json(tmp_path: Path) -> None:
    done = edgetailor("plan", "--list-profiles", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (done.code, done.stderr, len(document["profiles"])) == (0, "", 11)
    assert document["profiles"][-1] == {
        "name": "x86-mini-pc", "title": "x86 mini PC (Beelink S12 Pro)",
        "memory_bytes": 17_179_869_184, "cores": 4, "measured": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile", "toaster"), "Error: There is no device profile 'toaster'. Give a file"),
        (
            ("--profile", "android-low", "--memory", "256"),
            "Error: Invalid value for '--memory': Invalid size '256': write a number and a unit",
        ),
        (("--profile", "android-low", "--step-time", "0"), "0.0 is not in the range x>0"),
        (("--profile", "android-low", "--step-time", "5h"), "Invalid time '"),
        (("--profile", "android-low", "--step-time", "nan"), "Invalid time '"),
        (("--profile", "android-low", "--momentum", "2"), "momentum must be below 1; it is 2.0."),
        (
            ("--profile", "android-low", "--submodel", "slices"),
            "Unknown family 'slices': did you mean ",
        ),
    ],
)
def test_refusals(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    done = edgetailor("plan", *TINY, *options, cwd=tmp_path)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
