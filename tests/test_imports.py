"""Imports point one way: profiles <- device_agent <- exporters <- toolkit.

Proved twice: on the source of every module, and by importing the device side in a fresh process.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("profiles", "device_agent", "exporters", "toolkit")  # lowest first
DEVICE_SIDE = PACKAGES[:2]
SERVER_LIBRARIES = frozenset(
    {
        "torch",
        "onnx",
        "onnxscript",
        "tensorflow",
        "litert_torch",
        "sklearn",
        "fastapi",
        "pydantic",
        "matplotlib",
        "rich",
    }
)
OPTIONAL_ON_DEVICE = ("ai_edge_litert",)  # the [litert] extra, absent from most installs

# Run with a JSON list of packages; prints every module that is loaded after importing them whole.
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
packages, optional = json.loads(sys.argv[1])
for package in packages:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + "."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in optional:
                raise
print(json.dumps(sorted(sys.modules)))
"""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level name) of every absolute import, wherever in the module it stands."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                modules = [module]
            case _:
                continue
        yield from ((node.lineno, module.partition(".")[0]) for module in modules)


def violations(path: str, source: str) -> list[str]:
    """List what `source`, at `path` relative to the root, imports against the rule."""
    package = Path(path).parts[0]
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    found = []
    for line, name in imported(ast.parse(source, path)):
        if name in above:
            found.append(
                f"{path}:{line}: {package} imports {name}. Rule: {' <- '.join(PACKAGES)}, never "
                f"the other way. Move what both need down into {package}, or the caller up."
            )
        elif package in DEVICE_SIDE and name in SERVER_LIBRARIES:
            found.append(
                f"{path}:{line}: {package} imports {name}. Rule: {' and '.join(DEVICE_SIDE)} run "
                f"on devices and use no server-side library. Use numpy and a bundle's signatures, "
                f"or move this code to exporters or toolkit."
            )
    return found


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_import_points_down() -> None:
    found = [
        message
        for path in sources()
        for message in violations(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not found, "\n".join(["imports against the rule:", *found])


@pytest.mark.parametrize(
    ("path", "source", "line", "name"),
    [
        ("device_agent/a.py", "import numpy\nimport torch.nn\n", 2, "torch"),
        ("profiles/a.py", "def f():\n    from onnx import helper\n", 2, "onnx"),
        ("profiles/a.py", "import json, device_agent.files\n", 1, "device_agent"),
        ("device_agent/b/c.py", "import importlib\nimportlib.import_module('rich')", 2, "rich"),
        ("device_agent/a.py", "x = __import__('exporters.trace')", 1, "exporters"),
        ("exporters/a.py", "class A:\n  def f(self):\n    import toolkit\n", 3, "toolkit"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, line: int, name: str) -> None:
    [message] = violations(path, source)
    assert message.startswith(f"{path}:{line}: {path.partition('/')[0]} imports {name}. Rule: ")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("device_agent/a.py", "import onnxruntime\nfrom profiles.errors import EdgeTailorError"),
        ("device_agent/a.py", "from . import files\nfrom .rich import x"),
        ("exporters/a.py", "import torch, onnx, device_agent.manifest, profiles"),
        ("toolkit/a.py", "import exporters\nimport pydantic"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_every_package_folder_has_an_init() -> None:
    """Without one, a folder of the same name under tests/ could be imported in its place."""
    bare = {
        f"{path.parent.relative_to(ROOT)}/: add an __init__.py with a one-line docstring"
        for path in sources()
        if not (path.parent / "__init__.py").exists()
    }
    assert not bare, "\n".join(sorted(bare))


def test_the_device_side_loads_no_server_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, json.dumps([DEVICE_SIDE, OPTIONAL_ON_DEVICE])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.issuperset(DEVICE_SIDE)
    assert not loaded & {*SERVER_LIBRARIES, "exporters", "toolkit"}
