"""The operator's commands against a coordinator that runs: whole outputs, and the saved login."""

import json
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from commands import Done, edgetailor, refusal
from device_agent.formats.protocol.rounds import Progress
from toolkit.cli.operator import access_commands, open_round_commands
from toolkit.cli.operator import operator_commands as see_and_act_commands
from toolkit.cli.operator.operator_commands import SORTS, login
from toolkit.cli.operator.settings_commands import apply
from toolkit.cli.serve_commands import tokens
from toolkit.coordinator.operation.messages import Sort
from toolkit.coordinator.server import Server
from vector_fleet import VectorModel, assert_soon, configured, enrol, running, send_all, task

Served = tuple[Server, Path]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A federation whose three devices trained one round."""
    with running(configured(tmp_path)) as server:
        links = enrol(server, tmp_path)
        send_all(links, 1, tmp_path)
        for link in links.values():
            assert task(link).round == 2
            link.progress(Progress(state="training"))
        yield server, tmp_path


def run(folder: Path, *arguments: object) -> Done:
    return edgetailor(*arguments, cwd=folder, XDG_CONFIG_HOME=str(folder / "config"))


def lines(folder: Path, *arguments: object) -> list[str]:
    """The lines that a command prints, with all ages as `N s ago`."""
    done = run(folder, *arguments)
    assert (done.code, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    return re.sub(r"\d+ (s|min) ago", "N s ago", done.stdout).splitlines()


def test_see_and_act(served: Served) -> None:
    _, folder = served
    here = ("--federation", "fleet.toml")
    assert lines(folder, "pause", "board-1", "--reason", "broken sensor", *here) == [
        "board-1: paused by the operator: broken sensor"
    ]
    # The width of a column depends on the ages.
    assert [re.split("  +", line) for line in lines(folder, "devices", *here)] == [
        ["device", "name", "submodel", "state", "seen", "trained"],
        ["desktop-1", "machine 0", "full", "training", "N s ago", "1"],
        ["desktop-2", "machine 1", "full", "training", "N s ago", "1"],
        ["board-1", "machine 2", "low-rank:0.5", "paused", "N s ago", "1"],
        ["board-1: paused by the operator: broken sensor"],
        ["3 devices: 2 training, 1 paused; 1 to 3 shown"],
    ]
    by_name = lines(folder, "devices", "--sort", "name", "--descending", "--most", "1", *here)
    assert by_name[1].startswith("board-1")
    assert get_args(Sort) == SORTS
    assert lines(folder, "devices", "--search", "none", "--federation", "state") == ["0 devices"]
    one = lines(folder, "device", "board-1", *here)
    assert one[:4] == [
        "board-1",
        "  name     machine 2",
        "  kind     board, trains low-rank:0.5",
        "  state    paused by the operator: broken sensor",
    ]
    assert "round  samples  steps  first loss  last loss" in one
    assert "1           10      1      2.0000     1.0000" in one
    done = run(folder, "remove", "desktop-1", "desktop-2", "--reason", "sold", *here)
    assert done.stdout.splitlines() == [
        f"desktop-{n}: removed by the operator: sold" for n in (1, 2)
    ]
    log = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", t) for t in lines(folder, "audit", *here)]
    assert log == [
        "   1  DATE  operator: pause board-1: broken sensor",
        "   2  DATE  operator: remove desktop-1: sold",
        "   3  DATE  operator: remove desktop-2: sold",
    ]
    assert lines(folder, "audit", "--after", "3", *here) == ["No later entries."]
    document = json.loads(run(folder, "devices", "--kind", "board", "--json", *here).stdout)
    assert (document["version"], document["total"]) == (1, 1)
    assert document["devices"][0]["reason"] == "broken sensor"


def test_names_of_devices_are_text(served: Served) -> None:
    server, folder = served
    registry = server.coordinator.store.registry
    device = registry.device("desktop-1")
    name = "[/red][bold]x[link=y]"
    registry._keep(replace(device, name=name))
    here = ("--federation", "state")
    assert re.split("  +", lines(folder, "devices", "--kind", "desktop", *here)[1])[1] == name
    assert lines(folder, "device", "desktop-1", *here)[1] == f"  name     {name}"
    registry._keep(replace(device, name="a\u202eb\u2066c", machine='{"system": "x\u200fy"}'))
    shown = "\n".join(lines(folder, "device", "desktop-1", *here))
    shown += "\n".join(lines(folder, "devices", *here) + lines(folder, "status", *here))
    assert shown.count(r"a\u202eb\u2066c") == 3
    assert r"x\u200fy" in shown
    assert not set("\u202e\u2066\u200f") & set(shown)


def test_the_round(served: Served) -> None:
    _, folder = served
    here = ("--federation", "state")
    shown = lines(folder, "status", *here)
    assert shown[0].startswith("round 2 of 3, training, global ")
    assert "  ".join(shown[1].split()[:2]) == "desktop-1  (machine"
    done = run(folder, "extend-round", "600", "--reason", "a slow day", *here)
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr == "Round 2 ends in 600 s at the latest.\n"
    assert lines(folder, "audit", *here)[0].endswith("end in 600 s round 2: a slow day")


def test_log_in_from_elsewhere(served: Served, tmp_path: Path) -> None:
    server, folder = served
    away = tmp_path / "away"
    away.mkdir()
    assert "run `edgetailor login URL --token-file FILE` first" in refusal(run(away, "devices"))
    token = folder / "state" / "operator.token"
    done = run(away, "login", server.url, "--token-file", token)
    file = away / "config" / "edgetailor" / "login.json"
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr == f"{server.url} has 3 devices. The login is in {file}.\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert lines(away, "devices", "--kind", "board")[-1] == "1 device: 1 training; 1 to 1 shown"
    other = file.read_text().replace(server.url, "http://127.0.0.1:9")
    file.write_text(other)  # as after a login at another coordinator
    run(away, "login", f"{server.url}/", "--token-file", token)
    assert json.loads(file.read_text())["others"][0]["url"] == "http://127.0.0.1:9"
    for named in ((), ("--federation", server.url), ("--federation", f"{server.url}/")):
        assert lines(away, "devices", "--kind", "board", *named)[-1].startswith("1 device")
    assert "gave up" in refusal(run(away, "devices", "--federation", "http://127.0.0.1:9"), 6)
    sentence = refusal(run(away, "devices", "--federation", "http://x"))
    assert sentence.startswith("No login is saved for http://x. Run `edgetailor login http://x")
    assert lines(away, "tokens", server.url)[0].startswith("desktop: 2 of 2 places taken")
    dry = run(away, "apply", server.url, "--dry-run")
    assert (dry.code, dry.stderr) == (0, "The file has no changes.\n")
    kind_token = folder / "state" / "tokens" / "board.token"
    before = file.read_bytes()
    sentence = refusal(run(away, "login", server.url, "--token-file", kind_token), 6)
    assert sentence.startswith("Only the operator may do this: give the token in operator.token")
    assert file.read_bytes() == before
    file.chmod(0o640)
    assert "Others can read the operator's token" in refusal(run(away, "devices"))
    file.chmod(0o600)
    file.write_text(file.read_text().replace('"version":1', '"version":2'))
    assert "Run `edgetailor login` again." in refusal(run(away, "devices"))
    file.write_text("{")
    assert "Run `edgetailor login` again." in refusal(run(away, "devices"))
    assert run(away, "login", server.url, "--token-file", token).code == 0
    assert lines(away, "devices", "--kind", "board")[-1].startswith("1 device")


OF_A_FEDERATION = ("apply", "tokens")
"""Commands that take the federation without an option, as `serve` does."""


def test_all_commands_name_a_federation_in_the_same_ways() -> None:
    groups = (access_commands, open_round_commands, see_and_act_commands)
    shared = [one for group in groups for one in group.COMMANDS if one is not login]
    commands = [*shared, apply, tokens]
    assert len(commands) > 20
    for command in commands:
        help_ = " ".join((command.help or "").split())
        [federation] = [option for option in command.params if option.name == "federation"]
        if command.name not in OF_A_FEDERATION:
            help_ = str(federation.to_info_dict()["help"])
        assert "state folder" in help_, command.name
        assert "URL of a coordinator that `edgetailor login` saved" in help_, command.name


def test_operators_have_tokens_of_their_own(served: Served) -> None:
    server, folder = served
    here = ("--federation", "state")
    add = ("add-operator", "anna", "--role", "read-only", "--reason", "plots", "--out")
    assert lines(folder, "operators", *here) == [
        "No tokens were made; operator.token is the only one."
    ]
    done = run(folder, *add, "anna.token", *here)
    assert (done.code, done.stdout, done.stderr) == (0, "", "anna.token has the token of anna.\n")
    token = folder / "anna.token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    run(folder, "login", server.url, "--token-file", token)
    assert lines(folder, "devices", "--kind", "board")[-1].startswith("1 device")
    sentence = refusal(run(folder, "pause", "board-1", "--reason", "x"), 6)
    assert sentence.startswith("The token of anna has the role read-only")
    before = token.read_text()
    assert "exists already" in refusal(run(folder, *add, "anna.token", *here))
    assert "was given before" in refusal(run(folder, *add, "anna.token", "--force", *here))
    assert token.read_text() == before
    done = run(folder, "revoke-operator", "anna", "--reason", "left", "--json", *here)
    assert json.loads(done.stdout) == {"version": 1, "name": "anna"}
    table = [
        re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", t) for t in lines(folder, "operators", *here)
    ]
    assert [line.split() for line in table] == [
        ["operator", "role", "made", "revoked"],
        ["anna", "read-only", "DATE", "DATE"],
    ]


def test_join_tokens_are_made_and_revoked(served: Served) -> None:
    server, folder = served
    here = ("--reason", "x", "--federation", "state")
    done = run(folder, "make-token", "board", "--count", "5", "--out", "new.token", *here)
    token = (folder / "new.token").read_text().strip()
    head, link = done.stdout.splitlines()
    assert head.startswith("join token 1: board, 0 of 5 joined, until 20")
    assert link == f"  {server.url}/join/#{token}"
    document = json.loads(run(folder, "make-token", "board", "--json", *here).stdout)
    assert document["link"] == f"{server.url}/join/#{document['token']}"
    assert "did you mean 'board'? The kinds are" in refusal(
        run(folder, "make-token", "bord", *here)
    )
    assert run(folder, "revoke-token", "2", *here).stderr == "Join token 2 is revoked.\n"
    run(folder, "login", server.url, "--token-file", folder / "state" / "operator.token")
    shown = [line.partition(", until")[0] for line in lines(folder, "tokens")]
    assert shown == [
        "desktop: 2 of 2 places taken",
        "board: 1 of 1 place taken",
        "join token 1: board, 0 of 5 joined",
        "join token 2: board, 0 joined, revoked",
    ]
    assert (
        edgetailor("tokens", "state", cwd=folder).stdout.splitlines()[-2].startswith("join token 1")
    )


def test_rounds_are_paused_aborted_and_repeated(served: Served, tmp_path: Path) -> None:
    server, folder = served
    here = ("--reason", "x", "--federation", "state")
    said = "No round opens until `edgetailor resume-rounds`.\n"
    assert run(folder, "pause-rounds", *here).stderr == said
    assert any("paused by the operator: x" in w for w in server.coordinator.status().warnings)
    assert json.loads(run(folder, "resume-rounds", "--json", *here).stdout)["paused"] is False
    sentence = refusal(run(folder, "drop-update", "board-1", *here))
    assert sentence.startswith("Round 2 has no update of board-1.")
    said = "Round 2 opens again, without its updates.\n"
    assert run(folder, "abort-round", *here).stderr == said
    assert_soon(lambda: server.coordinator.status().state == "training")
    assert json.loads(run(folder, "go-back", "--json", *here).stdout) == {"version": 1, "round": 0}
    assert server.coordinator.store.history.current_round() == 0


def test_a_changed_file_is_applied(served: Served) -> None:
    server, folder = served
    server.coordinator.make_model = lambda config: VectorModel()
    file, reason = folder / "fleet.toml", ("--reason", "it overfits")
    here = ("--federation", "state")
    assert run(folder, "apply", "state", "--dry-run").stderr == "The file has no changes.\n"
    file.write_text(file.read_text().replace("epochs = 1", "epochs = 2"))
    done = run(folder, "apply", "fleet.toml", "--dry-run")
    assert (done.stdout, done.stderr) == (
        "training.epochs: 1 -> 2\n",
        "These changes would take effect from round 3 on.\n",
    )
    assert "Give a --reason, or --dry-run" in refusal(run(folder, "apply", "fleet.toml"))
    (folder / "other.toml").write_text((folder / "fleet.toml").read_text())
    sentence = refusal(run(folder, "apply", "other.toml", "--dry-run"))
    assert sentence.endswith("fleet.toml, not other.toml. Change that file, then apply it.")
    document = json.loads(run(folder, "apply", "state", "--json", *reason).stdout)
    assert document == {
        "version": 1,
        "round": 3,
        "changes": [{"key": "training.epochs", "before": "1", "after": "2"}],
    }
    assert "set training.epochs: 1 -> 2 round 3: it" in run(folder, "audit", *here).stdout
    file.write_text(file.read_text().replace("rounds = 3", "rounds = 3\nseed = 4"))
    sentence = refusal(run(folder, "apply", "state", *reason))
    assert "another `seed`, and this key cannot change: set it back to 0" in sentence


def test_actions_as_json(served: Served) -> None:
    _, folder = served
    here = ("--reason", "x", "--json", "--federation", "state")
    document = json.loads(run(folder, "pause", "board-1", "desktop-1", *here).stdout)
    assert [(d["device"], d["state"]) for d in document["devices"]] == [
        ("board-1", "paused"),
        ("desktop-1", "paused"),
    ]
    done = run(folder, "extend-round", "60", *here)
    assert json.loads(done.stdout) == {"version": 1, "round": 2, "seconds": 60}
    assert done.stderr == ""


def test_a_refused_action_is_one_sentence(served: Served) -> None:
    _, folder = served
    here = ("--federation", "state")
    sentence = refusal(run(folder, "close-round", "--reason", "x", *here))
    assert sentence.startswith("Round 2 has 0 updates, and needs 2")
    sentence = refusal(run(folder, "pause", "desktop", "--reason", "x", *here))
    assert sentence.startswith("This federation has no device 'desktop'")


def test_a_federation_that_does_not_run_gets_no_token(tmp_path: Path) -> None:
    config = configured(tmp_path)
    stopped = "`edgetailor serve` does not run on the state folder"
    assert stopped in refusal(run(tmp_path, "devices", "--federation", "fleet.toml"))
    with running(config):
        pass
    # The file with the address stays. Another program may listen there now.
    assert (config.state / "address").exists()
    assert stopped in refusal(run(tmp_path, "devices", "--federation", "fleet.toml"))
    assert "does not exist" in refusal(run(tmp_path, "devices", "--federation", "fleet.tom"))


def test_arguments_are_checked_first(tmp_path: Path) -> None:
    for name in ("device", "pause"):
        reason = () if name == "device" else ("--reason", "x")
        assert "a device's id cannot be empty" in refusal(run(tmp_path, name, "", *reason))
    assert "not a valid integer" in refusal(run(tmp_path, "extend-round", "nan", "--reason", "x"))
    for wrong in ("", "two\nlines", "x" * 201, "\udcff", "\x1b[31mred"):
        said = refusal(run(tmp_path, "pause", "a", "--reason", wrong))
        assert "write one line of 1 to 200 letters" in said
