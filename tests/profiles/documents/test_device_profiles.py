"""Device profiles: the built-in ones and their sources, and files that are none."""

import datetime
from pathlib import Path

import msgspec
import pytest

from made_calibration import DEVICE
from profiles.documents.device_profile import FIGURES, DeviceProfile, built_in, load_device
from profiles.errors import InputError

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
    assert device.sources.keys() == given
    assert all("https://" in source for source in device.sources.values())
    assert device.calibration is None
    datetime.date.fromisoformat(device.date)


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
        (b"{", "is no device profile: Input data was truncated"),
        (altered(memory="lots"), "is no device profile: Object contains unknown field `memory`"),
        (altered(date="soon"), "is no device profile: Invalid isoformat string: 'soon'"),
        (altered(name="\x1b[31mpi"), "is no device profile: Expected `str` matching"),
        (altered(cores=-4), "is no device profile: Expected `int` >= 1"),
        (altered(clock_hz=2**60), "is no device profile: Expected `int` <= "),
        (b'{"\xff": 1}', "is no device profile: it is not UTF-8 text"),
        (b'{"a": ' + b"[" * 10**5, "is no device profile: "),
        (
            altered(calibration={**CALIBRATION, "timings": [{**TIMING, "seconds": 0.0}]}),
            "is no device profile: Expected `float` >= 1e-09 - at `$.calibration.timings",
        ),
        (altered(version=9), "holds a device profile of version 9; this program reads 1"),
        (
            altered(calibration={**msgspec.to_builtins(DEVICE.calibration), "version": 7}),
            "holds a calibration of version 7; this program reads 1",
        ),
    ],
    ids=[
        *("cut", "unknown-field", "date", "controls", "cores", "clock", "not-utf-8", "deep"),
        *("no-time", "version", "calibration-version"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        load_device(str(path))
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "alibrate" in str(refused.value)


def test_a_device_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load_device("toaster")
    assert str(refused.value) == (
        "There is no device profile 'toaster': give a file that `edgetailor-agent calibrate --out "
        f"FILE` wrote, or one of {', '.join(sorted(MEMORY))}."
    )
    with pytest.raises(InputError, match=r"none\.json cannot be read: No such file"):
        load_device(str(tmp_path / "none.json"))


def test_figures_are_all_that_a_source_is_asked_for() -> None:
    others = {"version", "name", "date", "title", "machine", "calibration", "sources"}
    assert {*FIGURES, *others} == set(DeviceProfile.__struct_fields__)
