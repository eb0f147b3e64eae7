"""Write the generated reference pages: errors, the layout of the code, constructs and devices.

`python docs/generate.py` writes them; a test compares the files with what this module returns.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import construct_table
import device_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("profiles", "device_agent", "exporters", "toolkit", "edgetailor")
FORWARDING = {"RefusedError"}
"""Errors that take their code from the coordinator's answer."""
PAGES = ROOT / "docs" / "reference"


FIELD = re.compile(r"\{(\w+)(?:![rs])?(?::[^{}]*)?\}")
"""A name in braces, which the value of this name replaces."""
START = re.compile(r"Start with .*?\.(?= |$)")
"""The sentence in the docstring of a folder that names the file to read first."""


@dataclass(frozen=True)
class ErrorSite:
    """One place that makes an error.

    Attributes:
        place: File and line.
        code: The error's code; None if it is another error's.
        kind: The error's class, or the function that makes it.
        template: The message with {names}; None if the source does not spell it out.
        values: The names of the values.
        forwards: Whether there may be other values than these.
        passed_on: Whether the message is a name, of a template that came from elsewhere.
    """

    place: str
    code: str | None
    kind: str
    template: str | None
    values: tuple[str, ...]
    forwards: bool
    passed_on: bool


def sources() -> Iterator[Path]:
    """All Python files of the packages, in a stable order."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def syntax_of(path: Path) -> ast.Module:
    """The syntax tree of a Python file. Other files import from it, so it is read many times."""
    return ast.parse(path.read_text("utf-8"))


@cache
def error_sites() -> tuple[ErrorSite, ...]:
    """Every call in the packages that makes an error, or an answer with an error's code."""
    makers = error_classes() | forwarding_functions()
    found = []
    for path in sources():
        texts = known_texts(path)
        for node in ast.walk(syntax_of(path)):
            if isinstance(node, ast.Call):
                place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                site = error_site(node, place, makers, texts)
                if site is not None:
                    found.append(site)
    return tuple(found)


def unreadable_errors() -> Iterator[str]:
    """Errors whose message the source does not spell out, or names a value that is not given."""
    for site in error_sites():
        if site.template is None and (site.code is not None or not site.passed_on):
            yield f"{site.place}: the message of {site.code or site.kind} is not a literal"
        missing = set(FIELD.findall(site.template or "")) - set(site.values)
        if missing and not site.forwards:
            yield f"{site.place}: no value for {', '.join(sorted(missing))}"


def raises_without_code() -> Iterator[str]:
    """Places that raise one of the project's errors without a code."""
    own = error_classes()
    for path in sources():
        for node in ast.walk(syntax_of(path)):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func).rpartition(".")[2]
                given = {keyword.arg for keyword in node.exc.keywords}
                if kind in own - FORWARDING and not given & {"code", None}:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {kind}"


@cache
def error_classes() -> set[str]:
    """Names of `EdgeTailorError` and all classes derived from it."""
    bases: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(syntax_of(path)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    own = {"EdgeTailorError"}
    while more := {name for name, above in bases.items() if above & own} - own:
        own |= more
    return own


def forwarding_functions() -> set[str]:
    """Names of functions that make an error of the template that they are given."""
    return {
        node.name
        for path in sources()
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
        if node.args.args and node.args.args[0].arg == "template"
        if ast.unparse(node.returns or ast.Constant("")).rpartition(".")[2] in error_classes()
    }


def error_site(
    call: ast.Call, place: str, makers: Set[str], texts: Mapping[str, str]
) -> ErrorSite | None:
    """The error that `call` makes; None if it makes none."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    code = literal(given.pop("code", None), texts)
    kind = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if not (kind in makers or (code and re.fullmatch(r"[a-z]+\.[a-z0-9-]+", code))):
        return None
    message = call.args[0] if call.args else given.pop("message", None)
    template = literal(message, texts)
    values = tuple(name for name in given if name and name != "status")
    passed_on = isinstance(message, ast.Name | ast.Attribute | None)
    return ErrorSite(place, code, kind, template, values, None in given, passed_on)


def literal(node: ast.expr | None, texts: Mapping[str, str]) -> str | None:
    """The text of a literal or of a constant in `texts`; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return texts.get(name)
    return None


def known_texts(module: Path) -> dict[str, str]:
    """The texts with a name in `module` and those that it imports from the packages."""
    texts = dict(constant_texts(module))
    for node in syntax_of(module).body:
        if isinstance(node, ast.ImportFrom):
            path = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            if path.is_file():
                there = constant_texts(path)
                texts |= {a.asname or a.name: there[a.name] for a in node.names if a.name in there}
    return texts


@cache
def constant_texts(module: Path) -> dict[str, str]:
    """The texts in `module` that have a name."""
    return {
        target.id: node.value.value
        for node in syntax_of(module).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def error_page() -> str:
    """`errors.md`: every error code with its class, message and values, by area."""
    areas: dict[str, dict[str, list[ErrorSite]]] = defaultdict(lambda: defaultdict(list))
    for site in error_sites():
        if site.code is not None:
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
            messages = sorted({site.template for site in sites if site.template})
            lines += [f"- {shown(message)}" for message in messages]
            lines += [""] * bool(messages)
    return "\n".join(lines).rstrip() + "\n"


def shown(template: str) -> str:
    """`template` as the page shows it: names in braces without the form of their values."""
    plain = FIELD.sub(r"{\1}", template)
    return " ".join(plain.split()).replace("<", "&lt;")


def folders() -> Iterator[tuple[str, str]]:
    """Each folder with the first paragraph of its `__init__.py`, and the file to read first."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("__init__.py")):
            text = ast.get_docstring(syntax_of(path)) or ""
            first = " ".join(text.split("\n\n")[0].split())
            entry = START.search(" ".join(text.split()))
            row = f"{first} {entry[0]}" if entry and entry[0] not in first else first
            yield path.parent.relative_to(ROOT).as_posix(), row


def tree() -> str:
    """The folders as a table, one line each."""
    rows = [f"| `{folder}/` | {text} |" for folder, text in folders()]
    return "\n".join(["| folder | what is in it |", "|---|---|", *rows])


def layout_page() -> str:
    """`layout.md`: one line for each folder of the source, with the file to read first."""
    return (
        "# Layout of the source\n\n"
        "Packages import in one direction:\n"
        "`profiles <- device_agent <- exporters <- toolkit <- edgetailor`. Inside a package, "
        "folders\nimport in one direction too. The contracts are in `pyproject.toml`.\n\n"
        f"{tree()}\n\n"
        "This page is generated from the source: `python docs/generate.py`.\n"
    )


def contributing(text: str) -> str:
    """CONTRIBUTING.md with its table of folders replaced by the present one."""
    before, start, rest = text.partition("| folder | what is in it |\n")
    assert start, "CONTRIBUTING.md has no table of folders"
    _, _, after = rest.partition("\n\n")
    return f"{before}{tree()}\n\n{after}"


PAGES_BY_NAME = {
    "constructs.md": construct_table.page,
    "devices.md": device_table.page,
    "errors.md": error_page,
    "layout.md": layout_page,
}

if __name__ == "__main__":
    for name, page in PAGES_BY_NAME.items():
        (PAGES / name).write_text(page(), encoding="utf-8")
    guide = ROOT / "CONTRIBUTING.md"
    guide.write_text(contributing(guide.read_text("utf-8")), encoding="utf-8")
