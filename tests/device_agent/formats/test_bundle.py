"""Opening a bundle: every fault is found and named before anything runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bundles import FAMILIES, BundleOf, flip_a_bit, rewrite
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import open_bundle
from device_agent.formats.manifest import MANIFEST, WEIGHTS
from device_agent.formats.manifest_validation import REPAIR
from profiles.errors import BundleError
from refusals import refused
from trainings import train_bundle

Manifest = dict[str, Any]


@pytest.fixture
def copy(bundle_of: BundleOf, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(bundle_of("slice"), tmp_path / "bundle")


def test_every_family_opens(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.manifest.submodel in FAMILIES.values()
    assert opened.sha256 == fingerprint_file(bundle / MANIFEST).sha256
    assert {path.name for path in bundle.iterdir()} == {MANIFEST, *opened.manifest.files}
    stored = {entry.name: entry for entry in opened.manifest.tensors if entry.stored}
    loaded = opened.load(stored)
    assert {n: (a.shape, a.dtype.name) for n, a in loaded.items()} == {
        n: (e.shape, e.dtype) for n, e in stored.items()
    }
    for signature in opened.manifest.signatures:
        assert opened.graph(signature).is_file()


def test_only_the_tensors_asked_for_are_loaded(bundle_of: BundleOf) -> None:
    opened = open_bundle(bundle_of("full"))
    assert list(opened.load(["bn.weight"])) == ["bn.weight"]
    with refused("bundle.unreadable-weights", "nosuch", file=WEIGHTS):
        opened.load(["nosuch"])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("name", [WEIGHTS, "train.onnx", "forward_0.onnx"])
@pytest.mark.parametrize(
    ("damage", "code", "change"),
    [
        (Path.unlink, "bundle.missing-file", None),
        (lengthen, "bundle.wrong-size", "appended"),
        (cut_in_half, "bundle.wrong-size", "truncated"),
        (lambda p: flip_a_bit(p, p.stat().st_size // 2), "bundle.altered-file", None),
    ],
)
def test_a_damaged_file_is_named(
    copy: Path, name: str, damage: Callable[[Path], None], code: str, change: str | None
) -> None:
    size = (copy / name).stat().st_size
    damage(copy / name)
    with refused(code, file=name) as caught:
        open_bundle(copy)
    said = str(caught.value)
    assert str(copy / name) in said
    assert said.endswith(REPAIR)
    if change is not None:
        actual = (copy / name).stat().st_size
        sizes = (caught.value.values[key] for key in ("found_bytes", "expected_bytes"))
        assert tuple(sizes) == (actual, size)
        assert f"{actual:,} bytes instead of {size:,}" in said
        assert change in said


def test_a_form_of_another_bundle_is_refused(copy: Path) -> None:
    """Its hash is not in the manifest, and the device would run it in place of the graph."""
    (copy / "train.winograd.onnx").write_bytes(b"")
    (copy / "notes.txt").write_text("other files may lie beside a bundle")
    with refused("bundle.foreign-file", file="train.winograd.onnx") as caught:
        open_bundle(copy)
    assert str(copy / "train.winograd.onnx") in str(caught.value)


def test_no_bundle_at_all(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", copy / "train.onnx", tmp_path / "empty"):
        with refused("bundle.not-a-bundle", folder=str(folder)) as caught:
            open_bundle(folder)
        assert f"{folder} " in str(caught.value)
        assert "`edgetailor export` or `edgetailor deploy` wrote" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01", '{"version": 1}'])
def test_a_manifest_that_is_none(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with refused("bundle.malformed-manifest", str(copy / MANIFEST)):
        open_bundle(copy)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(b'"\xff": 1', "it is not UTF-8 text"), (b'"a": ' + 10**5 * b"[", "it is nested too deeply")],
)
def test_a_manifest_that_cannot_be_decoded(copy: Path, extra: bytes, message: str) -> None:
    (copy / MANIFEST).write_bytes(b"{" + extra + b", " + (copy / MANIFEST).read_bytes()[1:])
    with refused("bundle.malformed-manifest", message):
        open_bundle(copy)


def test_a_truncated_manifest(copy: Path) -> None:
    cut_in_half(copy / MANIFEST)
    with refused("bundle.malformed-manifest", "truncated"):
        open_bundle(copy)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_format_version(copy: Path, version: object) -> None:
    rewrite(copy, lambda manifest: manifest.update(version=version, news={}))
    found = version if isinstance(version, int) else None
    with refused("bundle.wrong-version", f"version {version};", found=found, supported=1):
        open_bundle(copy)


@pytest.mark.parametrize(
    "name", ["../stolen", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "manifest.json"]
)
def test_file_names_stay_in_the_folder(copy: Path, name: str) -> None:
    (copy.parent / "stolen").write_bytes(b"")
    rewrite(copy, lambda m: m["files"].update({name: dict(m["files"][WEIGHTS])}))
    with refused("bundle.bad-file-name", file=name):
        open_bundle(copy)


def outputs(manifest: Manifest, signature: str) -> list[Manifest]:
    return manifest["signatures"][signature]["outputs"]  # type: ignore[no-any-return]


def first_graph(manifest: Manifest) -> Manifest:
    return next(iter(manifest["signatures"].values()))  # type: ignore[no-any-return]


def lists_no(file: str) -> tuple[str, dict[str, object]]:
    return "bundle.unlisted-file", {"file": file}


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (lambda m: first_graph(m).update(graph="../x.onnx"), *lists_no("../x.onnx")),
        (lambda m: m["files"].pop(WEIGHTS), *lists_no(WEIGHTS)),
        (lambda m: m["files"].pop("train.onnx"), *lists_no("train.onnx")),
        (
            lambda m: m["schedule"][0].update(signature="no"),
            "bundle.unknown-signature",
            {"signature": "no"},
        ),
        (
            lambda m: m["schedule"][-1]["steps"][0].update(signature="no"),
            "bundle.unknown-signature",
            {"signature": "no"},
        ),
        (
            lambda m: m["schedule"][-1].update(source="no"),
            "bundle.unrecorded-source",
            {"source": "no"},
        ),
        (
            lambda m: m["schedule"].reverse(),
            "bundle.unrecorded-source",
            {"source": "activation_1"},
        ),
        (
            lambda m: m["tensors"].pop(0),
            "bundle.unknown-tensor",
            {"tensor": "classifier.weight"},
        ),
        (
            lambda m: m["tensors"][0].update(shape=[2**20, 2**20]),
            "bundle.impossible-shape",
            {"tensor": "classifier.weight", "shape": [2**20, 2**20]},
        ),
        (lambda m: m["tensors"][0].update(shape=[9]), "bundle.wrong-port", {}),
        (
            lambda m: m["tensors"][0].update(stands_for="../../x"),
            "bundle.bad-global-name",
            {"stands_for": "../../x"},
        ),
        (lambda m: m["tensors"][0].update(part=[[[0, 1]]]), "bundle.wrong-part", {}),
        (
            lambda m: m["tensors"].append(m["tensors"][0]),
            "bundle.duplicate-tensor",
            {"tensor": "classifier.weight"},
        ),
        (
            lambda m: outputs(m, "train").append(outputs(m, "train")[0]),
            "bundle.duplicate-port",
            {"signature": "train"},
        ),
        (
            lambda m: outputs(m, "forward_0").clear(),
            "bundle.wrong-recording",
            {"signature": "forward_0"},
        ),
        (
            lambda m: outputs(m, "train").pop(0),
            "bundle.missing-output",
            {"output": "loss", "signatures": ["train"]},
        ),
        (
            lambda m: outputs(m, "evaluate").pop(0),
            "bundle.missing-output",
            {"output": "loss", "signatures": ["evaluate"]},
        ),
        (lambda m: outputs(m, "train").pop(), "bundle.untrained-tensor", {}),
        *(
            (
                lambda m, parts=parts: outputs(m, "predict")[0].update(parts=parts),
                "bundle.wrong-parts",
                {"signature": "predict", "port": "output"},
            )
            for parts in (
                [],
                [{"name": "a", "shape": [2]}, {"name": "a", "shape": [1]}],  # 3 classes in all
                [{"name": "a", "shape": [2]}, {"name": "", "shape": [1]}],
                [{"name": "a", "shape": [2]}],
                [{"name": "../a", "shape": [3]}],
                [{"name": "a", "shape": [3], "dtype": "int64", "limit": 2**25}],
            )
        ),
        (
            lambda m: m["schedule"][-1]["steps"][0]["inputs"].clear(),
            "bundle.missing-input",
            {"input": "rate"},
        ),
        (
            lambda m: m["signatures"].pop("predict"),
            "bundle.missing-signature",
            {"signature": "predict"},
        ),
        (lambda m: m["schedule"].pop(), "bundle.no-training", {}),
    ],
)
def test_a_manifest_that_contradicts_itself(
    copy: Path, change: Callable[[Manifest], object], code: str, values: dict[str, object]
) -> None:
    rewrite(copy, change)
    with refused(code, **values) as caught:
        open_bundle(copy)
    said = str(caught.value)
    assert said.startswith(str(copy / MANIFEST))
    assert all(repr(value) in said for value in values.values() if isinstance(value, str))
    assert said.endswith(REPAIR)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["schedule"][0].update(do="format the disk"), "'format the disk'"),
        (lambda m: m.update(surprise=1), "unknown field `surprise`"),
        (lambda m: m.update(classes="ten"), "Expected `int`"),
        (lambda m: m.update(classes=0), "classes"),
        (lambda m: m.update(sample_shape=[1, 2**70]), "sample_shape"),
        (lambda m: first_graph(m).update(peak_bytes=-1), "peak_bytes"),
        (lambda m: m["tensors"][0].update(shape=[2**70]), "shape"),
        (lambda m: m["tensors"][0].update(shape=[-1]), "shape"),
    ],
)
def test_a_manifest_with_wrong_types(
    copy: Path, change: Callable[[Manifest], object], named: str
) -> None:
    rewrite(copy, change)
    with refused("bundle.malformed-manifest", named):
        open_bundle(copy)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_manifest_that_contradicts_its_graph(copy: Path, data: str, side: str) -> None:
    def rename(manifest: Manifest) -> None:
        port = next(p for p in manifest["signatures"]["train"][side] if p["kind"] == "state")
        port["name"] = "another"

    rewrite(copy, rename)
    with refused("bundle.wrong-graph", side=side) as caught:
        train_bundle(copy, data, copy.parent / "out")
    assert isinstance(caught.value, BundleError)
    assert "'train'" in str(caught.value)
    assert side in str(caught.value)


@pytest.mark.parametrize("target", ["../escaped", "/tmp/escaped", "a/b"])
def test_recordings_stay_in_the_folder(copy: Path, target: str) -> None:
    def rename(manifest: Manifest) -> None:
        first, second = manifest["schedule"][:2]
        first["target"] = second["source"] = target

    rewrite(copy, rename)
    with refused("bundle.bad-recording-name", f"'{target}'", recording=target):
        open_bundle(copy)


def test_nothing_is_recorded_twice_or_after_the_training(copy: Path) -> None:
    def again(manifest: Manifest) -> None:
        manifest["schedule"].insert(0, dict(manifest["schedule"][0]))

    def late(manifest: Manifest) -> None:
        del manifest["schedule"][0]
        manifest["schedule"].append({**first, "target": "late"})

    first = json.loads((copy / "manifest.json").read_text())["schedule"][0]
    rewrite(copy, again)
    with refused("bundle.repeated-recording", recording=first["target"]):
        open_bundle(copy)
    rewrite(copy, late)
    with refused("bundle.after-training", signature=first["signature"]):
        open_bundle(copy)


def test_a_graph_that_the_runtime_refuses(copy: Path, data: str) -> None:
    (copy / "train.onnx").write_bytes(b"")
    rewrite(copy, lambda manifest: None)
    with refused("bundle.unusable-graph", graph="train.onnx") as caught:
        train_bundle(copy, data, copy.parent / "out")
    assert re.search(r"onnxruntime \d", str(caught.value))
    assert [path.name for path in copy.parent.iterdir()] == ["bundle"]


def test_a_bundle_for_another_runtime(copy: Path, data: str) -> None:
    rewrite(copy, lambda manifest: manifest.update(runtime="tflite"))
    with refused("bundle.unknown-runtime", "--format onnx", runtime="tflite"):
        train_bundle(copy, data, copy.parent / "out")


def test_weights_of_another_shape(copy: Path, data: str) -> None:
    tensors = load_file(copy / WEIGHTS)
    save_file({**tensors, "classifier.bias": np.zeros(7, np.float32)}, copy / WEIGHTS)
    rewrite(copy, lambda manifest: None)
    with refused("bundle.wrong-tensor", tensor="classifier.bias"):
        train_bundle(copy, data, copy.parent / "out")


def test_manifest_is_plain_json(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text("ascii"))
    assert manifest["version"] == 1
    assert set(manifest["files"]) == {p.name for p in bundle.iterdir()} - {MANIFEST}
