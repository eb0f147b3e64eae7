"""Reading the built page: it is there, it is not there, or it is damaged and nothing is served."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from built_page import FILES, build_page
from refusals import refused
from toolkit.web.built_page import is_built, read_page

INDEX, SCRIPT, WASM = FILES


def test_there_or_not(tmp_path: Path) -> None:
    assert read_page(tmp_path / "nothing") is None
    assert not is_built(tmp_path / "nothing")
    folder = build_page(tmp_path / "built")
    assert is_built(folder)
    page = read_page(folder)
    assert page is not None
    assert list(page) == list(FILES)
    assert set(page[SCRIPT].bodies) == {"br", "gzip", "identity"}
    assert set(page[WASM].bodies) == {"br"}


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def unlisted(folder: Path) -> None:
    listed = json.loads((folder / "files.json").read_bytes())
    (folder / "files.json").write_text(json.dumps({SCRIPT: listed[SCRIPT]}))


@pytest.mark.parametrize(
    "damage",
    [
        without(f"{WASM}.br"),
        without(f"{SCRIPT}.gz"),
        unlisted,
        lambda folder: (folder / "files.json").write_text("{"),
        lambda folder: (folder / "files.json").write_text('{"index.html": {}}'),
        lambda folder: (folder / f"{SCRIPT}.gz").write_bytes(b"no gzip"),
        lambda folder: (folder / f"{SCRIPT}.gz").write_bytes(
            (folder / f"{SCRIPT}.gz").read_bytes()[:-9]
        ),
        lambda folder: (folder / f"{SCRIPT}.gz").write_bytes((folder / f"{INDEX}.gz").read_bytes()),
    ],
)
def test_a_damaged_page(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    folder = build_page(tmp_path / "built")
    damage(folder)
    with refused("web.damaged-page", "`make web`", path=str(folder)):
        read_page(folder)
