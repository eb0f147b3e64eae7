"""The systemd service: the files written, systemd's check of the unit, and complete removal."""

import os
import re
import shutil
import socket
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bundles import everything, write_data
from commands import Done, command, environment, refusal, run
from device_agent.cli.commands import main_group
from device_agent.federation.device_state import DeviceState
from device_agent.federation.identity.state_folder import Identity
from device_agent.federation.owner_limits import OwnerLimits, QuietHours
from device_agent.federation.run_options import RunOptions, read_options
from device_agent.service.systemd_notify import Notifier
from device_agent.service.systemd_service import (
    agent_service,
    has_memory_cgroup,
    unit_text,
    with_absolute_paths,
)
from device_agent.training.training_options import TrainingOptions
from fake_systemctl import with_systemctl
from refusals import refused

ANALYZE = shutil.which("systemd-analyze")
OPTIONS = RunOptions(
    data="local.npz",
    training=TrainingOptions(threads=2, max_memory=256_000_000),
    limits=OwnerLimits(
        max_temperature=70.5,
        only_when_charging=True,
        quiet_hours=QuietHours.parse("22:00-07:00"),
    ),
    nice=10,
    log_json=True,
)
GIVEN = (
    "--data", "local.npz", "--threads", 2, "--max-memory", "256MB",
    "--nice", 10, "--only-when-charging", "--quiet-hours", "22:00-07:00", "--log-json",
)  # fmt: skip


def member(folder: Path) -> Path:
    known = Identity(url="http://127.0.0.1:1", device="d", secret="s", name="n", submodel="full")
    DeviceState(folder / "state").remember(known)
    write_data(folder / "local.npz")
    return folder / "state"


def service(folder: Path, *arguments: object, systemctl: str = "exit 0") -> Done:
    """Run a command with a script as systemctl, which records its arguments."""
    return run("edgetailor-agent", *arguments, cwd=folder, **with_systemctl(folder, systemctl))


def files(folder: Path) -> set[str]:
    return {name for name, data in everything(folder).items() if data != b"folder"}


def test_a_service_of_the_user_comes_and_goes(tmp_path: Path) -> None:
    member(tmp_path)
    done = service(tmp_path, "install-service", "--user", "--state", "state", *GIVEN)
    config = tmp_path / "config"
    unit, options = (
        config / "systemd/user/edgetailor-agent.service",
        config / "edgetailor-agent.toml",
    )
    assert done == Done(
        0,
        "edgetailor-agent is running: systemctl --user status edgetailor-agent\n",
        f"Wrote {unit} and {options}.\nThe service runs only while you are logged in. To keep it "
        "running after you log out: `loginctl enable-linger`.\n",
    )
    name = "edgetailor-agent.service"
    assert (tmp_path / "asked").read_text().splitlines() == [
        "--user daemon-reload", f"--user enable {name}", f"--user restart {name}",
    ]  # fmt: skip
    assert tomllib.loads(options.read_text()) == {
        "data": str(tmp_path / "local.npz"), "state": str(tmp_path / "state"),
        "threads": 2, "max_memory": 256_000_000, "nice": 10,
        "only_when_charging": True, "quiet_hours": "22:00-07:00", "log_json": True,
    }  # fmt: skip
    assert f"--config {options}\n" in unit.read_text()
    (tmp_path / "asked").unlink()
    gone = service(tmp_path, "uninstall-service", "--user")
    assert gone == Done(0, f"Removed {unit} and {options}\n", "")
    assert files(config) == set()
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"--user disable --now {name}", "--user daemon-reload",
    ]  # fmt: skip
    again = service(tmp_path, "uninstall-service", "--user")
    assert again == Done(0, "There is no service edgetailor-agent here.\n", "")


def test_why_the_service_did_not_start(tmp_path: Path) -> None:
    member(tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "journalctl").write_text(
        "#!/bin/sh\n[ $2 = edgetailor-agent.service ] && printf 'Permission denied\\nFailed.\\n'"
    )
    (tmp_path / "tools" / "journalctl").chmod(0o755)
    done = service(
        tmp_path, "install-service", "--user", "--state", "state", "--data", "x.npz",
        systemctl='case "$*" in *restart*) echo "Job failed." >&2; exit 1;; esac',
    )  # fmt: skip
    assert refusal(done) == (
        "`systemctl --user restart edgetailor-agent.service` failed: Job failed (the journal: "
        "Permission denied; Failed). Check that systemd is running; --dry-run prints the unit."
    )
    assert files(tmp_path / "config") == set()


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (("--max-temperature", 70), "option.no-temperature-sensor"),
        (("--max-memory", "1MB"), "limit.below-agent"),
        (("--data", "broken.npz"), "data.unreadable-file"),
        (("--data", "nothing:loads"), "data.function-not-loaded"),
    ],
)
def test_what_run_would_refuse_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[object, ...], code: str
) -> None:
    member(tmp_path)
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("device_agent.client.coordinator_client.STOPPED_AGAIN_S", 0.0)
    monkeypatch.setattr("device_agent.system.sensors.temperature_c", lambda root: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    written: list[object] = []
    monkeypatch.setattr(
        "device_agent.service.systemd_service.install", lambda *given: written.append(given)
    )
    for name in ("install-service", "run"):
        arguments = [name, "--data", "local.npz", "--state", "state", *map(str, given)]
        with refused(code):
            main_group.main([*arguments, *["--user"][: name != "run"]], standalone_mode=False)
    assert not written


def test_where_systemd_does_not_run(tmp_path: Path) -> None:
    member(tmp_path)
    done = service(
        tmp_path, "install-service", "--user", "--state", "state", "--data", "x.npz",
        systemctl="echo 'Failed to connect to bus' >&2; exit 1",
    )  # fmt: skip
    assert refusal(done) == (
        "`systemctl --user daemon-reload` failed: Failed to connect to bus. Check that systemd is "
        "running; --dry-run prints the unit."
    )
    assert files(tmp_path / "config") == set()


def test_a_device_that_has_not_joined_is_refused(tmp_path: Path) -> None:
    done = service(tmp_path, "install-service", "--user", "--state", "state", "--data", "x.npz")
    assert "has not joined a coordinator yet" in refusal(done)
    assert not (tmp_path / "config").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    member(tmp_path)
    done = service(
        tmp_path,
        "install-service",
        "--state",
        "state",
        *GIVEN,
        "--max-temperature",
        70,
        "--dry-run",
    )
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith('# /etc/edgetailor-agent.toml\ndata = "')
    assert "\n# /etc/systemd/system/edgetailor-agent.service\n[Unit]\n" in done.stdout
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "config").exists()


def test_a_note_for_data_that_do_not_exist_yet(tmp_path: Path) -> None:
    member(tmp_path)
    done = service(
        tmp_path, "install-service", "--state", "x/../state", "--data", "x/../no.npz", "--dry-run"
    ).succeeded()
    assert done.stderr == (
        f"Note: {tmp_path}/no.npz does not exist yet. The service fails until it does.\n"
    )
    assert "/../" not in done.stdout


def test_a_service_sees_its_own_folders_among_temporary_ones() -> None:
    places = agent_service(user=False)
    for state, data in (("/tmp", "/srv/x.npz"), ("/srv", "/var/tmp/x.npz"), ("/", "/srv/x.npz")):
        text = unit_text(replace(OPTIONS, state=Path(state), data=data), places, 257)
        assert ("PrivateTmp=yes" in text) == (state == "/")
        assert f'ReadWritePaths="{state}"' in text or f"ReadWritePaths={state}" in text


def written(folder: Path, user: bool, version: int) -> str:
    """Write the unit to `folder` and return its text."""
    state = member(folder)
    options = with_absolute_paths(replace(OPTIONS, state=state))
    options_file = folder / "edgetailor agent 100%.toml"
    unit = folder / "edgetailor-agent.service"
    place = replace(agent_service(user), unit=unit, options=options_file)
    place.unit.write_text(unit_text(options, place, version))
    return place.unit.read_text()


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze, of Debian's package systemd")
@pytest.mark.parametrize("user", [False, True])
def test_systemd_takes_the_unit(tmp_path: Path, user: bool) -> None:
    said = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True).stdout
    version = re.match(r"systemd (\d+)", said)
    assert version
    written(tmp_path, user, int(version[1]))
    mode = ["--user"] if user else []
    done = subprocess.run(
        ["systemd-analyze", *mode, "verify", tmp_path / "edgetailor-agent.service"],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_settings_of_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("device_agent.service.systemd_service.has_memory_cgroup", lambda: False)
    text = written(tmp_path, user=False, version=257)
    assert "MemoryMax" not in text
    lines = set(text.splitlines())
    assert {
        "Type=exec", "NotifyAccess=main", "WatchdogSec=900", "Restart=on-failure", "RestartSteps=6",
        "RestartMaxDelaySec=600", "NoNewPrivileges=yes", f"ReadWritePaths={tmp_path}/state",
    } <= lines  # fmt: skip
    assert f'--config "{tmp_path}/edgetailor agent 100%%.toml"' in text
    monkeypatch.setattr("device_agent.service.systemd_service.has_memory_cgroup", lambda: True)
    text = written(tmp_path, user=True, version=252)
    assert {"MemoryMax=256000000", "RestartSec=300"} <= set(text.splitlines())
    assert not re.search("RestartSteps|User=|Capability|Protect", text)


def test_the_memory_cgroup_of_a_kernel(tmp_path: Path) -> None:
    old, new = tmp_path / "cgroups", tmp_path / "cgroup.controllers"
    assert not has_memory_cgroup(tmp_path, old)
    row = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t40\t1\nmemory\t0\t40\t"
    old.write_text(f"{row}0\n")
    assert not has_memory_cgroup(tmp_path, old)  # a Raspberry Pi
    old.write_text(f"{row}1\n")
    assert has_memory_cgroup(tmp_path, old)
    new.write_text("cpuset cpu io pids\n")
    assert not has_memory_cgroup(tmp_path, old)
    new.write_text("cpuset cpu io memory pids\n")
    assert has_memory_cgroup(tmp_path, old)


def test_options_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(OPTIONS.toml())
    read = read_options(path)
    read["quiet_hours"] = QuietHours.parse(read["quiet_hours"])
    assert RunOptions.from_flat(**read) == OPTIONS
    path.write_text("quiet = true\n")
    with refused("option.unknown", "The options are data, state", path=str(path), option="quiet"):
        read_options(path)
    path.write_text("quiet =\n")
    with refused("file.not-toml", path=str(path)):
        read_options(path)
    with refused("file.unreadable", path=str(tmp_path / "nothing")):
        read_options(tmp_path / "nothing")


def test_a_file_that_names_a_runtime_still_works(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "options.toml"
    for runtime, warnings in (("onnxruntime", 0), ("openvino", 1), ("auto", 2)):
        path.write_text(f'data = "local.npz"\nruntime = "{runtime}"\n')
        assert read_options(path) == {"data": "local.npz"}
        assert len(said) == warnings
    assert "trains with onnxruntime" in said[0]


def test_run_takes_its_options_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "o.toml").write_text('data = "x.npz"\nquiet_hours = "8-9"\n')
    done = run("edgetailor-agent", "run", "--config", "o.toml", cwd=tmp_path)
    assert "Invalid quiet hours '8-9'" in refusal(done)
    done = run(
        "edgetailor-agent", "run", "--config", "o.toml", "--quiet-hours", "08:00-09:00",
        "--state", "s", cwd=tmp_path,
    )  # fmt: skip
    assert "s has not joined a coordinator yet" in refusal(done)


@pytest.mark.parametrize("abstract", [False, True])
def test_notifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    address = f"\0{tmp_path}" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
    monkeypatch.setenv("WATCHDOG_USEC", str(40_000_000))
    now = [100.0]
    monkeypatch.setattr("device_agent.service.systemd_notify.time.monotonic", lambda: now[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address)
        listening.settimeout(0)
        notifier = Notifier()
        for now[0] in (100.0, 109.0, 110.0, 119.0):
            notifier.alive()
        notifier.status("Round 1:\n training")
        heard = [listening.recv(100) for _ in range(4)]
        assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"STATUS=Round 1: training"]
        with pytest.raises(BlockingIOError):
            listening.recv(100)
    notifier.status("nobody listens any more")


def test_the_service_reports_before_it_loads_libraries(tmp_path: Path) -> None:
    """Units of `Type=notify` wait 90 s for the report; loading takes a minute on a small board."""
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'loading')!r}).read()\n")
    os.mkfifo(tmp_path / "loading")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(60)
        variables = environment(NOTIFY_SOCKET=str(tmp_path / "notify"))
        variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
        words = command("edgetailor-agent", "run", "--data", "x.npz", "--state", "s")
        agent = subprocess.Popen(words, cwd=tmp_path, env=variables)
        try:
            assert listening.recv(100) == b"READY=1"
            assert agent.poll() is None
        finally:
            agent.kill()
            agent.wait()


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/pi/.config")
    assert str(agent_service(True).unit) == "/home/pi/.config/systemd/user/edgetailor-agent.service"
    assert str(agent_service(False).options) == "/etc/edgetailor-agent.toml"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("quiet_hours = 5", "a text"),
        ('data = "a\\u0000b"', "a text"),
        ("data = [1]", "a text"),
        ("only_when_charging = 1", "true or false"),
        ("max_temperature = nan", "a number"),
        ("validation = inf", "a number"),
        ("threads = 99999999999999999999", "a number"),
        ("nice = true", "a number"),
        ("max_memory = 1979-05-27", "bytes, or a size like 256MB"),
    ],
)
def test_options_of_the_wrong_type(tmp_path: Path, line: str, kind: str) -> None:
    path = tmp_path / "options.toml"
    path.write_text(f"{line}\n")
    with refused("option.wrong-type", path=str(path), option=line.split()[0]) as caught:
        read_options(path)
    assert f"must be {kind}; it is " in str(caught.value)
