"""`edgetailor install-service`: the unit, systemd's check of it, and complete removal."""

import shutil
import subprocess
from pathlib import Path

import pytest

from commands import Done, run
from fake_systemctl import with_systemctl

ANALYZE = shutil.which("systemd-analyze")
FLEET = """
model = "toolkit.models:digits_cnn"
input_shape = [1, 8, 8]
rounds = 1
held_out = "digits.npz"
port = {port}

[[devices]]
name = "desk"
submodel = "full"
"""


def service(folder: Path, *arguments: object, systemctl: str = "exit 0", port: int = 0) -> Done:
    """Run a command with a script as systemctl, which records its arguments."""
    (folder / "my fleet.toml").write_text(FLEET.format(port=port))
    given = with_systemctl(folder, systemctl) | {"EDGETAILOR_CACHE": str(folder / "cache")}
    return run("edgetailor", *arguments, cwd=folder, **given)


def test_the_service_comes_and_goes(tmp_path: Path) -> None:
    done = service(tmp_path, "install-service", "my fleet.toml", "--user")
    assert done.stdout == (
        "edgetailor-coordinator is running: systemctl --user status edgetailor-coordinator\n"
    )
    unit = tmp_path / "config/systemd/user/edgetailor-coordinator.service"
    lines = unit.read_text().splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert start.endswith(f'-m toolkit.cli serve "{tmp_path}/my fleet.toml"')
    assert f"WorkingDirectory={tmp_path}" in lines
    assert f"Environment=EDGETAILOR_CACHE={tmp_path}/cache" in lines
    assert (tmp_path / "state").is_dir()
    done = service(tmp_path, "uninstall-service", "--user")
    assert done.stdout == f"Removed {unit}\n"
    assert not unit.exists()
    assert (tmp_path / "asked").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable edgetailor-coordinator.service",
        "--user restart edgetailor-coordinator.service",
        "--user disable --now edgetailor-coordinator.service",
        "--user daemon-reload",
    ]
    done = service(tmp_path, "uninstall-service", "--user")
    assert done.stdout == "There is no service edgetailor-coordinator here.\n"


def test_a_service_that_does_not_start_leaves_no_unit(tmp_path: Path) -> None:
    failing = 'case "$*" in *restart*) echo no >&2; exit 1;; esac'
    done = service(tmp_path, "install-service", "my fleet.toml", "--user", systemctl=failing)
    assert done.code == 2
    assert "`systemctl --user restart edgetailor-coordinator.service` failed: no" in done.stderr
    assert not (tmp_path / "config/systemd/user/edgetailor-coordinator.service").exists()


@pytest.mark.parametrize("port", [0, 443])
def test_a_dry_run_writes_nothing(tmp_path: Path, port: int) -> None:
    done = service(tmp_path, "install-service", "my fleet.toml", "--dry-run", port=port)
    assert done.stdout.startswith("# /etc/systemd/system/edgetailor-coordinator.service\n[Unit]\n")
    assert f"ReadWritePaths={tmp_path}/state\n" in done.stdout
    assert f"ReadWritePaths={tmp_path}/cache\n" in done.stdout
    assert "LimitNOFILE=65536\n" in done.stdout
    assert ("AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in done.stdout) == (port == 443)
    assert not (tmp_path / "state").exists()


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze, of Debian's package systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    done = service(tmp_path, "install-service", "my fleet.toml", "--dry-run", port=443)
    unit = tmp_path / "edgetailor-coordinator.service"
    unit.write_text(done.stdout)
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_mistake_in_the_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("rounds = 1\n")
    done = service(tmp_path, "install-service", "wrong.toml", "--user")
    assert done.code == 2
    assert "wrong.toml" in done.stderr
    assert not (tmp_path / "asked").exists()
