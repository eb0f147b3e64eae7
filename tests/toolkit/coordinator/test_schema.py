"""No request that schemathesis makes from the OpenAPI description finds a fault."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vector_fleet import configured, enrol, running, task, token

CASES = 60
"""Requests for each operation, in each phase and with each credential."""


@pytest.mark.long
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis")
@pytest.mark.parametrize("who", ["device", "join token", "operator", "stranger"])
def test_no_generated_request_finds_a_fault(tmp_path: Path, seed: int, who: str) -> None:
    said: list[str] = []
    with running(configured(tmp_path), say=said.append) as server:
        task(enrol(server, tmp_path)["desktop-1"])
        secrets = {
            "device": json.loads((tmp_path / "0" / "device.json").read_bytes())["secret"],
            "join token": token(server.config, "desktop"),
            "operator": server.coordinator.operator_token,
            "stranger": "guess",
        }
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {secrets[who]}"),
                *("--checks", "not_a_server_error", "--mode", "all", "--no-color"),
                *("--max-examples", str(CASES), "--seed", str(seed % 2**31)),
                # Once it has left, a device is a stranger.
                *(("--exclude-path", "/v1/leave") if who == "device" else ()),
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert server.coordinator.status().state == "training"
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None, done.stdout
    assert int(cases[1]) > 5 * CASES  # of about ten operations
    assert not [line for line in said if "A request failed" in line]
