"""`edgetailor serve`: fleets that it refuses."""

import json
import re
import socket
from pathlib import Path

import numpy as np
import pytest

from commands import refused, run

FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "digits.npz"
port = {port}

[[devices]]
name = "desk"
submodel = "{submodel}"
"""


def configure(folder: Path, port: int = 0, submodel: str = "full") -> None:
    np.savez(folder / "digits.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 1]))
    (folder / "fleet.toml").write_text(FLEET.format(port=port, submodel=submodel))


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configure(tmp_path, port)
        assert refused(tmp_path, "serve", "fleet.toml") == (
            f"Port {port} on 127.0.0.1 is in use: stop the program that uses it, or set another "
            "`port` in fleet.toml."
        )


def test_no_configuration(tmp_path: Path) -> None:
    sentence = refused(tmp_path, "serve", "fleet.toml")
    assert sentence == "fleet.toml cannot be read: No such file or directory."


def test_no_held_out_data(tmp_path: Path) -> None:
    configure(tmp_path)
    (tmp_path / "digits.npz").unlink()
    assert re.search(r"digits\.npz does not exist", refused(tmp_path, "serve", "fleet.toml"))


@pytest.mark.parametrize(
    ("submodel", "message"),
    [
        ("low-rank:", r"`devices\[0\]\.submodel` is 'low-rank:': Invalid spec 'low-rank:'"),
        ("nope:1", r"Unknown family 'nope'"),
        ("slice:nope", r"'slice:nope': the model cannot be cut there"),
    ],
)
def test_a_fleet_that_cannot_be(tmp_path: Path, submodel: str, message: str) -> None:
    configure(tmp_path, submodel=submodel)
    assert re.search(message, refused(tmp_path, "serve", "fleet.toml"))


def test_the_log_as_json_has_the_error(tmp_path: Path) -> None:
    done = run("edgetailor", "serve", "fleet.toml", "--log-json", cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert (done.code, told["level"], told["code"]) == (2, "error", "config.not-readable")
    assert "fleet.toml" in told["message"]
