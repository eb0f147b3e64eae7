"""Hostile and damaged partial aggregates are refused, and change nothing."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import load, save

from device_agent.formats.atomic_files import fingerprint
from edgetailor import Aggregation, AggregationPolicy, GlobalModel, read_partial, write_partial
from profiles.errors import EdgeTailorError
from refusals import refused
from toolkit.aggregation.partial_aggregates.partial import decode_partial, encode_partial
from toolkit.aggregation.partial_aggregates.partial_record import RECORD, TENSORS
from updates import entry, numbers, record_of

Array = np.ndarray
CLASSES, RANK = 3, 2
SHAPES = {"w": (CLASSES, 4), "v": (5,), "bn.running_var": (5,)}
MODEL = GlobalModel(
    {name: torch.from_numpy(np.abs(numbers(shape, 7))) for name, shape in SHAPES.items()}
    | {"count": torch.tensor(3)}
)
POLICY = AggregationPolicy()


def site() -> Aggregation:
    """A full update, one of a part of `w`, and one of factors with some classes."""
    aggregation = Aggregation(MODEL, POLICY)
    table = tuple(entry(name, shape, name) for name, shape in SHAPES.items())
    arrays = {name: np.abs(numbers(shape, 1)) for name, shape in SHAPES.items()}
    aggregation.add(record_of("full", 4, table), arrays)
    part = (((0, CLASSES),), ((0, 2),))
    narrow = (entry("w", (CLASSES, 2), "w", part=part),)
    aggregation.add(record_of("width:0.5", 2, narrow), {"w": numbers((CLASSES, 2), 2)})
    factors = (
        replace(entry("w#0", (CLASSES, RANK), "w", "0"), by_class=True),
        entry("w#1", (4, RANK), "w", "1"),
    )
    values = {e.name: numbers(e.shape, 3) for e in factors}
    aggregation.add(replace(record_of("cp:2.0", 6, factors), classes=(0, 2)), values)
    return aggregation


FILES = encode_partial(site())
Record = dict[str, Any]
Tensors = dict[str, Array]


def altered(
    about: Callable[[Record], object] | None = None,
    sums: Callable[[Tensors], object] | None = None,
    files: Mapping[str, bytes] = FILES,
) -> dict[str, bytes]:
    """The files with another record and other tensors; the hash in the record fits them."""
    record, tensors = json.loads(files[RECORD]), load(files[TENSORS])
    if sums is not None:
        sums(tensors)
    return rehashed(record, files[TENSORS] if sums is None else save(tensors), about)


def rehashed(
    record: Record, data: bytes, about: Callable[[Record], object] | None = None
) -> dict[str, bytes]:
    of = fingerprint(data)
    record["file"] = {"size": of.size, "sha256": of.sha256}
    if about is not None:
        about(record)
    return {RECORD: json.dumps(record).encode(), TENSORS: data}


def assert_refused(files: Mapping[str, bytes], code: str, **values: object) -> None:
    """Refused; the message says what to do in a sentence of its own."""
    with refused(code, **values) as caught:
        decode_partial(files, MODEL, POLICY)
    if code.startswith("partial."):
        assert re.search(r"[.:] [A-Za-z][^.:]*\.$|: [a-z][^:]*\.$", str(caught.value)), caught.value


def test_the_files_are_taken_as_they_are() -> None:
    assert decode_partial(altered(), MODEL, POLICY).updates == 3
    assert decode_partial(altered(sums=lambda _: None), MODEL, POLICY).updates == 3


LOW = "low|sum|w"


def put(name: str, place: Any, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].__setitem__(place, value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e30, -3e38])
@pytest.mark.parametrize("name", [LOW, "low|factors|cp:2.0|w#1"])
def test_sums_that_are_not_numbers(name: str, value: float) -> None:
    files = altered(sums=put(name, (0, 0), value))
    assert_refused(files, "partial.not-finite", tensor=name.rpartition("|")[2])


@pytest.mark.parametrize(
    ("sums", "code"),
    [
        (lambda t: t.update({LOW: np.zeros((4, 3), np.float32)}), "partial.wrong-shape"),
        (lambda t: t.update({LOW: t[LOW].astype(np.float64)}), "partial.wrong-shape"),
        (lambda t: t.update({LOW: t[LOW].astype(np.int32)}), "partial.wrong-shape"),
        (lambda t: t.update(extra=np.zeros(1, np.float32)), "partial.unexpected-tensor"),
        (lambda t: t.update({"low|sum|count": t.pop(LOW)}), "partial.unexpected-tensor"),
        (lambda t: t.pop(LOW), "partial.missing-tensor"),
        (lambda t: t.update({f"high{LOW[3:]}": t.pop(LOW)}), "partial.missing-tensor"),
        (put("high|sum|bn.running_var", 0, -1e-3), "partial.negative-variance"),
        # Row 1 of the classifier is of a class that no device has.
        (put("low|factors|cp:2.0|w#0", (1, 0), 1.0), "partial.unweighted-sum"),
    ],
)
def test_sums_of_something_else(sums: Callable[[Tensors], object], code: str) -> None:
    assert_refused(altered(sums=sums), code)


def weigh(value: float, entry: int = 0) -> Callable[[Record], object]:
    return lambda record: record["sums"][entry]["weights"][0].update(weight=value)


def factors(**values: Any) -> Callable[[Record], object]:
    return lambda record: record["factors"][0].update(values)


def part(ranges: Any) -> Callable[[Record], object]:
    def change(record: Record) -> None:
        (sum_of_w,) = (entry for entry in record["sums"] if entry["name"] == "w")
        sum_of_w["weights"][-1]["part"] = ranges

    return change


def again(key: str) -> Callable[[Record], object]:
    return lambda record: record[key].append(record[key][0])


W = next(n for n, one in enumerate(json.loads(FILES[RECORD])["sums"]) if one["name"] == "w")
WHOLE = [[[0, 3]], [[0, 2]]]


@pytest.mark.parametrize(
    ("about", "code"),
    [
        (lambda r: r.update(base="0" * 64), "partial.other-model"),
        (lambda r: r.update(policy="0" * 64), "partial.other-policy"),
        (lambda r: r.update(version=2), "partial.wrong-version"),
        (lambda r: r.update(updates=0), "partial.malformed-record"),
        (lambda r: r.update(updates=-1), "partial.malformed-record"),
        (lambda r: r.update(updates=10**400), "partial.malformed-record"),
        (lambda r: r.update(updates=10**12), "partial.too-many-updates"),
        (lambda r: r.update(extra=1), "partial.malformed-record"),
        (lambda r: r.pop("sums"), "partial.malformed-record"),
        (weigh(-1.0), "partial.wrong-weight"),
        (weigh(0.0), "partial.wrong-weight"),
        (weigh(1e-300), "partial.wrong-weight"),
        (weigh(0.5), "partial.wrong-weight"),
        (weigh(3.1e12), "partial.wrong-weight"),
        (weigh(1e308), "partial.wrong-weight"),
        (weigh(float("nan")), "partial.malformed-record"),
        (weigh(float("inf")), "partial.malformed-record"),
        # Two parts, each possible; where both are, they weigh more than three updates can.
        (
            lambda r: [w.update(weight=2e12) for w in r["sums"][W]["weights"]],
            "partial.wrong-weight",
        ),
        (lambda r: r["sums"][0].update(weights=[]), "partial.wrong-parts"),
        (
            lambda r: r["sums"][0]["weights"].append(r["sums"][0]["weights"][0]),
            "partial.wrong-parts",
        ),
        (part([[[0, 4]], [[0, 2]]]), "update.wrong-slice"),
        (part([[[-1, 3]], [[0, 2]]]), "partial.malformed-record"),
        (part([[[0, 3]]]), "update.wrong-slice"),
        (part([]), "update.wrong-slice"),
        (part([[[0, 3]], [[0, 2], [1, 3]]]), "update.wrong-slice"),
        (part([[[0, 3]], []]), "update.wrong-slice"),
        (part([[[0, 10**30]], [[0, 2]]]), "partial.malformed-record"),
        (again("sums"), "partial.repeated-name"),
        (again("trained"), "partial.repeated-name"),
        (again("factors"), "partial.repeated-name"),
        (lambda r: r["sums"][0].update(name="x"), "partial.unknown-parameter"),
        (lambda r: r["sums"][0].update(name="count"), "partial.unknown-parameter"),
        (lambda r: r["trained"].append("x"), "partial.unknown-parameter"),
        (lambda r: r.update(sums=[], factors=[], trained=[]), "partial.empty"),
        (factors(submodel="cp:3.0"), "partial.unexpected-tensor"),
        (factors(submodel="cp:2.0,penalty=3"), "partial.unexpected-factors"),
        (factors(submodel="low-rank:0.5"), "partial.unexpected-factors"),
        (factors(submodel="no-such"), "update.unknown-submodel"),
        (factors(weight=-6.0), "partial.wrong-weight"),
        (factors(weight=1e300), "partial.wrong-weight"),
        (factors(all_classes=-1.0), "partial.wrong-weight"),
        (factors(all_classes=7.0), "partial.wrong-classes"),
        (factors(all_classes=2.0), "partial.wrong-classes"),
        (factors(classes=[]), "partial.wrong-classes"),
        (factors(classes=[[2, 6.0], [0, 6.0]]), "partial.wrong-classes"),
        (factors(classes=[[0, 6.0], [0, 6.0]]), "partial.wrong-classes"),
        (factors(classes=[[0, 6.0], [3, 6.0]]), "partial.wrong-classes"),
        (factors(classes=[[0, 6.0], [2, 9.0]]), "partial.wrong-classes"),
        (factors(classes=[[0, 6.0], [2, -1.0]]), "partial.wrong-weight"),
        (lambda r: r["factors"][0]["tensors"].pop(), "update.wrong-factors"),
        (lambda r: r["factors"][0]["tensors"][0].update(shape=[3, 10**9]), "update.wrong-rank"),
        (lambda r: r["factors"][0]["tensors"][1].update(shape=[4]), "update.wrong-factors"),
        (lambda r: r["factors"][0]["tensors"][1].update(shape=[5, 2]), "update.wrong-shape"),
        (lambda r: r["factors"][0]["tensors"][0].update(role="personal"), "update.wrong-role"),
        (
            lambda r: r["factors"][0]["tensors"][0].update(stands_for="x"),
            "update.unknown-parameter",
        ),
        (lambda r: r["file"].update(size=1), "partial.altered-file"),
    ],
)
def test_records_that_no_site_writes(about: Callable[[Record], object], code: str) -> None:
    assert_refused(altered(about), code)


def test_repeated_keys() -> None:
    """The last one would count here, and the first one elsewhere."""
    text = FILES[RECORD].decode()
    for old, new in (
        ('"updates": 3', '"updates": 3, "updates": 3'),
        ('"part": null', '"part": null, "part": null'),
    ):
        assert old in text
        files = {**FILES, RECORD: text.replace(old, new, 1).encode()}
        assert_refused(files, "partial.malformed-record")
    header = FILES[TENSORS][8 : 8 + length(FILES[TENSORS])].rstrip()
    first = re.match(rb'\{("[^"]*":\{[^}]*\}),', header)
    assert first is not None
    again = b"{" + first.group(1) + b"," + header[1:]
    data = with_header(again, FILES[TENSORS])
    assert_refused(rehashed(json.loads(FILES[RECORD]), data), "partial.unreadable-tensors")


def length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data[8 + length(data) :]


def test_headers() -> None:
    data, record = FILES[TENSORS], json.loads(FILES[RECORD])
    header = json.loads(data[8 : 8 + length(data)])

    def moved(begin: int, end: int) -> bytes:
        entry = {**header[LOW], "data_offsets": [begin, end]}
        return with_header(json.dumps({**header, LOW: entry}).encode(), data)

    begin, end = header[LOW]["data_offsets"]
    for broken, code in (
        (with_header(b" " * 10**6 + json.dumps(header).encode(), data), "partial.too-large"),
        (with_header(json.dumps(header).encode(), data) + b"\0" * 4, "partial.unreadable-tensors"),
        ((2**63).to_bytes(8, "little") + data[8:], "partial.unreadable-tensors"),
        (with_header(b"[" * 2000, data), "partial.unreadable-tensors"),
        (with_header(b"\xff\xfe", data), "partial.unreadable-tensors"),
        (b"", "partial.unreadable-tensors"),
        (data[:-4], "partial.unreadable-tensors"),
        (moved(0, end - begin), "partial.unreadable-tensors"),
        (moved(begin, end + 4), "partial.unreadable-tensors"),
        (moved(-4, end), "partial.unreadable-tensors"),
        (moved(10**30, end), "partial.unreadable-tensors"),
    ):
        assert_refused(rehashed(dict(record), broken), code)


def test_sizes_above_the_limits() -> None:
    with refused("partial.too-large", file=TENSORS, limit_bytes=100):
        decode_partial(FILES, MODEL, POLICY, most_bytes=100)
    large = {**FILES, TENSORS: FILES[TENSORS] + bytes(2 << 20)}
    assert_refused(large, "partial.too-large", file=TENSORS)
    large = {**FILES, RECORD: FILES[RECORD] + b" " * (17 << 20)}
    assert_refused(large, "partial.too-large", file=RECORD)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert_refused({RECORD: FILES[RECORD]}, "partial.missing-file")
    assert_refused({**FILES, "model.pkl": b""}, "partial.missing-file")
    with refused("partial.missing-file", file=RECORD):
        read_partial(tmp_path, MODEL, POLICY)
    write_partial(tmp_path / "site", site())
    (tmp_path / "site" / TENSORS).unlink()
    with refused("partial.missing-file", file=TENSORS):
        read_partial(tmp_path / "site", MODEL, POLICY)


def test_a_site_whose_training_diverged_writes_nothing() -> None:
    aggregation = Aggregation(MODEL, POLICY)
    table = (entry("v", (5,), "v"),)
    aggregation.add(record_of("full", 10**12, table), {"v": np.full(5, 1e25, np.float32)})
    with refused("partial.not-finite", tensor="v"):
        encode_partial(aggregation)


def test_another_policy_is_refused() -> None:
    for policy in (AggregationPolicy(beta=1.8), AggregationPolicy("uniform")):
        with refused("partial.other-policy"):
            decode_partial(FILES, MODEL, policy)


@settings(max_examples=300)
@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    """Bytes altered, removed or added, with hashes that fit: refused, or a finite model."""
    name = data.draw(st.sampled_from([RECORD, TENSORS]))
    body = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["set", "remove", "add", "cut"])):
            case "set":
                body[at] = data.draw(st.integers(0, 255))
            case "remove":
                del body[at : at + data.draw(st.integers(1, 40))]
            case "add":
                body[at:at] = data.draw(st.sampled_from([b"9", b"0", b'"', b"-", b"[[", b"\0"]))
            case "cut":
                del body[at:]
        body = body or bytearray(b" ")
    if name == TENSORS:
        files = rehashed(json.loads(FILES[RECORD]), bytes(body))
    else:
        files = {**FILES, RECORD: bytes(body)}
    try:
        new = decode_partial(files, MODEL, POLICY).result()
    except EdgeTailorError:
        return
    assert all(bool(torch.isfinite(value).all()) for value in new.tensors.values())
