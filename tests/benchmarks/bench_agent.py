"""What the agent costs a device before it does anything: disk, time to import, memory.

The base install goes into a fresh environment. Times are processor time, Python's own start
included, which other work on the machine hardly disturbs, and elapsed time; medians of RUNS
processes with files in the page cache. Linux only. Run `make bench-agent`.
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
    "all that training needs": (
        "import device_agent.training.bundle_training, device_agent.runtime.onnx_runtime"
    ),
    "all that a federation needs": (
        "import device_agent.federation.round_loop, device_agent.runtime.onnx_runtime"
    ),
}
REPORT = """
import time
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
used = time.process_time()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used, seconds, int(peak.split()[1]) * 1024)
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


def measure(
    python: Path, code: str, cwd: Path, processes: int = RUNS
) -> tuple[float, float, float]:
    """Processor seconds and seconds in which a fresh process does `code`, and its peak (bytes)."""
    program = [python, "-c", REPORT.format(code=code)]
    runs = []
    for _ in range(processes):
        done = subprocess.run(program, cwd=cwd, check=True, capture_output=True, text=True)
        runs.append([float(value) for value in done.stdout.split()])
    used, seconds, peak = map(statistics.median, zip(*runs, strict=True))
    return used, seconds, peak


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
        costs = {name: measure(python, code, Path(scratch)) for name, code in IMPORTS.items()}
    numpy, runtime = costs["numpy"][0], costs["onnxruntime"][0]
    print("| import | processor | beside numpy | beside onnxruntime | elapsed | peak memory |")
    print("|---|---|---|---|---|---|")
    for name, (used, seconds, peak) in costs.items():
        ratios = f"{used / numpy:.2f} | {used / runtime:.2f}"
        times = f"{used * 1e3:.0f} ms | {ratios} | {seconds * 1e3:.0f} ms"
        print(f"| {name} | {times} | {peak / MB:.1f} MB |")
    used, _, peak = costs["the agent's commands"]
    within = {
        "environment": whole < LIMITS["environment"],
        "seconds": used < LIMITS["seconds"],
        "memory": peak < LIMITS["memory"],
    }
    print("within the limits" if all(within.values()) else f"OVER THE LIMITS: {within}")
    sys.exit(0 if all(within.values()) else 1)


if __name__ == "__main__":
    main()
