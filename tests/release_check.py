"""Build sdist and wheel, check what is in them, and try every extra in a fresh environment.

Run `make release-check` before a release. It needs the package index, and takes minutes because
PyTorch is installed twice. `--only NAME` tries one extra.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

from device_agent import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("profiles", "device_agent", "exporters", "toolkit", "edgetailor")
DATA = (
    "device_agent/profiling/calibration_graphs/convolution.onnx",
    "device_agent/runtime/probes/nchwc16.onnx",
    "profiles/devices/raspberry-pi-zero-2-w.toml",
    "profiles/documents/profile.schema.json",
    "toolkit/web/operator/templates/page.html",
    *(f"{package}/py.typed" for package in PACKAGES),
)
PAGE = "toolkit/web/built"
"""The built files of the pages, which `make web` writes."""
EXPORT = (
    *("-m", "toolkit.cli", "export", "toolkit.models:digits_cnn", "--input-shape", "1,8,8"),
    *("--submodel", "slice:units.2", "--out", "bundle"),
)
PROGRAMS: dict[str, list[tuple[str, ...]]] = {
    "": [
        ("-m", "device_agent.cli", "--version"),
        ("-m", "device_agent.cli", "doctor", "--help"),
        ("-c", "import edgetailor; assert 'split' in dir(edgetailor)"),
    ],
    "litert": [("-c", "from device_agent.runtime.litert_runtime import description as d; d()")],
    "privacy": [
        ("-c", "from toolkit.aggregation.privacy.budget import noise_for as n; n(1, 1e-5, 1, 9)")
    ],
    "images": [("-c", "from device_agent.data.pictures import check_pillow; check_pillow()")],
    "toolkit": [
        ("-m", "toolkit.cli", "--version"),
        ("-c", "from toolkit.web.built_page import is_built; assert is_built()"),
        EXPORT,
    ],
    "tflite": [(*EXPORT, "--format", "tflite")],
}
"""What must run after an install with each extra."""
TYPED = """
import edgetailor as et

model = et.load_model("toolkit.models:digits_cnn")
state = et.GlobalModel(model.state_dict())
submodel = et.split(model, "low-rank:0.5", sample_shape=(1, 8, 8))
bundle = et.export(submodel, state, "bundle")
update = et.read_update("update")
merged: et.GlobalModel = et.aggregate(state, [update])
merged.load_into(model)
"""
"""A user's script, which mypy --strict checks against the installed wheel."""


def run(*command: str | Path, **options: Any) -> None:
    """Run a command; raise CalledProcessError unless it succeeds."""
    subprocess.run(command, check=True, **options)


def build(out: Path) -> tuple[Path, Path]:
    """Build sdist and wheel into `out` and check their metadata; returns both files."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Raise SystemExit unless both hold all modules, data and the version, and nothing else."""
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "node_modules" not in path.parts
    }
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        [metadata] = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(file.read(metadata).decode())
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / PAGE).iterdir()}
    needed = {*modules, *DATA, *page}
    problems = [f"the wheel lacks {name}" for name in sorted(needed - names)]
    problems += [f"the sdist lacks {name}" for name in sorted(needed - held)]
    strangers = {name for name in names if name.split("/")[0] not in PACKAGES}
    problems += [f"the wheel has {name}, which is not of the packages" for name in strangers]
    if about["Version"] != __version__:
        problems.append(f"the wheel's version is {about['Version']}, not {__version__}")
    if f"## {__version__}" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        problems.append(f"CHANGELOG.md has no section {__version__}")
    if problems:
        sys.exit("\n".join(problems))


def try_extra(wheel: Path, extra: str, folder: Path) -> None:
    """Install `wheel` with `extra` into a fresh environment in `folder`, and run its commands."""
    environment = folder / f"with-{extra or 'nothing'}"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    run(*pip, "-c", ROOT / "constraints.txt", wanted)
    for program in PROGRAMS[extra]:
        print(f"  {' '.join(program)}", flush=True)
        work = tempfile.mkdtemp(dir=folder)
        run(python, *program, cwd=work, stdout=subprocess.DEVNULL)
    if extra == "toolkit":
        run(*pip, "-c", ROOT / "constraints.txt", "mypy")
        (folder / "script.py").write_text(TYPED)
        run(python, "-m", "mypy", "--strict", "script.py", cwd=folder)


def main() -> None:
    """Check the release."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", choices=PROGRAMS, help="try one extra")
    wanted = options.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = build(Path(folder) / "dist")
        check_contents(sdist, wheel)
        for extra in PROGRAMS if wanted is None else [wanted]:
            print(f"install with [{extra}]", flush=True)
            try_extra(wheel, extra, Path(folder))
    print("The release can be made.")


if __name__ == "__main__":
    main()
