"""Where `edgetailor export` may write: it replaces only bundles and leaves no incomplete files."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from bundles import everything, tiny_model
from commands import refused
from device_agent.formats.atomic_files import check_file_place
from device_agent.formats.bundle_place import check_bundle_place
from edgetailor import split
from exporters.export import export, write_bundle
from exporters.recording.capture import SharedRecording
from profiles.errors import InputError
from refusals import refused as refused_by
from toolkit.exporting import model_export
from toolkit.submodels.global_model import from_model

NO_BUNDLE = "is not a bundle, so --force does not replace it: give another place."


def bundle(place: Path) -> None:
    place.mkdir(exist_ok=True)
    (place / "manifest.json").write_text("{}")


def thesis(place: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")


OCCUPIED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a folder of something else": ("out", thesis, f"out {NO_BUNDLE}"),
    "a file": ("out", Path.touch, f"out {NO_BUNDLE}"),
    "a link to nothing": ("out", lambda out: out.symlink_to("nowhere"), f"out {NO_BUNDLE}"),
    "the current folder": (".", lambda _: None, f". {NO_BUNDLE}"),
    "the current folder, a bundle": (
        ".",
        lambda out: bundle(out.parent),
        ". cannot be replaced, because the current folder is inside it: go to another folder "
        "first.",
    ),
}


@pytest.mark.parametrize("case", OCCUPIED)
def test_force_replaces_bundles_only(folder: Path, case: str) -> None:
    """The refusal comes before the search for the model, which does not exist."""
    out, make, message = OCCUPIED[case]
    make(folder / "out")
    options = ("nets:nothing", "--input-shape", "1", "--out", out)
    assert refused(folder, "export", *options, "--force") == message
    unasked = refused(folder, "export", *options)
    assert unasked == f"{out} exists already: give another place, or --force to replace it."


@pytest.mark.parametrize("make", [bundle, Path.mkdir])
def test_force_replaces_a_bundle_and_an_empty_folder(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "b")
    check_bundle_place(tmp_path / "b", force=True)
    write_bundle(tmp_path / "b", {"manifest.json": b"new"}, force=True)
    assert everything(tmp_path) == {"b": b"folder", "b/manifest.json": b"new"}


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for check in (check_file_place, check_bundle_place):
        with pytest.raises(InputError) as error:
            check(tmp_path / "b")
        assert str(error.value) == (
            f"{tmp_path / 'b'} cannot be written: {tmp_path} is read-only. Give another place."
        )


@pytest.mark.parametrize(
    "place", ["/proc/b", "x" * 250, f"{'x' * 250}/b"], ids=["no folder for files", "file", "folder"]
)
def test_a_place_that_the_system_refuses(tmp_path: Path, place: str) -> None:
    """Temporary files have longer names, so these are too long."""
    for check in (check_file_place, check_bundle_place):
        with refused_by("file.refused", path=str(tmp_path / place)):
            check(tmp_path / place)
    check_file_place(tmp_path / "b")
    assert everything(tmp_path) == {}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle(tmp_path / "old")
    before = everything(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    for name in ("new", "old"):
        with pytest.raises(InputError, match=rf"{name}: No space left on device"):
            write_bundle(tmp_path / name, {"manifest.json": b"new"}, force=True)
    assert everything(tmp_path) == before


def test_weights_that_a_full_disk_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(os, "fsync", full_disk)
    request = model_export.Request("m:m", (2,), "full", tmp_path / "b", save_weights=tmp_path / "w")
    full = split(model, "full", (2,))
    origin = model_export.Origin(model, from_model(model), SharedRecording(model, (2,)), full)
    with refused_by("file.system-error", file=str(tmp_path / "w")) as caught:
        model_export.save_weights(origin, request)
    assert "No space left on device" in str(caught.value)
    assert str(tmp_path / "b") in str(caught.value)
    assert everything(tmp_path) == {}


def test_a_failed_bundle_is_kept_beside_and_replaces_nothing_else(tmp_path: Path) -> None:
    model, source = tiny_model()
    submodel = split(model, "full", (1, 6, 6))
    thesis(tmp_path / "b.failed-verification")
    before = everything(tmp_path)
    place = str(tmp_path / "b.failed-verification")
    with refused_by("file.not-replaceable", file=place):
        export(submodel.program, submodel.cut(source), tmp_path / "b", base=source.fingerprint())
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["learning-rate", "weight-decay", "proximal"])
def test_numbers_that_no_float32_holds(folder: Path, name: str) -> None:
    options = ("nets:tiny", "--input-shape", "1,6,6", "--out", "b", f"--{name}", "1e39")
    assert refused(folder, "export", *options) == (
        f"{name.replace('-', '_')} must be at most 3.40282e+38, the largest float32; it is 1e+39."
    )


@pytest.mark.parametrize("name", ["epochs", "batch"])
def test_counts_that_no_runtime_holds(folder: Path, name: str) -> None:
    options = ("nets:tiny", "--input-shape", "1,6,6", "--out", "b", f"--{name}", 10**20)
    assert re.search(
        r"must be at most 2,147,483,647; it is 1000", refused(folder, "export", *options)
    )
