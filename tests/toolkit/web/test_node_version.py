"""`make web` with a Node.js that is too old, or without one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("version", "words"),
    [("v18.20.4", "node is v18.20.4"), ("v9.9.9", "node is v9.9.9"), (None, "not installed")],
)
def test_make_web_names_the_version_that_it_needs(
    tmp_path: Path, version: str | None, words: str
) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    for name, body in {"npm": "touch npm-was-called", "node": f"echo {version}"}.items():
        if version is not None or name == "npm":
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
    for name in ("sh", "awk"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    ended = subprocess.run(
        [make, "-C", str(ROOT), "web"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "Node.js 20 or newer" in ended.stderr
    assert words in ended.stderr
    assert not (ROOT / "toolkit/web/npm-was-called").exists()
