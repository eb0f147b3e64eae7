"""What the package says of itself, and that a 64-bit ARM board installs it without a compiler."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import edgetailor
from device_agent.runtime.runtime_packages import VERIFIED
from profiles.project_urls import issues_url

ROOT = Path(__file__).resolve().parents[1]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# pip takes each name of a platform by itself: glibc 2.28 runs what was built for 2.17 too.
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
OFFLINE = ("Failed to establish a new connection", "Could not fetch URL", "Temporary failure in")


def test_version_and_addresses_are_those_of_the_project_file() -> None:
    assert f"\nversion: {edgetailor.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert issues_url() == ABOUT["urls"]["Issues"]


def test_the_versions_of_termux_are_accepted() -> None:
    """Those of its package tree when docs/guides/phones.md was written; pip cannot replace them."""
    wanted = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, ABOUT["dependencies"])
    }
    for name, version in {"onnxruntime": "1.23.2", "numpy": "2.1.2"}.items():
        assert wanted[name].contains(version), name


def test_the_verified_versions_are_those_that_tests_run_on() -> None:
    pinned = re.findall(r"onnxruntime==([\d.]+)", (ROOT / "constraints.txt").read_text())
    oldest = re.findall(r"'onnxruntime==([\d.]+) numpy", (ROOT / "Makefile").read_text())
    assert (*oldest, *pinned) == VERIFIED


@pytest.mark.long
@pytest.mark.parametrize("version", ["3.11", "3.13", "3.14"])
def test_every_dependency_has_a_wheel_for_arm(tmp_path: Path, version: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check"),
            *(part for name in PLATFORMS for part in ("--platform", name)),
            *("--python-version", version, "--only-binary=:all:"),
            *("--constraint", ROOT / "constraints.txt", "--dest", tmp_path / "wheels"),
            *ABOUT["dependencies"],
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode and any(words in done.stderr for words in OFFLINE):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    wheels = sorted(path.name for path in (tmp_path / "wheels").iterdir())
    assert any(name.startswith("onnxruntime-") and "aarch64" in name for name in wheels), wheels
    assert all(name.endswith(".whl") for name in wheels)
