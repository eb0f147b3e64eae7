"""What a command imports. On a small board, each library costs seconds of processor time."""

import json
from pathlib import Path

import pytest

from commands import run_code

HEAVY = {"numpy", "onnxruntime", "cryptography", "safetensors"}
NETWORK = {"urllib3", "ssl", "http"}
FORMATS = {"msgspec"}
CODE = """
import atexit, json, sys
atexit.register(lambda: print("\\n", json.dumps(sorted(sys.modules)), file=sys.stderr))
from device_agent.cli import main
main()
"""


def imported(folder: Path, *arguments: str) -> set[str]:
    done = run_code(CODE, *arguments, cwd=folder)
    modules: list[str] = json.loads(done.stderr.splitlines()[-1])
    assert "device_agent.cli" in modules
    return {name.partition(".")[0] for name in modules} | set(modules)


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--version"], HEAVY | NETWORK | FORMATS | {"click"}),
        (["--help"], HEAVY | NETWORK | FORMATS),
        (["run", "--help"], HEAVY | NETWORK | FORMATS | {"device_agent.cli.join_command"}),
        (["status", "--state", "s"], HEAVY),
        (["doctor", "--state", "s"], HEAVY),
        # These calibrate in child processes, to which a small board's memory has to be left.
        (["calibrate", "--out", "/"], HEAVY | NETWORK),
        (["join", "http://x", "--token-file", "t"], HEAVY - {"cryptography"}),
    ],
)
def test_a_command_imports_only_what_it_needs(
    tmp_path: Path, arguments: list[str], unneeded: set[str]
) -> None:
    assert not unneeded & imported(tmp_path, *arguments)
