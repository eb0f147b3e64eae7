"""Importing the device side in a fresh process loads no server library.

The static rule, which room may import which, is in `pyproject.toml` and checked by `lint-imports`.
"""

import json

from commands import ROOT, run_code

PACKAGES = ("profiles", "device_agent", "exporters", "toolkit", "edgetailor")  # lowest first
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
OPTIONAL_ON_DEVICE = ("ai_edge_litert",)  # an extra, absent from most installs

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


def test_every_package_folder_has_an_init() -> None:
    """Without one, a folder of the same name under tests/ could be imported in its place."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    bare = {
        f"{path.parent.relative_to(ROOT)}/: add an __init__.py that says what is in the folder"
        for path in sources
        if "node_modules" not in path.parts and not (path.parent / "__init__.py").exists()
    }
    assert not bare, "\n".join(sorted(bare))


def test_the_device_side_loads_no_server_library() -> None:
    done = run_code(IMPORT_EVERYTHING, json.dumps([DEVICE_SIDE, OPTIONAL_ON_DEVICE])).succeeded()
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.issuperset(DEVICE_SIDE)
    assert not loaded & {*SERVER_LIBRARIES, "exporters", "toolkit"}
