"""`edgetailor report diff`: two profiles of a bundle, as a gate in somebody's CI."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from commands import edgetailor, refusal
from made_profiles import MACHINE, full, made_duration, sliced
from profiles.documents.bundle_profile import Profile, Validity
from profiles.documents.bundle_profile_reading import encode_profile
from profiles.errors import RegressionError, UnstableError
from refusals import refused
from toolkit.report.profile_diff import compare, require_no_regression

SLOWER = """\
full: worse means more than 5.0% slower or larger
                        before      after  change
forward pass         100.00 ms  110.00 ms  +10.0%  worse
training step        400.00 ms  440.00 ms  +10.0%  worse
forward pass, peak     80.0 MB    80.0 MB   +0.0%
training step, peak   120.0 MB   126.0 MB   +5.0%
"""


def saved(folder: Path, *profiles: Profile) -> Sequence[str]:
    """Their files, in `folder`."""
    names = [f"{number}.json" for number in range(len(profiles))]
    for name, profile in zip(names, profiles, strict=True):
        (folder / name).write_bytes(encode_profile(profile))
    return names


def test_slower_fails(tmp_path: Path) -> None:
    done = edgetailor("report", "diff", *saved(tmp_path, full(), full(1.1, 0.04)), cwd=tmp_path)
    assert done.stdout == SLOWER
    assert done.stderr == (
        "Error: full became worse by more than 5.0%: forward pass +10.0% time, training step "
        "+10.0% time.\n"
    )
    assert done.code == RegressionError.exit_code == 8


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    files = saved(tmp_path, full(), full(1.1, 0.04))
    done = edgetailor("report", "diff", *files, "--max-regression", "10.5%", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert "worse" not in done.stdout.partition("\n")[2]


def test_as_json(tmp_path: Path) -> None:
    files = saved(tmp_path, full(), full(1.1, 0.04))
    done = edgetailor("report", "diff", *files, "--json", cwd=tmp_path)
    assert done.code == 8
    document = json.loads(done.stdout)
    assert set(document) == {"version", "submodel", "allowed", "differences", "changes"}
    assert document["changes"][1] == {
        "phase": "training step", "before_s": 0.4, "after_s": pytest.approx(0.44),
        "change": pytest.approx(0.1), "verdict": "worse",
    }  # fmt: skip
    assert document["changes"][3]["after_bytes"] == 126_000_000


def times(median_s: float, spread: float) -> Profile:
    """The whole model's profile with another training step."""
    forward, train = full().phases
    other = msgspec.structs.replace(train, steady=made_duration(median_s, spread))
    return msgspec.structs.replace(full(), phases=(forward, other))


@pytest.mark.parametrize(
    ("median_s", "spread", "verdict"),
    [
        (0.4, 0.1, "same"),
        (0.419, 0.01, "same"),
        (0.44, 0.05, "worse"),
        (0.44, 0.3, "within spread"),  # 0.374 to 0.506 holds the median of before
        (0.36, 0.05, "better"),
        (0.36, 0.3, "within spread"),
        (0.8, 0.3, "worse"),
    ],
)
def test_a_time_counts_beyond_its_spread(median_s: float, spread: float, verdict: str) -> None:
    comparison = compare(full(), times(median_s, spread), 0.05)
    assert [change.verdict for change in comparison.changes] == ["same", verdict, "same", "same"]
    if verdict == "worse":
        with refused("report.regression", "training step", submodel="full"):
            require_no_regression(comparison)
    else:
        require_no_regression(comparison)


def doubtful(profile: Profile) -> Profile:
    """`profile`, which says of its training step that it varies."""
    return msgspec.structs.replace(profile, validity=Validity(unstable=("train",)))


@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize(("median_s", "spread"), [(0.8, 0.3), (0.8, 1.5), (0.44, 0.02)])
def test_an_unstable_time_that_grew_neither_passes_nor_is_slower(
    median_s: float, spread: float, which: str, tmp_path: Path
) -> None:
    before, after = full(), times(median_s, spread)
    pair = (doubtful(before), after) if which == "before" else (before, doubtful(after))
    done = edgetailor("report", "diff", *saved(tmp_path, *pair), cwd=tmp_path)
    assert done.code == UnstableError.exit_code == 7
    row = next(line for line in done.stdout.splitlines() if line.startswith("training step "))
    assert row.endswith("  unstable")
    assert done.stdout.endswith(
        "unstable: its times vary too much in one of the profiles; measure again\n"
    )
    grew = f"{median_s / 0.4 - 1:+.1%}"
    assert done.stderr.startswith(
        "Error: The times in the two profiles of full vary too much to be compared: "
        f"training step {grew} time. Measure "
    )


def test_an_unstable_time_that_did_not_grow_passes() -> None:
    require_no_regression(compare(full(), doubtful(times(0.41, 0.5)), 0.05))
    require_no_regression(compare(full(), doubtful(times(0.2, 0.5)), 0.05))


def test_what_is_surely_worse_goes_ahead_of_what_may_be() -> None:
    forward, train = full(1.2, 0.04).phases
    after = msgspec.structs.replace(
        full(), phases=(forward, train), validity=Validity(unstable=("train",))
    )
    with refused("report.regression", "forward pass +20.0% time", submodel="full", allowed=0.05):
        require_no_regression(compare(full(), after, 0.05))


def test_folders_of_profiles_are_compared_by_medians_of_medians(tmp_path: Path) -> None:
    for side, medians in (("before", (0.4, 0.41, 0.9)), ("after", (0.42, 0.43, 0.3))):
        (tmp_path / side).mkdir()
        saved(tmp_path / side, *(times(median, 0.02) for median in medians))
    done = edgetailor("report", "diff", "before", "after", "--json", cwd=tmp_path)
    change = json.loads(done.stdout)["changes"][1]
    assert (change["before_s"], change["after_s"]) == (0.41, 0.42)
    assert done.code == 0
    (tmp_path / "none").mkdir()
    said = refusal(edgetailor("report", "diff", "none", "after", cwd=tmp_path))
    assert said == (
        "none has no profiles (files NAME.json). Give a profile, or a folder of profiles."
    )


def test_times_of_nothing_have_no_share() -> None:
    comparison = compare(times(1e-320, 0.0), times(1e9, 0.0), 0.05)
    assert [change.share for change in comparison.changes] == [0.0, 0.0, 0.0, 0.0]
    assert comparison.changes[1].verdict == "worse"


def test_memory_that_grew_fails(tmp_path: Path) -> None:
    comparison = compare(full(), full(1.2, 0.0), 0.05)
    assert comparison.changes[3].verdict == "worse"
    with refused("report.regression", "training step +10.0% peak memory"):
        require_no_regression(comparison)


def test_other_machines_are_refused_unless_told(tmp_path: Path) -> None:
    fifth = msgspec.structs.replace(MACHINE, model="Raspberry Pi 5 Model B Rev 1.0")
    files = saved(tmp_path, full(), msgspec.structs.replace(full(), machine=fifth))
    said = refusal(edgetailor("report", "diff", *files, cwd=tmp_path))
    assert said.startswith(
        "The profiles are of different machines: model (Raspberry Pi 4 Model B Rev 1.4 and "
        "Raspberry Pi 5 Model B Rev 1.0). Measure both on one"
    )
    done = edgetailor("report", "diff", *files, "--other-machine", cwd=tmp_path).succeeded()
    assert done.stdout.endswith(
        "note: other model (Raspberry Pi 4 Model B Rev 1.4 and Raspberry Pi 5 Model B Rev 1.0)\n"
    )


def test_other_software_of_one_machine_is_what_a_gate_compares() -> None:
    newer = msgspec.structs.replace(MACHINE, runtime="onnxruntime 1.32.0")
    comparison = compare(full(), msgspec.structs.replace(full(), machine=newer), 0.05)
    assert comparison.differences == ("runtime (onnxruntime 1.31.1 and onnxruntime 1.32.0)",)
    require_no_regression(comparison)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    said = refusal(edgetailor("report", "diff", *saved(tmp_path, full(), sliced()), cwd=tmp_path))
    assert "The profiles must be of the same bundle; these are of full" in said
    hot = msgspec.structs.replace(full(), validity=Validity(invalid=("throttled during train",)))
    with refused("measurement.throttled", "(throttled during train"):
        compare(full(), hot, 0.05)
    for wrong in ("5", "-1%", "many%", "nan%"):
        files = saved(tmp_path, full(), full())
        done = edgetailor("report", "diff", *files, f"--max-regression={wrong}", cwd=tmp_path)
        assert "Invalid percentage " in refusal(done)
