"""What the agent costs a device before it does anything: disk, time to import, memory.

The base install goes into a fresh environment. Times are the least of RUNS processes, for other
work on the machine only adds to them; memory is the median. Linux only. Run `make bench-agent`.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = 15
MB = 1e6
IMPORTS = {
    "nothing": "pass",
    "numpy": "import numpy",
    "onnxruntime": "import onnxruntime",
    "the agent's commands": "import device_agent.cli",
    "all that training needs": "import device_agent.training, device_agent.onnx_runtime",
    "all that a federation needs": "import device_agent.device, device_agent.onnx_runtime",
}
REPORT = """
import time
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) * 1024)
"""
LIMITS = {"environment": 200 * MB, "seconds": 0.3, "memory": 60 * MB}
"""What the agent itself, `device_agent.cli`, must stay below."""


def install(folder: Path) -> Path:
    """A fresh environment with the base install in `folder`; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", ROOT], check=True)
    return python


def size(folder: Path) -> int:
    """Bytes of all files under `folder`."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def measure(python: Path, code: str, cwd: Path) -> tuple[float, float]:
    """Least seconds in which a fresh process does `code`, and its peak memory (bytes)."""
    program = [python, "-c", REPORT.format(code=code)]
    found = []
    for _ in range(RUNS):
        done = subprocess.run(program, cwd=cwd, check=True, capture_output=True, text=True)
        found.append([float(value) for value in done.stdout.split()])
    seconds, peaks = zip(*found, strict=True)
    return min(seconds), statistics.median(peaks)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "env"
        start = time.monotonic()
        python = install(environment)
        took = time.monotonic() - start
        whole = size(environment)
        packages = {
            path.name: size(path)
            for path in next(environment.glob("lib/*/site-packages")).iterdir()
        }
        print(f"Environment: {whole / MB:.0f} MB, installed in {took:.0f} s; largest:")
        for name, bytes_ in sorted(packages.items(), key=lambda item: -item[1])[:6]:
            print(f"  {bytes_ / MB:6.1f} MB  {name}")
        found = {name: measure(python, code, Path(scratch)) for name, code in IMPORTS.items()}
    numpy, runtime = found["numpy"][0], found["onnxruntime"][0]
    print("| import | time | beside numpy | beside onnxruntime | peak memory |")
    print("|---|---|---|---|---|")
    for name, (seconds, peak) in found.items():
        ratios = f"{seconds / numpy:.2f} | {seconds / runtime:.2f}"
        print(f"| {name} | {seconds * 1e3:.0f} ms | {ratios} | {peak / MB:.1f} MB |")
    seconds, peak = found["the agent's commands"]
    within = {
        "environment": whole < LIMITS["environment"],
        "seconds": seconds < LIMITS["seconds"],
        "memory": peak < LIMITS["memory"],
    }
    print("within the limits" if all(within.values()) else f"OVER THE LIMITS: {within}")
    sys.exit(0 if all(within.values()) else 1)


if __name__ == "__main__":
    main()
