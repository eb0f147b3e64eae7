"""Opening a bundle: whatever is wrong with it is found and named before anything runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bundles import FAMILIES, BundleOf, rewrite
from device_agent.formats.atomic_files import fingerprint_file
from device_agent.formats.bundle import open_bundle
from device_agent.formats.manifest import MANIFEST, WEIGHTS
from profiles.errors import BundleError
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
    with pytest.raises(BundleError, match=r"weights\.safetensors cannot be read: .*nosuch"):
        opened.load(["nosuch"])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("name", [WEIGHTS, "train.onnx", "forward_0.onnx"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (lengthen, r"has [\d,]+ bytes instead of [\d,]+: something was written behind its end"),
        (cut_in_half, r"has [\d,]+ bytes instead of [\d,]+: truncated"),
        (flip_a_bit, r"was altered: its SHA-256 is not the manifest's"),
    ],
)
def test_a_damaged_file_is_named(
    copy: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(copy / name)
    with pytest.raises(BundleError, match=rf"{name} {message}\. Copy or export the bundle again"):
        open_bundle(copy)


def test_no_bundle_at_all(copy: Path, tmp_path: Path) -> None:
    advice = r"Give the folder that `edgetailor export --out` wrote\."
    with pytest.raises(BundleError, match=rf"nowhere is no bundle: manifest.json .*{advice}"):
        open_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=rf"train.onnx is no bundle: .*{advice}"):
        open_bundle(copy / "train.onnx")
    (copy / MANIFEST).unlink()
    with pytest.raises(BundleError, match=rf"bundle is no bundle: .*{advice}"):
        open_bundle(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01", '{"version": 1}'])
def test_a_manifest_that_is_none(copy: Path, text: str) -> None:
    (copy / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match=r"manifest\.json is not a bundle's manifest: "):
        open_bundle(copy)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(b'"\xff": 1', "it is not UTF-8 text"), (b'"a": ' + 10**5 * b"[", "it is nested too deeply")],
)
def test_a_manifest_that_cannot_be_decoded(copy: Path, extra: bytes, message: str) -> None:
    (copy / MANIFEST).write_bytes(b"{" + extra + b", " + (copy / MANIFEST).read_bytes()[1:])
    with pytest.raises(BundleError, match=rf"manifest\.json is not a bundle's manifest: {message}"):
        open_bundle(copy)


def test_a_truncated_manifest(copy: Path) -> None:
    cut_in_half(copy / MANIFEST)
    with pytest.raises(
        BundleError, match=r"manifest\.json is not a bundle's manifest: .*truncated"
    ):
        open_bundle(copy)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_format_version(copy: Path, version: object) -> None:
    rewrite(copy, lambda manifest: manifest.update(version=version, news={}))
    with pytest.raises(BundleError, match=rf"has format version {version}; this agent reads 1\."):
        open_bundle(copy)


@pytest.mark.parametrize(
    "name", ["../stolen", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "manifest.json"]
)
def test_file_names_stay_in_the_folder(copy: Path, name: str) -> None:
    (copy.parent / "stolen").write_bytes(b"")
    rewrite(copy, lambda m: m["files"].update({name: dict(m["files"][WEIGHTS])}))
    with pytest.raises(BundleError, match="which is no plain file name"):
        open_bundle(copy)


def outputs(manifest: Manifest, signature: str) -> list[Manifest]:
    return manifest["signatures"][signature]["outputs"]  # type: ignore[no-any-return]


def first_graph(manifest: Manifest) -> Manifest:
    return next(iter(manifest["signatures"].values()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: first_graph(m).update(graph="../x.onnx"), r"'\.\./x\.onnx', which it does not"),
        (lambda m: m["files"].pop(WEIGHTS), r"'weights\.safetensors', which it does not list"),
        (lambda m: m["files"].pop("train.onnx"), r"'train\.onnx', which it does not list"),
        (lambda m: m["schedule"][0].update(signature="no"), "runs the unknown signature 'no'"),
        (lambda m: m["schedule"][-1]["steps"][0].update(signature="no"), "unknown signature 'no'"),
        (lambda m: m["schedule"][-1].update(source="no"), "reads 'no' before it is recorded"),
        (lambda m: m["schedule"].reverse(), "reads 'activation_1' before it is recorded"),
        (lambda m: m["tensors"].pop(0), "uses the unknown tensor 'classifier.weight'"),
        (lambda m: m["schedule"][0].update(do="format the disk"), r"Invalid value 'format the di"),
        (lambda m: m.update(surprise=1), "unknown field `surprise`"),
        (lambda m: m.update(classes="ten"), "Expected `int`"),
        (lambda m: m.update(classes=0), "classes"),
        (lambda m: m.update(sample_shape=[1, 2**70]), "sample_shape"),
        (lambda m: first_graph(m).update(peak_bytes=-1), "peak_bytes"),
        (lambda m: m["tensors"][0].update(shape=[2**70]), "shape"),
        (lambda m: m["tensors"][0].update(shape=[-1]), "shape"),
        (lambda m: m["tensors"][0].update(shape=[2**20, 2**20]), "the impossible shape"),
        (lambda m: m["tensors"][0].update(shape=[9]), "another shape than its tensor"),
        (
            lambda m: m["tensors"][0].update(stands_for="../../x"),
            r"stands for '\.\./\.\./x'",
        ),
        (lambda m: m["tensors"][0].update(part=[[[0, 1]]]), "and another for its part"),
        (lambda m: m["tensors"].append(m["tensors"][0]), "describes the tensor '.*' twice"),
        (lambda m: outputs(m, "train").append(outputs(m, "train")[0]), r"gives 'train' the port"),
        (lambda m: outputs(m, "forward_0").clear(), "records 'forward_0', which has not one"),
        (lambda m: outputs(m, "train").pop(0), "has no output 'loss' in train"),
        (lambda m: outputs(m, "evaluate").pop(0), "has no output 'loss' in evaluate"),
        (lambda m: outputs(m, "train").pop(), r"calls '.*' a \w+, and no step replaces it"),
        (lambda m: m["schedule"][-1]["steps"][0]["inputs"].clear(), "no number for 'rate'"),
        (lambda m: m["signatures"].pop("predict"), "has no signature 'predict'"),
        (lambda m: m["schedule"].pop(), "manifest.json trains nothing"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    copy: Path, change: Callable[[Manifest], object], message: str
) -> None:
    rewrite(copy, change)
    with pytest.raises(BundleError, match=message):
        open_bundle(copy)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_manifest_that_contradicts_its_graph(copy: Path, data: str, side: str) -> None:
    def rename(manifest: Manifest) -> None:
        port = next(p for p in manifest["signatures"]["train"][side] if p["kind"] == "state")
        port["name"] = "another"

    rewrite(copy, rename)
    with pytest.raises(BundleError, match=rf"'train': the graph and .* differ in their {side}, by"):
        train_bundle(copy, data, copy.parent / "out")


@pytest.mark.parametrize("target", ["../escaped", "/tmp/escaped", "a/b"])
def test_recordings_stay_in_the_folder(copy: Path, target: str) -> None:
    def rename(manifest: Manifest) -> None:
        first, second = manifest["schedule"][:2]
        first["target"] = second["source"] = target

    rewrite(copy, rename)
    with pytest.raises(BundleError, match=f"'{target}'"):
        open_bundle(copy)


def test_a_graph_that_the_runtime_refuses(copy: Path, data: str) -> None:
    (copy / "train.onnx").write_bytes(b"no graph")
    rewrite(copy, lambda manifest: None)
    with pytest.raises(BundleError, match=r"train\.onnx is refused by onnxruntime \d"):
        train_bundle(copy, data, copy.parent / "out")
    assert [path.name for path in copy.parent.iterdir()] == ["bundle"]


def test_a_bundle_for_another_runtime(copy: Path, data: str) -> None:
    rewrite(copy, lambda manifest: manifest.update(runtime="tflite"))
    with pytest.raises(BundleError, match=r"runtime 'tflite'; .*again with --format onnx\."):
        train_bundle(copy, data, copy.parent / "out")


def test_weights_of_another_shape(copy: Path, data: str) -> None:
    tensors = load_file(copy / WEIGHTS)
    save_file({**tensors, "classifier.bias": np.zeros(7, np.float32)}, copy / WEIGHTS)
    rewrite(copy, lambda manifest: None)
    with pytest.raises(BundleError, match=r"classifier\.bias"):
        train_bundle(copy, data, copy.parent / "out")


def test_manifest_is_plain_json(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text("ascii"))
    assert manifest["version"] == 1
    assert set(manifest["files"]) == {p.name for p in bundle.iterdir()} - {MANIFEST}
