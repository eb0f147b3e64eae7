"""Check a model reference by reading source files: nothing is imported, so a typo costs no time.

Importing a model's module usually imports torch, which takes seconds.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from profiles.errors import ModelError

DYNAMIC = ("__path__", "sys.modules", "globals(", "exec(", "setattr(", "__getattr__")
"""Words in a module's source that may create names or submodules which the text does not show."""
MOST_NAMES = 12
"""The most names that a message lists when no name of the module is similar."""


def parse_reference(reference: str) -> tuple[str, str]:
    """Split `package.module:callable` into module and callable.

    Raises:
        ModelError: The text is not a reference, or it names a file in place of a module.
    """
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ModelError(
            "Invalid model {model!r}: write package.module:callable, for example "
            "toolkit.models:resnet20.",
            code="model.invalid-reference",
            model=reference,
        )
    if os.sep in module_name or module_name.endswith(".py"):
        raise _file_as_module(reference, module_name, name)
    return module_name, name


def check_reference(reference: str) -> None:
    """Refuse a misspelt `package.module:callable` without importing the module.

    A module that cannot be judged from its source passes; loading the model decides then.

    Args:
        reference: The model reference as the user wrote it.

    Raises:
        ModelError: The text is not a reference, no such module exists, or the module's source
            does not define the callable. The message suggests similar names.
    """
    module_name, name = parse_reference(reference)
    found = _find_module(reference, module_name)
    source = None if found is None else _source_of(found)
    if found is None or source is None:
        return
    defined = _defined_names(source)
    if defined is None or name in defined or _is_submodule(found, name):
        return
    near = get_close_matches(name, sorted(defined))
    hint = f"Did you mean {_listed(near)}?" if near else _contents(source)
    raise ModelError(
        "Module {module} has no callable {callable!r}. {hint}",
        code="model.unknown-callable",
        model=reference,
        module=module_name,
        callable=name,
        hint=hint,
    )


def _file_as_module(reference: str, file: str, name: str) -> ModelError:
    """The error for a reference to a file, with the reference to write in its place."""
    path = Path(os.path.relpath(file).removesuffix(".py"))
    first = ""
    if path.parts[0] == os.pardir:
        path, first = Path(path.name), f"change to the folder {os.path.dirname(file)} and "
    suggested = f"{'.'.join(path.parts)}:{name}"
    return ModelError(
        "Invalid model {model!r}: it names a file, but a model is named by its module. To use "
        "this file, {first}write {suggested}.",
        code="model.invalid-reference",
        model=reference,
        suggested=suggested,
        first=first,
    )


def _find_module(reference: str, module_name: str) -> ModuleSpec | None:
    """Find `module_name` part by part without running a parent package; None if undecided."""
    path: list[str] | None = None
    found: ModuleSpec | None = None
    parts = module_name.split(".")
    for number, part in enumerate(parts, 1):
        if not part.isidentifier():
            return None
        parent, found = found, _find(".".join(parts[:number]), path)
        if found is None:
            if parent is not None and (path is None or _creates_names(parent)):
                return None
            _refuse_module(reference, module_name, ".".join(parts[:number]), path)
        assert found is not None
        locations = found.submodule_search_locations
        path = None if locations is None else list(locations)
    return found


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Ask every finder for `name`; the current folder counts, as it does when a model is loaded."""
    here = PathFinder.find_spec(name, [os.getcwd()]) if path is None else None
    if here is not None and here.origin is not None:
        return here
    # A folder without code of its own is taken only if no package has its name.
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), here)


def _refuse_module(reference: str, module_name: str, missing: str, path: list[str] | None) -> None:
    """Raise ModelError for the module `missing`, with similar modules beside it."""
    part = missing.rpartition(".")[2]
    folders = [os.getcwd(), *sys.path] if path is None else path
    beside = sorted({found for folder in folders for found in _modules_in(Path(folder))})
    near = get_close_matches(part, beside)
    hint = f" Did you mean {_listed(near)}?" if near else ""
    raise ModelError(
        "Cannot import {module_name}: No module named {module!r}.{hint} Modules are looked for in "
        "the current folder and among the installed packages.",
        code="model.cannot-import",
        model=reference,
        module=missing,
        module_name=module_name,
        hint=hint,
    )


def _modules_in(folder: Path) -> Iterator[str]:
    """Names of the modules and packages in `folder`."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".py" and entry.stem.isidentifier():
            yield entry.stem
        elif (entry / "__init__.py").is_file():
            yield entry.name


def _source_of(found: ModuleSpec) -> str | None:
    """The source text of a module; None for one that is compiled or built in."""
    if found.origin is None or not found.origin.endswith(".py"):
        return None
    try:
        return importlib.util.decode_source(Path(found.origin).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _creates_names(found: ModuleSpec) -> bool:
    """Whether the package's code may make modules or names that its text does not show."""
    source = _source_of(found)
    return source is not None and any(word in source for word in DYNAMIC)


def _defined_names(source: str) -> set[str] | None:
    """The names that a module binds when it runs; None if the text does not show them all."""
    if any(word in source for word in DYNAMIC):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # importing it gives the better message
    names = set(_bound(tree))
    return None if "*" in names else names


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that the statements below `node` bind at module level."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
                # Called while the module loads, a function may set its globals.
                yield from _declared_global(child)
                continue
            case ast.ClassDef(name=name):
                yield name
                yield from _declared_global(child)
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (one.asname or one.name.partition(".")[0] for one in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name
        yield from _bound(child)


def _declared_global(node: ast.AST) -> Iterator[str]:
    """Names that a `global` statement anywhere below `node` declares."""
    for below in ast.walk(node):
        if isinstance(below, ast.Global):
            yield from below.names


def _is_submodule(found: ModuleSpec, name: str) -> bool:
    """Whether `name` is a module of the package; loading it gives the better message."""
    folders = found.submodule_search_locations or ()
    return any(name in _modules_in(Path(folder)) for folder in folders)


def _contents(source: str) -> str:
    """What a module offers: the functions that it defines."""
    functions = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    if not functions:
        return "It defines no function."
    more = ", ..." if len(functions) > MOST_NAMES else ""
    return f"It defines {', '.join(functions[:MOST_NAMES])}{more}."


def _listed(names: list[str]) -> str:
    return " or ".join(names)
