"""Checks a model reference by reading source files, without importing the module.

The import usually imports torch, which takes seconds; this check finds a typo immediately. The
error for an unreadable weights file is also here, because a command first checks reference and
file.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from profiles.errors import InputError, ModelError

DYNAMIC = ("__path__", "sys.modules", "globals(", "exec(", "setattr(", "__getattr__")
"""If a module's source has one of these words, it may create names that the text does not show."""
NAMED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)
"""Statements and patterns that bind their `name`."""
MOST_NAMES = 12
"""If no name of the module is similar, a message lists at most this many names."""


def parse_reference(reference: str) -> tuple[str, str]:
    """Split `package.module:callable` into module and callable.

    Raises:
        ModelError: The text is not a reference, or it names a file instead of a module.
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

    If the source is not enough to decide, nothing is raised: loading the model shows errors later.

    Args:
        reference: The model reference as the user wrote it.

    Raises:
        ModelError: The text is not a reference, no such module exists, or the module's source
            does not define the callable. The message suggests similar names.
    """
    module_name, name = parse_reference(reference)
    module = _find_module(reference, module_name)
    source = None if module is None else _source_of(module)
    if module is None or source is None:
        return
    defined = _defined_names(source)
    if defined is None or name in defined or _is_submodule(module, name):
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
    """The error for a reference to a file. It suggests the reference to the module."""
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
    """Find `module_name` part by part without running a parent package; None if unknown."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module_name.split(".")
    for number, part in enumerate(parts, 1):
        if not part.isidentifier():
            return None
        parent, spec = spec, _find(".".join(parts[:number]), path)
        if spec is None:
            if parent is not None and (path is None or _creates_names(parent)):
                return None
            _refuse_module(reference, module_name, ".".join(parts[:number]), path)
        assert spec is not None
        locations = spec.submodule_search_locations
        path = None if locations is None else list(locations)
    return spec


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Find `name` with all finders, and in the current folder, as loading a model does."""
    here = PathFinder.find_spec(name, [os.getcwd()]) if path is None else None
    if here is not None and here.origin is not None:
        return here
    # Use a folder without `__init__.py` only if no package has its name.
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), here)


def _refuse_module(reference: str, module_name: str, missing: str, path: list[str] | None) -> None:
    """Raise ModelError for the module `missing`, and suggest similar modules in its folder."""
    part = missing.rpartition(".")[2]
    folders = [os.getcwd(), *sys.path] if path is None else path
    beside = sorted({name for folder in folders for name in _modules_in(Path(folder))})
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


def _source_of(spec: ModuleSpec) -> str | None:
    """The source text of a module; None if it is compiled or built in."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return importlib.util.decode_source(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _creates_names(spec: ModuleSpec) -> bool:
    """Whether the package's code may create modules or names that its text does not show."""
    source = _source_of(spec)
    return source is not None and any(word in source for word in DYNAMIC)


def _defined_names(source: str) -> set[str] | None:
    """The names that a module binds when it runs; None if the text does not show them all."""
    if any(word in source for word in DYNAMIC):
        return None
    try:
        names = set(_names_in(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # the import will give a better message
    return None if "*" in names else names


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Names that the statements below `tree` bind at module level."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.alias(name=name, asname=other):
                yield other or name.partition(".")[0]
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchMapping(rest=str(name)):
                yield name
        if isinstance(node, NAMED) and node.name:
            yield node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # A function that is called while the module loads may set globals.
            inside = (below for below in ast.walk(node) if isinstance(below, ast.Global))
            yield from (name for declared in inside for name in declared.names)
        else:
            yield from _names_in(node)


def _is_submodule(spec: ModuleSpec, name: str) -> bool:
    """Whether `name` is a module of the package. Then loading it gives a better message."""
    folders = spec.submodule_search_locations or ()
    return any(name in _modules_in(Path(folder)) for folder in folders)


def _contents(source: str) -> str:
    """A sentence that lists the functions which the module defines."""
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


def unreadable(path: str | Path, error: OSError) -> InputError:
    """The error for the weights file `path`, which could not be opened because of `error`."""
    if isinstance(error, IsADirectoryError):
        return InputError(
            "{file} is a folder, but the weights of the global model are one file. Give the "
            ".safetensors file that `edgetailor export --save-weights` or `edgetailor aggregate "
            "--out` wrote.",
            code="file.is-a-folder",
            file=str(path),
        )
    return InputError(
        "{file} cannot be read: {reason}.",
        code="file.unreadable",
        file=str(path),
        reason=error.strerror,
    )
