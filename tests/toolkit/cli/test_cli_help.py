"""The help of `edgetailor`."""

import re
from pathlib import Path

import pytest

from commands import EXIT_CODES, ROOT, edgetailor, run
from toolkit.cli import main_group
from toolkit.families.forms import FORMS
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.spec_form import COMMON


def test_help_lists_commands_and_exit_codes(tmp_path: Path) -> None:
    done = run("edgetailor", "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert re.findall(r"^  ([a-z][\w-]+)  +[A-Z]", done.stdout, re.M) == [
        "abort-round", "add-operator", "aggregate", "apply", "audit", "backup", "ban",
        "close-round", "compare", "demo", "deploy", "device", "devices", "drop-update", "evaluate",
        "export", "export-model", "extend-round", "go-back", "inspect", "install-service", "let-in",
        "login", "make-token", "operators", "pause", "pause-rounds", "plan", "release", "remove",
        "report", "restore", "resume", "resume-rounds", "revoke-operator", "revoke-token",
        "rollback", "rotate-key", "rotate-secret", "rounds", "serve", "simulate", "status", "tls",
        "tokens", "uninstall-service",
    ]  # fmt: skip
    assert done.stdout.endswith(EXIT_CODES)
    assert "..." not in done.stdout.replace("[ARGS]...", "")  # no summary is cut off


def test_the_reference_lists_the_exit_codes() -> None:
    page = (ROOT / "docs" / "reference" / "edgetailor.md").read_text()
    rows = re.findall(r"^    (\d+) +(.*)$", EXIT_CODES, re.M)
    assert rows == re.findall(r"^\| (\d+) \| (.*) \|$", page, re.M)


def test_help_lists_families_and_their_options(tmp_path: Path) -> None:
    done = edgetailor("--help", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    specs = [line.split()[0] for line in lines if re.match(" {6}[a-z]\\S+  +[a-z]", line)]
    assert {parse_spec(spec).family for spec in specs} == FORMS.keys()
    assert "slice:0.42+low-rank:0.25" in specs
    options = {word for form in FORMS.values() for word in re.findall(r"\S+=", form.summary)}
    options |= {f"{option.name}=" for option in COMMON}
    assert options == set(re.findall(r"[a-z-]+=", done.stdout))


@pytest.mark.parametrize("command", sorted(main_group.commands.keys() - {"tls"}))
def test_every_command_explains_itself_in_80_columns(tmp_path: Path, command: str) -> None:
    done = edgetailor(command, "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: edgetailor {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.findall(r"^  --[a-z-]+(?: [A-Z]+)?$", done.stdout, re.M) == []
