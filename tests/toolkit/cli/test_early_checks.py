"""Mistakes that every command refuses before it imports torch."""

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import ROOT, Done, refusal, run_code, stages
from refusals import refused
from toolkit.cli.early_checks import check_some_spec, check_specs
from toolkit.coordinator.storage.folder_lock import FolderLock
from toolkit.submodels.model_loading import load_model
from toolkit.submodels.model_reference import check_reference

SHAPE = ("--input-shape", "1,6,6")
MODEL = ("toolkit.models:resnet20", *SHAPE)


@pytest.fixture
def torchless(tmp_path: Path) -> Path:
    """A folder with a `torch` that fails when it is imported."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "tiers.toml").write_text('[[tiers]]\nname = "board"\nsubmodel = "slide:0.5"\n')
    return tmp_path


TYPOS = [
    (("inspect", *MODEL, "--submodel", "lowrank:0.25"), "did you mean 'low-rank'?"),
    (("inspect", *MODEL, "--submodel", "full:"), "'full:'"),
    (("inspect", "toolkit.models:resnet21", *SHAPE), "Did you mean resnet20 or resnet"),
    (("inspect", "toolkit.model:resnet20", *SHAPE), "Did you mean models or "),
    (("inspect", *MODEL, "--weights", "w"), "w cannot be read: No such file or directory."),
    (("export", *MODEL, "--out", "b", "--submodel", "widht:0.5"), "did you mean 'width'?"),
    (("export", *MODEL, "--out", "blocked"), "blocked exists already"),
    (("export", *MODEL, "--out", "b", "--tiers", "t.toml"), "t.toml cannot be read"),
    (("export", *MODEL, "--out", "b", "--tiers", "tiers.toml"), "did you mean 'slice'?"),
    (("plan", *MODEL, "--profile", "toaster"), "'toaster'"),
    (("plan", *MODEL, "--profile", "android-low", "--submodel", "cpp:2"), "'cp'"),
    (("plan", "toolkit.models:vgg9", *SHAPE, "--profile", "android-low"), "mean vgg8?"),
    (("evaluate", *MODEL, "--weights", "w", "--data", "d.npz"), "w cannot be read"),
    (("evaluate", *MODEL, "--weights", "blocked/torch.py", "--data", "d.npz"), "d.npz does"),
    (("aggregate", "global", "one", "--out", "new"), "global cannot be read"),
    (("demo", "--out", "blocked"), "blocked exists already"),
    (("serve", "fleet.toml"), "fleet.toml cannot be read"),
    (("serve", "tiers.toml"), "tiers.toml"),
    (("report", "full.json"), "full.json cannot be read"),
]


def test_a_typo_is_refused_without_torch(torchless: Path) -> None:
    answers = torchless_runs(torchless, [arguments for arguments, _ in TYPOS])
    for (arguments, said), answer in zip(TYPOS, answers, strict=True):
        assert said in refusal(answer), arguments


FLEET = """
model = "toolkit.models:resnet20"
input_shape = [1, 6, 6]
rounds = 1
held_out = "d.npz"
port = {port}
[simulation]
data = "d.npz"
[[devices]]
name = "desk"
submodel = "full"
"""


EACH = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from toolkit.cli import main

for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    out, err, code = io.StringIO(), io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Runs commands one after another in one process: each process takes half a second to start."""


def torchless_runs(folder: Path, commands: Sequence[Sequence[str]]) -> list[Done]:
    """Run commands of `edgetailor` in `folder`, where `torch` is that of the fixture."""
    path = os.pathsep.join([str(folder / "blocked"), str(ROOT)])
    done = run_code(EACH, json.dumps(commands), cwd=folder, PYTHONPATH=path).succeeded()
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


def test_a_port_or_a_state_folder_in_use_is_refused_without_torch(torchless: Path) -> None:
    lock = FolderLock(torchless / "blocked")
    (torchless / "locked.toml").write_text('state = "blocked"' + FLEET.format(port=0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (torchless / "fleet.toml").write_text(FLEET.format(port=port))
        commands = [("serve", "fleet.toml"), ("serve", "locked.toml")]
        on_port, locked = torchless_runs(torchless, commands)
    lock.release()
    assert f"Port {port} on 127.0.0.1 is in use" in refusal(on_port)
    assert f"{torchless / 'blocked'} is in use" in refusal(locked)


def test_a_stage_is_shown_before_torch_is_imported(torchless: Path) -> None:
    commands = [
        ("inspect", *MODEL),
        ("export", *MODEL, "--out", "b"),
        ("plan", *MODEL, "--profile", "android-low"),
        ("evaluate", *MODEL, "--weights", "d.npz", "--data", "d.npz"),
        ("aggregate", "d.npz", "one", "--out", "new"),
        ("simulate", "fleet.toml"),
    ]
    (torchless / "d.npz").touch()
    (torchless / "fleet.toml").write_text(FLEET.format(port=0))
    for arguments, done in zip(commands, torchless_runs(torchless, commands), strict=True):
        assert stages(done) == ["loading PyTorch"], arguments


def test_specs_that_no_model_could_satisfy() -> None:
    specs = ["full", "low-rank:0.25", "slice:0.42+low-rank:0.25"]
    assert check_specs([*specs[:2], "slice:0.42 + low-rank: 0.25"]) == specs
    check_some_spec(["lowrank:0.25", "full"])
    for check in (check_specs, check_some_spec):
        with refused("spec.unknown-family", family="lowrank"):
            check(["slice:0.42+lowrank:0.25"])


MODULE = """
import numpy as np
from pathlib import PurePath as Pure, Path
one: int = 1
two = three = lambda: None
(four, [five, *six]) = range(9), [1, 2]
if one:
    seven = 7
try:
    eight = 8
except OSError as nine:
    pass
with open(__file__) as ten:
    eleven = [hidden for hidden in ten]
for twelve in ():
    pass
class Thirteen:
    inside = 1
async def fourteen():
    global fifteen
    local = 1
if (sixteen := 1):
    pass
match one:
    case [seventeen, *eighteen]:
        pass
    case {"a": nineteen, **twenty}:
        pass
"""
BOUND = [
    "np", "Pure", "Path", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "Thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
    "eighteen", "nineteen", "twenty",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BOUND)
def test_every_way_to_bind_a_name_counts(here: Path, name: str) -> None:
    (here / "bindings.py").write_text(MODULE)
    check_reference(f"bindings:{name}")


@pytest.mark.parametrize("name", ["inside", "local", "PurePath", "numpy"])
def test_names_that_a_module_does_not_have(here: Path, name: str) -> None:
    (here / "bindings.py").write_text(MODULE)
    with refused("model.unknown-callable", module="bindings", callable=name):
        check_reference(f"bindings:{name}")


@pytest.mark.parametrize(
    "source",
    [
        "from nets import *",
        "def __getattr__(name): return name",
        "globals()['made'] = 1",
        "import sys; setattr(sys.modules[__name__], 'made', 1)",
        "this is no Python",
    ],
)
def test_a_module_that_cannot_be_judged_passes(here: Path, source: str) -> None:
    (here / "dynamic.py").write_text(source)
    check_reference("dynamic:made")


@pytest.mark.parametrize(
    "reference",
    [
        "builtins:int",
        "sys:nothing",
        "os.path:join",
        "package.sub:net",
        "spaces.net:net",
        ".nets:tiny",
    ],
)
def test_modules_without_readable_source_pass(here: Path, reference: str) -> None:
    (here / "package").mkdir()
    (here / "package" / "__init__.py").write_text("import sys; sys.modules['package.sub'] = sys\n")
    (here / "spaces").mkdir()
    (here / "spaces" / "net.py").write_text("def net(): ...\n")
    check_reference(reference)


def test_no_module_is_run(here: Path) -> None:
    (here / "loud").mkdir()
    for name in ("__init__", "nets"):
        (here / "loud" / f"{name}.py").write_text("raise SystemExit('it ran')\n\ndef tiny(): ...\n")
    check_reference("loud.nets:tiny")
    with refused("model.unknown-callable", "Did you mean tiny?", callable="tinny"):
        check_reference("loud.nets:tinny")
    with refused("model.cannot-import", "Did you mean nets?", module="loud.nest"):
        check_reference("loud.nest:tiny")
    assert "loud" not in sys.modules


@pytest.mark.parametrize(
    ("path", "suggested"),
    [
        ("mynet.py", "mynet:net"),
        ("./models/mynet.py", "models.mynet:net"),
        ("models/mynet", "models.mynet:net"),
        ("../mynet.py", "mynet:net"),
    ],
)
def test_a_file_in_place_of_a_module(here: Path, path: str, suggested: str) -> None:
    for check in (check_reference, load_model):
        with refused("model.invalid-reference", suggested=suggested) as caught:
            check(f"{path}:net")
        assert ("change to the folder .. and" in str(caught.value)) == path.startswith("..")


def test_an_absolute_path_below_the_current_folder(here: Path) -> None:
    with refused("model.invalid-reference", suggested="mynet:net"):
        check_reference(f"{here / 'mynet.py'}:net")


@pytest.mark.parametrize("reference", ["", "nets", "nets:", ":tiny"])
def test_texts_that_are_not_references(reference: str) -> None:
    with refused("model.invalid-reference", model=reference):
        check_reference(reference)
