"""The profile document: its schema, reading it, and several that become one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from made_calibration import DEVICE
from made_profiles import MACHINE, full, made_phase, made_profile, sliced
from profiles.documents import bundle_profile as profiling
from profiles.documents import profile_schema
from profiles.documents.bundle_profile import Profile, this_machine
from profiles.documents.bundle_profile_reading import (
    decode_profile,
    encode_profile,
    read_profile,
    same_hardware,
)
from profiles.documents.profile_merging import merge
from profiles.errors import InputError
from refusals import refused

COMMITTED = Path(profile_schema.__file__).with_name("profile.schema.json")


def valid(document: Any) -> bool:
    rules = json.loads(COMMITTED.read_bytes())
    Draft202012Validator.check_schema(rules)
    return Draft202012Validator(rules).is_valid(document)


def test_the_committed_schema_is_that_of_the_structs() -> None:
    assert COMMITTED.read_bytes() == profile_schema.profile_schema(), (
        "run: python -m profiles.documents.profile_schema > profiles/documents/profile.schema.json"
    )


def test_a_document_fits_the_schema_and_a_wrong_one_does_not() -> None:
    document = json.loads(encode_profile(sliced()))
    assert valid(document)
    for change in (
        lambda d: d.pop("version"),
        lambda d: d.update(version=1),
        lambda d: d.update(colour="blue"),
        lambda d: d["phases"][0].update(role="backprop"),
        lambda d: d["phases"][0]["steady"].update(median_s=-1),
        lambda d: d["phases"][0]["memory"].update(peak_bytes="much"),
        lambda d: d["machine"].pop("python"),
    ):
        wrong = json.loads(encode_profile(sliced()))
        change(wrong)
        assert not valid(wrong)
        with pytest.raises(InputError) as caught:
            decode_profile(json.dumps(wrong).encode(), "pi.json")
        assert caught.value.code in ("profile.malformed", "profile.wrong-version")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "pi.json").write_bytes(encode_profile(sliced()))
    assert read_profile(tmp_path / "pi.json") == sliced()


@pytest.mark.parametrize(
    ("content", "found", "advice"),
    [
        (b'{"version": 1, "submodel": "full"}', 1, "edgetailor-agent profile BUNDLE --out FILE"),
        (b'{"version": 3}', 3, "Install the version"),
    ],
)
def test_profiles_of_other_versions(
    tmp_path: Path, content: bytes, found: int, advice: str
) -> None:
    (tmp_path / "pi.json").write_bytes(content)
    with refused("profile.wrong-version", advice, found=found, supported=2):
        read_profile(tmp_path / "pi.json")


def changed(place: str, value: object) -> bytes:
    """A valid document, except for `value` at `place`: keys and indices, separated by dots."""
    document = msgspec.to_builtins(full())
    *way, last = [int(key) if key.isdecimal() else key for key in place.split(".")]
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = value
    return msgspec.json.encode(document)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "pi.json is damaged"),
        (b"[]", "pi.json is damaged"),
        (b"{}", "pi.json has no profile version"),
        (b'{"version": "2"}', "pi.json has no profile version"),
        (b'{"version": 1, "round": {}}', "pi.json is neither a profile nor an evaluation"),
        (encode_profile(full())[:500], "pi.json is damaged"),
        (msgspec.json.encode(DEVICE), "pi.json is the profile of a device, not of a bundle"),
        (b'{"version": 2, "\xff": 1}', "it is not UTF-8 text"),
        (b'{"version": 2, "a": ' + b"[" * 10**5, "it is nested too deeply"),
        (changed("phases", [msgspec.to_builtins(full().phases[0])] * 1001), "length <= 1000"),
        (
            changed("phases.0.steady.p10_s", 1e8),
            "must be in ascending order - at `$.phases[0].steady`",
        ),
        (changed("phases.0.first_s", 1e300), "$.phases[0].first_s"),
        (changed("phases.0.memory.peak_bytes", 2**60), "$.phases[0].memory.peak_bytes"),
        (changed("machine.cpu_count", -4), "$.machine.cpu_count"),
        (changed("machine.model", "\x1b[31mPi"), "$.machine.model"),
        (changed("machine.model", "\u202eiP"), "$.machine.model"),
        (changed("submodel", "full\nINVALID"), "$.submodel"),
        (changed("submodel", "f" * 501), "$.submodel"),
        (changed("validity.invalid", ["\x9b31m"]), "$.validity.invalid"),
        (changed("batch_size", 0), "$.batch_size"),
        (changed("after.battery", 50), "$.after.battery"),
    ],
)
def test_what_is_no_profile(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "pi.json").write_bytes(content)
    with refused("profile.malformed", said):
        read_profile(tmp_path / "pi.json")


def test_what_a_system_says_is_made_fit_for_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree" / "model").write_bytes(b"Pi\x1b[31m 4\0")
    (tmp_path / "cpuinfo").write_text("model name\t: Fast\x07 core\n")
    monkeypatch.setattr(profiling, "PROC", tmp_path)
    found = this_machine("onnxruntime 1")
    assert (found.model, found.processor) == ("Pi [31m 4", "Fast  core")


def test_a_missing_file(tmp_path: Path) -> None:
    with refused("profile.unreadable", "No such file", path=str(tmp_path / "pi.json")):
        read_profile(tmp_path / "pi.json")


def test_merging_takes_the_median_the_widest_spread_and_the_highest_peak() -> None:
    together = merge([full(1.0), full(1.5), full(1.1)])
    assert together.train.median_s == pytest.approx(0.44)
    assert together.train.p10_s == pytest.approx(0.38)  # 0.4 less 5%
    assert together.train.p90_s == pytest.approx(0.63)  # 0.6 and 5%
    assert (together.train.runs, together.method.runs) == (60, 60)
    assert together.peak_bytes == 150_000_000
    assert together.validity.unstable == ("predict", "train")  # none of the three is by itself
    assert merge([full()]) == full()


@pytest.mark.parametrize(
    ("other", "code", "said"),
    [
        (
            lambda p: change_machine(p, model="Raspberry Pi 5 Model B Rev 1.0", cpu_count=8),
            "profile.other-machine",
            "cpu count (4 and 8), model (Raspberry Pi 4 Model B Rev 1.4 "
            "and Raspberry Pi 5 Model B Rev 1.0).",
        ),
        (
            lambda p: change_machine(p, runtime="onnxruntime 1.19.2"),
            "profile.other-machine",
            "runtime (onnxruntime 1.31.1 and onnxruntime 1.19.2)",
        ),
        (
            lambda p: msgspec.structs.replace(
                p, batch_size=8, method=msgspec.structs.replace(p.method, threads=2)
            ),
            "profile.other-method",
            "differ in batch size (32 and 8), threads (1 and 2): ",
        ),
        (
            lambda p: sliced(),
            "profile.other-bundle",
            "of full (000000000000) and of slice:blocks.3 (111111111111)",
        ),
        (
            lambda p: made_profile("full", made_phase("train", "train", 0.4, 1)),
            "profile.other-bundle",
            "these are of full (000000000000) and of full",
        ),
    ],
)
def test_merging_refuses(other: Callable[[Profile], Profile], code: str, said: str) -> None:
    with refused(code, said):
        merge([full(), other(full())])


def change_machine(profile: Profile, **fields: object) -> Profile:
    return msgspec.structs.replace(
        profile, machine=msgspec.structs.replace(profile.machine, **fields)
    )


def test_a_machine_stays_itself_after_an_update() -> None:
    updated = msgspec.structs.replace(MACHINE, system="Linux 6.18.1", memory_bytes=3_978_000_000)
    assert same_hardware(MACHINE, updated)
    assert not same_hardware(MACHINE, msgspec.structs.replace(MACHINE, cpu_count=2))


def test_this_machine() -> None:
    found = this_machine("onnxruntime 1.2.3")
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    assert found.runtime == "onnxruntime 1.2.3"
    assert found.processor == (names[0] if names else found.processor)
