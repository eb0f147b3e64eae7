"""Write the reference pages that follow from the source: errors and the layout of the code.

`python docs/generate.py` writes them; a test compares the files with what this module returns.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("profiles", "device_agent", "exporters", "toolkit", "edgetailor")
FORWARDING = {"RefusedError"}
"""Errors that take their code from the coordinator's answer."""
PAGES = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class ErrorSite:
    """One place that raises an error: its code, class, message with {names} and values."""

    code: str
    kind: str
    message: str
    values: tuple[str, ...]


def sources() -> Iterator[Path]:
    """All Python files of the packages, in a stable order."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def error_sites() -> list[ErrorSite]:
    """Every call in the packages that has a literal `code=` like `spec.unknown-family`."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                site = error_site(node)
                if site is not None:
                    found.append(site)
    return found


def raises_without_code() -> Iterator[str]:
    """Places that raise one of the project's errors without a code."""
    own = error_classes()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func).rpartition(".")[2]
                given = {keyword.arg for keyword in node.exc.keywords}
                if kind in own - FORWARDING and not given & {"code", None}:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {kind}"


def error_classes() -> set[str]:
    """Names of `EdgeTailorError` and all classes derived from it."""
    bases: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    own = {"EdgeTailorError"}
    while more := {name for name, above in bases.items() if above & own} - own:
        own |= more
    return own


def error_site(call: ast.Call) -> ErrorSite | None:
    """The error that `call` makes; None if it makes none."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    code = literal(given.pop("code", None))
    if code is None or "." not in code:
        return None
    kind = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    texts = [template(argument) for argument in call.args]
    message = max((text for text in texts if text), key=len, default="")
    return ErrorSite(code, kind, " ".join(message.split()), tuple(given))


def literal(node: ast.expr | None) -> str | None:
    """The text of a literal, or of a constant of the protocol; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return protocol_codes().get(name)
    return None


@cache
def protocol_codes() -> dict[str, str]:
    """Codes and messages that agent and coordinator share, by the names of their constants."""
    tree = ast.parse((ROOT / "device_agent/formats/protocol.py").read_text("utf-8"))
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def template(node: ast.expr) -> str:
    """The text of a string in the source, with {} around what is filled in; "" for other nodes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(template, values))
        case ast.Name(id=name):
            return protocol_codes().get(name, "")
        case ast.FormattedValue(value=value):
            return f"{{{placeholder(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return ""


def placeholder(node: ast.expr) -> str:
    """A readable name for an expression inside a message."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id="getattr")):
            return "value"
        case ast.Call(func=func, args=args):
            return placeholder(args[0]) if args else placeholder(func)
        case ast.Subscript(value=value):
            return placeholder(value)
    return "..."


def error_page() -> str:
    """`errors.md`: every error code with its class, message and values, by area."""
    areas: dict[str, dict[str, list[ErrorSite]]] = defaultdict(lambda: defaultdict(list))
    for site in error_sites():
        areas[site.code.partition(".")[0]][site.code].append(site)
    lines = [
        "# Errors",
        "",
        "Every error has a stable code. With `--json`, commands print it on stdout as",
        '`{"version": 1, "error": {"code": ..., "message": ...}}`; the coordinator answers HTTP',
        "requests with the same codes. Names in braces are filled in.",
        "",
        "This page is generated from the source: `python docs/generate.py`.",
    ]
    for area in sorted(areas):
        lines += ["", f"## {area}", ""]
        for code in sorted(areas[area]):
            sites = areas[area][code]
            values = sorted({value for site in sites for value in site.values})
            with_values = f" Values: {', '.join(f'`{value}`' for value in values)}." * bool(values)
            kinds = ", ".join(sorted({f"`{site.kind}`" for site in sites}))
            lines += [f"### `{code}`", "", f"{kinds}.{with_values}", ""]
            messages = sorted({site.message for site in sites if site.message})
            lines += [f"- {message}".replace("<", "&lt;") for message in messages]
            lines += [""] * bool(messages)
    return "\n".join(lines).rstrip() + "\n"


def folders() -> Iterator[tuple[str, str]]:
    """Each folder of the packages with the first sentence of its `__init__.py`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("__init__.py")):
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            first = " ".join(text.split("\n\n")[0].split())
            yield path.parent.relative_to(ROOT).as_posix(), first


def tree() -> str:
    """The folders as a table, one line each."""
    rows = [f"| `{folder}/` | {text} |" for folder, text in folders()]
    return "\n".join(["| folder | what is in it |", "|---|---|", *rows])


def layout_page() -> str:
    """`layout.md`: one line for each folder of the source."""
    return (
        "# Layout of the source\n\n"
        "Packages import one way: `profiles <- device_agent <- exporters <- toolkit <- edgetailor`."
        "\nInside a package, rooms import one way too; the contracts are in `pyproject.toml`.\n\n"
        f"{tree()}\n\n"
        "This page is generated from the source: `python docs/generate.py`.\n"
    )


def contributing(text: str) -> str:
    """CONTRIBUTING.md with its table of folders replaced by the present one."""
    before, start, rest = text.partition("| folder | what is in it |\n")
    assert start, "CONTRIBUTING.md has no table of folders"
    _, _, after = rest.partition("\n\n")
    return f"{before}{tree()}\n\n{after}"


PAGES_BY_NAME = {"errors.md": error_page, "layout.md": layout_page}

if __name__ == "__main__":
    for name, page in PAGES_BY_NAME.items():
        (PAGES / name).write_text(page(), encoding="utf-8")
    guide = ROOT / "CONTRIBUTING.md"
    guide.write_text(contributing(guide.read_text("utf-8")), encoding="utf-8")
