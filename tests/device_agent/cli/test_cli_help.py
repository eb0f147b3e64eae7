"""The help of `edgetailor-agent`."""

import re

import pytest
from click.testing import CliRunner

from commands import EXIT_CODES, Agent
from device_agent.cli.commands import main_group

COMMANDS = [
    "bench", "calibrate", "doctor", "install-service", "join", "leave", "predict", "profile", "run",
    "status", "train", "uninstall-service",
]  # fmt: skip


def test_help_lists_commands_and_exit_codes(agent: Agent) -> None:
    done = agent("--help")
    assert (done.code, done.stderr) == (0, "")
    assert re.findall(r"^  (\w[\w-]*)  +[A-Z]", done.stdout, re.M) == COMMANDS
    assert done.stdout.endswith(EXIT_CODES)
    assert "..." not in done.stdout.replace("[ARGS]...", "")  # no summary is cut off


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(agent: Agent, command: str) -> None:
    done = agent(command, "--help")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: edgetailor-agent {command} ")
    undocumented = re.findall(r"^  --[a-z-]+(?: [A-Z]+)?$", done.stdout, re.M)
    assert undocumented == []


def test_the_short_way_to_the_version_says_the_same(agent: Agent) -> None:
    done = agent("--version")
    usual = CliRunner().invoke(main_group, ["--version"], prog_name="edgetailor-agent")
    assert (done.code, done.stdout) == (usual.exit_code, usual.stdout)
