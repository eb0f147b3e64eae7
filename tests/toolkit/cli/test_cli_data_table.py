"""`edgetailor export --data-table`: a bundle that trains on its owner's files, without rounds."""

import json
import re
from pathlib import Path

from command_models import NETS
from commands import edgetailor, refused, run
from device_agent.formats.bundle import open_bundle
from device_agent.formats.preprocessing import Series

ALONE = ("export", "nets:alone", "--input-shape", "4", "--out", "b", "--data-table", "fleet.toml")
TABLE = """
rounds = "of no matter here"
[data]
kind = "series"
columns = ["a", "b", "c", "d"]
label = "y"
classes = ["no", "yes"]
"""


def test_a_bundle_for_csv_files(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "fleet.toml").write_text(TABLE)
    edgetailor(*ALONE, cwd=tmp_path).succeeded()
    expected = Series(columns=("a", "b", "c", "d"), label="y", classes=("no", "yes"))
    assert open_bundle(tmp_path / "b").manifest.preprocessing == expected
    lines = ["a,b,c,d,y", "1,2,3,4,yes", "0,0,1,-1,no", "5,4,3,2,yes"]
    (tmp_path / "local.csv").write_text("\n".join(lines))
    arguments = ("train", "b", "--data", "local.csv", "--out", "u")
    run("edgetailor-agent", *arguments, cwd=tmp_path).succeeded()
    update = json.loads((tmp_path / "u" / "update.json").read_text())
    assert update["samples"] == 3


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    mistakes = {
        "": r"^fleet\.toml has no table \[data\]",
        "[data]\nkind = 'x'": r"^fleet\.toml: `data`: it needs a `kind`",
        TABLE.replace('"d"]', '"d", "e"]'): r"^\[data\] does not fit the model: its columns give",
        TABLE.replace('"yes"]', '"yes", "so"]'): r"^\[data\] does not fit .* 3 classes, but the mo",
    }
    for text, message in mistakes.items():
        (tmp_path / "fleet.toml").write_text(text)
        assert re.search(message, refused(tmp_path, *ALONE))
    assert not (tmp_path / "b").exists()
