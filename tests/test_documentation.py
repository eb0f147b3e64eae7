"""The documentation against the code: generated pages, links, notebooks and examples."""

import ast
import doctest
import importlib
import re
import sys
from pathlib import Path

import msgspec
import nbformat
import pytest
from nbclient import NotebookClient

import edgetailor
from made_calibration import DEVICE
from made_profiles import MACHINE
from parameters import half_quick
from profiles.documents import device_profile

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import device_table  # noqa: E402
import generate  # noqa: E402

PUBLIC = [
    *("Aggregation", "AggregationPolicy", "Deployed", "DeviceProfile", "EdgeTailorError"),
    "ExportedBundle",
    *("Federation", "GlobalModel", "Predictor", "Submodel", "TrainingConfig", "UpdateRecord"),
    *("aggregate", "classes", "deploy", "evaluate"),
    *("export", "inspect", "join_inputs", "load_device", "load_model", "loss", "numbers"),
    *("pack_inputs", "plan", "profile"),
    *("read_partial", "read_update", "recover", "set_input_range", "simulate", "split", "train"),
    "write_partial",
]
RESULTS = (
    "Deployed",
    "DeviceProfile",
    "ExportedBundle",
    "Submodel",
    "UpdateRecord",
)  # returned, not made


@pytest.mark.parametrize("name", generate.PAGES_BY_NAME)
def test_generated_pages_are_current(name: str) -> None:
    written = (generate.PAGES / name).read_text("utf-8")
    assert written == generate.PAGES_BY_NAME[name](), "run `python docs/generate.py`"


def test_contributing_lists_every_folder() -> None:
    assert generate.tree() in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_every_error_has_a_code_of_the_agreed_form() -> None:
    codes = {site.code for site in generate.error_sites() if site.code is not None}
    assert len(codes) > 50
    assert not [code for code in codes if not re.fullmatch(r"[a-z]+\.[a-z]+(-[a-z0-9]+)*", code)]


def test_no_error_is_raised_without_a_code() -> None:
    assert not list(generate.raises_without_code())


def test_the_source_spells_out_every_message_and_gives_its_values() -> None:
    assert not list(generate.unreadable_errors())


@pytest.mark.parametrize(
    "call",
    [
        'InputError(f"No {path}.", code="x.y", path=path)',
        'InputError("No " + path, code="x.y", path=path)',
        'InputError("No {}.".format(path), code="x.y", path=path)',
        'InputError(message, code="x.y", path=path)',
        'InputError("No {path}.", code="x.y", file=path)',
        "InputError(f'[{key}] {error}', code=error.code, **error.values)",
    ],
)
def test_messages_that_are_no_templates_are_found(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    site = generate.error_site(node, "a.py:1", {"InputError"}, {})
    assert site is not None
    monkeypatch.setattr(generate, "error_sites", lambda: (site,))
    assert list(generate.unreadable_errors())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_outside_the_site_lead_somewhere(page: str) -> None:
    """`mkdocs build --strict` checks the links inside the site."""
    text = (ROOT / page).read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", " ".join(text.split()))
    paths = [link.strip() for link in links if "://" not in link]
    assert paths or page != "README.md"
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_threat_model_names_tests_that_exist() -> None:
    page = (DOCS / "guides" / "threat-model.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert named
    assert not [path for path in named if not (ROOT / "tests" / path).exists()]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150


@pytest.mark.long
@pytest.mark.parametrize("notebook", ["your-own-aggregation.ipynb", "your-own-model.ipynb"])
def test_notebooks_run(notebook: str, tmp_path: Path) -> None:
    document = nbformat.read(DOCS / "tutorials" / notebook, as_version=4)
    assert not [cell for cell in document.cells if cell.get("outputs")], "clear the outputs"
    NotebookClient(document, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_the_public_names() -> None:
    assert dir(edgetailor) == PUBLIC
    assert list(edgetailor.HOMES) == PUBLIC
    for name in PUBLIC:
        assert getattr(edgetailor, name).__doc__, name


@pytest.mark.parametrize("name", half_quick(name for name in PUBLIC if name not in RESULTS))
def test_examples_of_public_names_run(name: str, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    module, _, attribute = edgetailor.HOMES[name].partition(":")
    doctests = doctest.DocTestFinder(recurse=False).find(
        getattr(importlib.import_module(module), attribute or name), name
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctests:
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
    assert any(example.examples for example in doctests), f"{name} has no example"


def test_a_measurement_fills_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "board.toml").write_text(
        'name = "board"\ndate = "2026-01-01"\nprocessor = "Arm"\ncores = 4\n'
        f'memory_bytes = {4 * 2**30}\n[sources]\ncalibration = "https://example.org/issues/7"\n'
    )
    monkeypatch.setattr(device_profile, "BUILT_IN", tmp_path)
    assert "| `board` |  | Arm | 4 | 4.3 GB |  |  |  |  |  |\n" in device_table.page()
    sent = msgspec.structs.replace(DEVICE, machine=MACHINE)
    (tmp_path / "board.json").write_bytes(msgspec.json.encode(sent))
    assert (
        "| `board` |  | Arm | 4 | 4.3 GB | [2026-11-01](https://example.org/issues/7) | "
        "onnxruntime 1.31.1 | 1 to 1 GMAC/s, 27 sizes | 1 to 1 GMAC/s, 27 sizes |  |\n"
    ) in device_table.page()
    for machine in (
        None,
        msgspec.structs.replace(MACHINE, cpu_count=8),
        msgspec.structs.replace(MACHINE, memory_bytes=2**30),
    ):
        other = msgspec.structs.replace(DEVICE, machine=machine)
        (tmp_path / "board.json").write_bytes(msgspec.json.encode(other))
        with pytest.raises(ValueError, match="beside the profile of its board"):
            device_table.page()
