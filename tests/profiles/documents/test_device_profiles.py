"""Device profiles: the built-in ones and their sources, and files that are none."""

import datetime
from pathlib import Path

import msgspec
import pytest

from made_calibration import DEVICE
from made_profiles import MACHINE, full
from profiles.documents import device_profile
from profiles.documents.device_profile import (
    FIGURES,
    MEASURED,
    DeviceProfile,
    built_in,
    load_device,
)
from refusals import refused

GIB = 2**30
MEMORY = {
    "android-low": 2 * GIB,
    "android-middle": 6 * GIB,
    "jetson-orin-nano": 8 * GIB,
    "raspberry-pi-3b-plus": GIB,
    "raspberry-pi-4-2gb": 2 * GIB,
    "raspberry-pi-4-4gb": 4 * GIB,
    "raspberry-pi-4-8gb": 8 * GIB,
    "raspberry-pi-5-4gb": 4 * GIB,
    "raspberry-pi-5-8gb": 8 * GIB,
    "raspberry-pi-zero-2-w": GIB // 2,
    "x86-mini-pc": 16 * GIB,
}


def test_the_built_in_devices() -> None:
    assert {name: load_device(name).memory_bytes for name in built_in()} == MEMORY


@pytest.mark.parametrize("name", MEMORY)
def test_every_figure_has_a_source(name: str) -> None:
    device = load_device(name)
    given = {field for field in FIGURES if getattr(device, field) is not None}
    assert device.name == name
    assert device.sources.keys() - {MEASURED} == given
    assert all("https://" in source for source in device.sources.values())
    assert (device.calibration is not None) == (MEASURED in device.sources)
    datetime.date.fromisoformat(device.date)


def test_what_an_owner_has_sent_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published figures stay; the free disk space is that of one device only."""
    origin = "https://example.org/issues/7"
    (tmp_path / "board.toml").write_text(
        'name = "board"\ntitle = "Board 2"\ndate = "2026-01-01"\nclock_hz = 9\n'
        f'memory_bytes = 100\n[sources]\nclock_hz = "a book"\ncalibration = "{origin}"\n'
    )
    sent = msgspec.structs.replace(
        DEVICE,
        machine=MACHINE,
        memory_bytes=90,
        memory_available_bytes=70,
        storage_free_bytes=5,
        versions={"onnxruntime": "1.31.1"},
        trainings=(full(),),
        sources={"memory_bytes": "measured on the device"},
    )
    (tmp_path / "board.json").write_bytes(msgspec.json.encode(sent))
    monkeypatch.setattr(device_profile, "BUILT_IN", tmp_path)
    assert built_in() == ["board"]
    device = load_device("board")
    assert (device.name, device.title, device.date) == ("board", "Board 2", DEVICE.date)
    assert (device.clock_hz, device.memory_bytes, device.memory_available_bytes) == (9, 100, 70)
    assert device.storage_free_bytes is None
    assert (device.calibration, device.machine) == (DEVICE.calibration, MACHINE)
    assert (device.versions, device.trainings) == (sent.versions, sent.trainings)
    assert device.sources["clock_hz"] == "a book"
    assert device.sources["memory_available_bytes"] == origin


def test_a_calibration_alone_is_written_as_before() -> None:
    assert not {"versions", "trainings"} & msgspec.to_builtins(DEVICE).keys()


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(msgspec.json.encode(DEVICE))
    assert load_device(str(path)) == DEVICE
    assert DEVICE.age_days(datetime.date(2026, 11, 21)) == 20


def altered(**changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(DEVICE), **changes})


CALIBRATION = msgspec.to_builtins(DEVICE.calibration)
TIMING = CALIBRATION["timings"][0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "Input data was truncated"),
        (altered(memory="lots"), "Object contains unknown field `memory`"),
        (altered(date="soon"), "Invalid isoformat string: 'soon'"),
        (altered(name="\x1b[31mpi"), "Expected `str` matching"),
        (altered(cores=-4), "Expected `int` >= 1"),
        (altered(clock_hz=2**60), "Expected `int` <= "),
        (b'{"\xff": 1}', "it is not UTF-8 text"),
        (b'{"a": ' + b"[" * 10**5, ""),
        (
            altered(calibration={**CALIBRATION, "timings": [{**TIMING, "seconds": 0.0}]}),
            "Expected `float` >= 1e-09 - at `$.calibration.timings",
        ),
    ],
    ids=[
        *("cut", "unknown-field", "date", "controls", "cores", "clock", "not-utf-8", "deep"),
        "no-time",
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(content)
    with refused("profile.malformed") as caught:
        load_device(str(path))
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "alibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "document", "found"),
    [
        (altered(version=9), "device profile", 9),
        (altered(calibration={**CALIBRATION, "version": 7}), "calibration", 7),
    ],
    ids=["version", "calibration-version"],
)
def test_profiles_of_other_versions(
    tmp_path: Path, content: bytes, document: str, found: int
) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(content)
    with refused("profile.wrong-version", document=document, found=found, supported=1) as caught:
        load_device(str(path))
    assert f"version {found}" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "alibrate" in str(caught.value)


def test_toml_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    path.write_text("a = " + "[" * 5000)
    with refused("profile.malformed", "nested too deeply"):
        load_device(str(path))


def test_a_path_with_a_null_byte() -> None:
    for path in ("pi\0.json", "pi\0.toml"):
        with refused("profile.unreadable", path=path):
            load_device(path)


def test_a_device_that_is_not_known(tmp_path: Path) -> None:
    with refused("profile.unknown-device", device="toaster") as caught:
        load_device("toaster")
    assert "'toaster'" in str(caught.value)
    assert "edgetailor-agent calibrate --out FILE" in str(caught.value)
    assert ", ".join(sorted(MEMORY)) in str(caught.value)
    with refused("profile.unreadable", "No such file", path=str(tmp_path / "none.json")):
        load_device(str(tmp_path / "none.json"))


def test_figures_are_all_that_a_source_is_asked_for() -> None:
    others = {"version", "name", "date", "title", "machine", "calibration", "sources"}
    others |= {"versions", "trainings"}
    assert {*FIGURES, *others} == set(DeviceProfile.__struct_fields__)
