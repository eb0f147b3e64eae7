"""The help of `edgetailor`."""

import re
from pathlib import Path

import pytest

from commands import EXIT_CODES, edgetailor, run


def test_help_lists_commands_and_exit_codes(tmp_path: Path) -> None:
    done = run("edgetailor", "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert re.findall(r"^  (\w+)  +[A-Z]", done.stdout, re.M) == [
        "aggregate", "demo", "evaluate", "export", "inspect", "serve",
    ]  # fmt: skip
    assert done.stdout.endswith(EXIT_CODES)


@pytest.mark.parametrize("command", ["aggregate", "demo", "evaluate", "export", "inspect", "serve"])
def test_every_command_explains_itself_in_80_columns(tmp_path: Path, command: str) -> None:
    done = edgetailor(command, "--help", cwd=tmp_path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: edgetailor {command} ")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert re.findall(r"^  --[a-z-]+(?: [A-Z]+)?$", done.stdout, re.M) == []
