"""`edgetailor-agent bench`: one table of several bundles."""

import json
import re
import shutil
from pathlib import Path

import pytest

from bundles import BATCH, FAMILIES, BundleOf, everything
from commands import Agent, refusal

SECONDS = r"\d+\.\d{3}"


@pytest.mark.long
def test_a_folder_of_bundles(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    for family in ("slice", "full"):
        shutil.copytree(bundle_of(family), tmp_path / "fleet" / family)
    (tmp_path / "fleet" / "notes").mkdir()
    before = everything(tmp_path)
    done = agent("bench", "fleet", bundle_of("low-rank"), "--threads", "1")
    assert (done.code, done.stderr) == (0, "")
    last = bundle_of("low-rank").name
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"bundle +submodel +batch +s/batch +peak MB", lines[0])
    for line, name, family in zip(
        lines[1:4], ("full", "slice", last), ("full", "slice", "low-rank"), strict=True
    ):
        assert re.fullmatch(rf"{name} +{FAMILIES[family]} +{BATCH} +{SECONDS} +\d+\.\d", line)
    assert re.fullmatch(r"onnxruntime \S+ on .+", lines[4])
    assert len(lines) == 5
    assert everything(tmp_path) == before


def test_a_damaged_bundle_does_not_end_the_others(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    shutil.copytree(bundle_of("full"), tmp_path / "fleet" / "whole")
    shutil.copytree(bundle_of("full"), tmp_path / "fleet" / "broken")
    (tmp_path / "fleet" / "broken" / "train.onnx").write_bytes(b"")
    done = agent("bench", "fleet", "--json")
    assert done.code == 2
    broken, whole = json.loads(done.stdout)["bundles"]
    assert (broken["name"], broken["seconds_per_batch"]) == ("broken", None)
    assert broken["code"].startswith("bundle.")
    assert "train.onnx" in broken["error"]
    assert (whole["name"], whole["submodel"], whole["error"]) == ("whole", "full", None)
    assert whole["batch_size"] == BATCH
    assert 0 < whole["seconds_per_batch"] < 60
    assert whole["peak_bytes"] > 10**6


def test_a_place_without_bundles_is_refused(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = agent("bench", "empty")
    assert refusal(done).startswith("empty is no bundle and has no bundles in it. Give a folder")
