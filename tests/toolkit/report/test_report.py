"""`edgetailor report`: what is drawn, the page and the picture, and the command."""

import io
import json
import re
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import msgspec
import numpy as np
import pytest

from bundles import everything
from commands import edgetailor, refusal
from html_tables import Reader
from made_profiles import MACHINE, full, made_duration, made_phase, made_profile, sliced
from profiles.documents.bundle_profile import Point, Profile, Sustained, Validity
from profiles.documents.bundle_profile_reading import encode_profile
from profiles.errors import InputError
from refusals import refused
from toolkit.report.charts import BUDGET, draw_png
from toolkit.report.html_page import page
from toolkit.report.phase_costs import cost_of, make_report
from toolkit.report.report_output import verdicts


def test_parts_add_up_to_the_peak_and_to_the_batch() -> None:
    whole = cost_of(full())
    assert whole.memory == (
        ("idle", 60_000_000), ("forward", 20_000_000), ("backprop", 40_000_000),
    )  # fmt: skip
    assert dict(whole.time) == pytest.approx({"forward": 0.1, "backprop": 0.3})
    assert (whole.peak, whole.decisive, whole.predicted) == (
        120_000_000, "training step", 119_999_999,
    )  # fmt: skip
    part = cost_of(sliced())
    assert part.memory == (
        ("idle", 60_000_000), ("forward", 20_000_000), ("stages", 1_000_000),
        ("backprop", 19_000_000),
    )  # fmt: skip
    assert dict(part.time) == pytest.approx({"stages": 0.05, "forward": 0.06, "backprop": 0.1})
    assert (part.peak, part.seconds) == (100_000_000, pytest.approx(0.21))


def test_a_frozen_stage_may_be_at_the_peak() -> None:
    cost = cost_of(
        made_profile(
            "slice:classifier",
            made_phase("forward_0", "stage", 0.2, 90_000_000),
            made_phase("forward_1", "stage", 0.1, 30_000_000),
            made_phase("predict", "forward", 0.01, 20_000_000),
            made_phase("train", "train", 0.03, 40_000_000),
        )
    )
    assert cost.memory[-1] == ("stages", 50_000_000)
    assert (cost.peak, cost.decisive) == (150_000_000, "stage forward_0")
    assert dict(cost.time)["stages"] == pytest.approx(0.3)


def test_several_profiles_of_one_submodel_are_one_bar() -> None:
    report = make_report([full(1.0), sliced(), full(1.2)])
    assert [cost.submodel for cost in report.costs] == ["full", "slice:blocks.3"]
    assert report.costs[0].train.median_s == pytest.approx(0.44)
    assert report.highest is report.costs[0]


def test_what_does_not_belong_together_is_refused() -> None:
    moved = msgspec.structs.replace(sliced(), machine=msgspec.structs.replace(MACHINE, cpu_count=8))
    with pytest.raises(InputError, match=r"differ in cpu count \(4 and 8\)"):
        make_report([full(), moved])
    with pytest.raises(InputError, match="differ in batch size"):
        make_report([full(), msgspec.structs.replace(sliced(), batch_size=8)])
    other = msgspec.structs.replace(full(), structure="f" * 64)
    with refused("report.several-models", submodel="full"):
        make_report([full(), other])
    with pytest.raises(InputError, match="has no 'forward' phase"):
        make_report([msgspec.structs.replace(full(), phases=full().phases[1:])])


# The page


def test_the_page_has_the_same_numbers_as_tables() -> None:
    shown = Reader(page(make_report([full(), sliced()], 110_000_000)))
    for row in (
        ["submodel", "idle process", "forward stages", "forward pass", "backpropagation", "peak",
         "predicted"],
        ["full", "60.0", "-", "20.0", "40.0", "120.0", "120.0"],
        ["slice:blocks.3", "60.0", "1.0", "20.0", "19.0", "100.0", "100.0"],
        ["full", "-", "100.00", "300.00", "400.00", "380.00", "420.00"],
        ["slice:blocks.3", "50.00", "60.00", "100.00", "210.00", "152.00", "168.00"],
        ["training step (peak)", "400.00", "380.00", "420.00", "20", "800.00", "0.50", "60.0",
         "60.0"],
    ):  # fmt: skip
        assert row in shown.rows
    assert "120.0 MB at the peak: full, training step" in shown.text
    assert "10.0 MB over; 1 of 2 fit the budget of 110.0 MB" in shown.text


def test_the_page_opens_at_the_peak() -> None:
    for profiles in ([full(), sliced()], [sliced(), full()]):
        text = page(make_report(profiles))
        [opened] = re.findall(r"<details open><summary>([^:]*)", text)
        assert opened == "full"
        assert text.count("<details>") == 1


def test_the_page_needs_no_network_and_fits_2_mb() -> None:
    points = tuple(
        Point(
            at_s=10.0 * n, step=made_duration(0.4 + n / 100), temperature_c=50.0 + n, clock_hz=None
        )
        for n in range(60)
    )
    heat = Sustained(
        duration_s=600, window_s=60, first=made_duration(0.4), last=made_duration(0.99),
        points=points,
    )  # fmt: skip
    many = [
        msgspec.structs.replace(full(), submodel=f"width:{n}", structure=f"{n:064}", sustained=heat)
        for n in range(30)
    ]
    text = page(make_report(many, 100_000_000))
    assert len(text.encode()) < 2_000_000
    shown = Reader(text)
    assert "script" not in {tag for tag, _, _ in shown.attributes}
    links = [v for _, name, v in shown.attributes if name in ("href", "src", "action", "data")]
    assert all(value and value.startswith("#") for value in links)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\((?!#)", text)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in shown.attributes
    assert "600 s without a pause" in shown.text


def test_names_from_a_document_are_text_and_nothing_else() -> None:
    hostile = msgspec.structs.replace(
        full(), submodel="<script>alert(1)</script>$x_1$&", machine=msgspec.structs.replace(
            MACHINE, model="<b>Pi</b>"
        ),
        validity=Validity(invalid=("<img src=x>",), unstable=("train",)),
    )  # fmt: skip
    shown = make_report([hostile], 1_000_000)
    text = page(shown)
    assert not re.search(r"<script|<img|<b>Pi", text)
    assert "<script>alert(1)</script>$x_1$&" in Reader(text).text
    draw_png(shown)


def test_a_dark_screen_is_thought_of() -> None:
    text = page(make_report([full(), sliced()], 110_000_000))
    assert "@media (prefers-color-scheme: dark)" in text
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        used = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", picture))
        assert "var(--ink)" in used
        assert {colour for colour in used if colour.startswith("#")} <= {"#11161d"}
        assert 'role="img"' in picture
        assert set(re.findall('font-family: ([^;"]+)', picture)) == {"system-ui, sans-serif"}
    ids = [value for _, name, value in Reader(text).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_only_phases_that_are_drawn_make_a_bar_doubtful() -> None:
    evaluation = made_phase("evaluate", "evaluate", 0.1, 10_000_000, spread=0.9)
    phases = (*full().phases, evaluation)
    for name, doubt in (("evaluate", ""), ("train", "unstable times: full, training step")):
        unsure = msgspec.structs.replace(full(), phases=phases, validity=Validity(unstable=(name,)))
        shown = make_report([unsure])
        assert [line for line in verdicts(shown) if "unstable" in line] == (
            [doubt] if doubt else []
        )
        assert ("Times of full (training step) vary by" in Reader(page(shown)).text) == bool(doubt)


def test_what_is_unknown_is_said_so() -> None:
    phases = tuple(msgspec.structs.replace(phase, memory=None) for phase in full().phases)
    unknown = msgspec.structs.replace(full(), phases=phases)
    text = Reader(page(make_report([unknown], 1))).text
    assert "The process peak was not measurable on this machine." in text
    draw_png(make_report([unknown], 1))


# The picture


def test_names_that_no_picture_has_room_for(recwarn: pytest.WarningsRecorder) -> None:
    named = msgspec.structs.replace(MACHINE, model="\N{CJK UNIFIED IDEOGRAPH-7535}" * 400)
    report = make_report([msgspec.structs.replace(full(), submodel="f" * 400, machine=named)])
    wide = matplotlib.image.imread(io.BytesIO(draw_png(report))).shape
    assert wide == matplotlib.image.imread(io.BytesIO(draw_png(make_report([full()])))).shape
    assert "f" * 400 in page(report)
    assert not recwarn.list


def reds(picture: bytes) -> int:
    """Pixels of the budget's colour."""
    pixels = matplotlib.image.imread(io.BytesIO(picture))[..., :3]
    return int((np.abs(pixels - matplotlib.colors.to_rgb(BUDGET)).max(axis=-1) < 0.01).sum())


def test_the_picture() -> None:
    plain = draw_png(make_report([full(), sliced()]))
    budgeted = draw_png(make_report([full(), sliced()], 150_000_000))
    assert plain.startswith(b"\x89PNG")
    assert reds(plain) == 0
    assert reds(budgeted) > 300


# The command

TABLE = """\
submodel        peak MB  predicted  stages ms  forward  backprop   batch
full              120.0      120.0          -   100.00    300.00  400.00
slice:blocks.3    100.0      100.0      50.00    60.00    100.00  210.00
peak: full, training step
over the budget of 110.0 MB: full, by 10.0 MB
not valid: slice:blocks.3, throttled during train
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two profiles, one of a device that was throttled."""
    hot = msgspec.structs.replace(sliced(), validity=Validity(invalid=("throttled during train",)))
    save(tmp_path / "full.json", full())
    save(tmp_path / "slice.json", hot)
    return tmp_path


def save(path: Path, profile: Profile) -> None:
    path.write_bytes(encode_profile(profile))


def test_the_command(folder: Path) -> None:
    arguments = ("report", "full.json", "slice.json", "--budget", "110MB")
    done = edgetailor(*arguments, "--out", "r.html", "--png", "r.png", cwd=folder)
    assert (done.code, done.stderr) == (0, "")
    rest = re.sub(r"^written: (r\.(html|png)) \(\d+\.\d kB\)\n", "", done.stdout, flags=re.M)
    assert rest == TABLE
    assert done.stdout.count("written: ") == 2
    assert Reader((folder / "r.html").read_text()).rows
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")
    before = everything(folder)
    said = refusal(edgetailor(*arguments, "--out", "r.html", cwd=folder))
    assert said == "r.html exists already: give another place, or --force to replace it."
    assert everything(folder) == before


def test_the_command_as_json(folder: Path) -> None:
    done = edgetailor("report", "slice.json", "full.json", "--json", cwd=folder)
    assert (done.code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert set(document) == {"version", "budget_bytes", "peak", "submodels"}
    assert document["peak"] == {"submodel": "full", "phase": "training step"}
    assert document["submodels"][0] == {
        "submodel": "slice:blocks.3",
        "peak_bytes": 100_000_000,
        "predicted_peak_bytes": 99_999_999,
        "memory_bytes": {
            "idle": 60_000_000, "forward": 20_000_000, "stages": 1_000_000, "backprop": 19_000_000,
        },
        "time_s": pytest.approx({"stages": 0.05, "forward": 0.06, "backprop": 0.1}),
        "train_p10_s": pytest.approx(0.152),
        "train_p90_s": pytest.approx(0.168),
        "invalid": ["throttled during train"],
        "unstable": [],
    }  # fmt: skip


def test_the_command_refuses(folder: Path) -> None:
    (folder / "old.json").write_text('{"version": 1}')
    assert "old.json has profile version 1" in refusal(edgetailor("report", "old.json", cwd=folder))
    said = refusal(edgetailor("report", "full.json", "--budget", "256", cwd=folder))
    assert "Invalid size '256'" in said
    assert "Missing argument" in refusal(edgetailor("report", cwd=folder))
