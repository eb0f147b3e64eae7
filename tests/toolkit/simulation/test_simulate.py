"""The folder of a simulation: killed at every write, continued, refused; and the command."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bundles import write_noise
from commands import LIMIT_S, ROOT, command, edgetailor, environment, refusal
from models_for_tests import CLASSES, INPUT_SHAPE
from parameters import half_quick, long_one
from refusals import refused
from simulated_runs import without_times
from toolkit.aggregation.limits.reference import Reference
from toolkit.simulation import results
from toolkit.simulation import simulate as simulation
from toolkit.simulation.results import RoundResult
from toolkit.simulation.simulation_config import load_simulation

TESTS = str(ROOT) + ":" + str(ROOT / "tests")
PFEDME = "pfedme,penalty=2.0,personal-steps=1"
TEXT = f"""
model = "models_for_tests:smooth_cnn"
input_shape = {list(INPUT_SHAPE)}
rounds = 3
[training]
batch_size = 8
[simulation]
data = "data.npz"
participation = 0.5
[[devices]]
name = "one"
submodel = "{PFEDME}"
count = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_noise(tmp_path / "data.npz", 60, 0, INPUT_SHAPE, CLASSES)
    (tmp_path / "fleet.toml").write_text(TEXT)
    return tmp_path / "fleet.toml"


def changed(file: Path, before: str, after: str) -> Path:
    assert before in TEXT
    file.write_text(TEXT.replace(before, after))
    return file


def state_of(folder: Path) -> dict[str, bytes]:
    """All that must not depend on an interruption."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "history.jsonl"
    }


def descendants(process: int) -> list[int]:
    """The processes that `process` has started, and those that they have."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    children = [pid for pid, parent in parents.items() if parent == process]
    return children + [later for pid in children for later in descendants(pid)]


class KilledError(BaseException):
    """Nothing of the project catches it, as nothing catches a SIGKILL."""


@dataclass
class TornWrites:
    """Ends a simulation in the middle of the write with the number `left`."""

    left: int

    def around(self, write: Callable[..., Any], path_at: int) -> Callable[..., Any]:
        def writing(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            done = write(*arguments, **options)
            if self.left < 0:
                path = Path(arguments[path_at])
                path.write_bytes(path.read_bytes()[:-7])
                raise KilledError
            return done

        return writing


@pytest.mark.parametrize(
    ("kept", "step"),
    [(f'"{PFEDME}"', 3), long_one((f'"{PFEDME}"', 1)), long_one(('"width:0.5,window=rolling"', 1))],
    ids=["personal, some", "personal", "local"],
)
def test_killed_in_every_write(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str, step: int, seed: int
) -> None:
    text = TEXT.replace("rounds = 3", "rounds = 2").replace(f'"{PFEDME}"', kept)
    if "width" in kept:
        text = text.replace("[simulation]", '[simulation]\nbaseline = "local"')
    file.write_text(text)
    expected = simulation.simulate(file, tmp_path / "whole")
    for number in range(seed % step, 100, step):
        with monkeypatch.context() as patched:
            torn = TornWrites(left=number)
            patched.setattr(results, "save_file", torn.around(results.save_file, 1))
            patched.setattr(results, "write", torn.around(results.write, 0))
            patched.setattr(results, "append", torn.around(results.append, 0))
            try:
                simulation.simulate(file, tmp_path / "killed", force=True)
                break
            except KilledError:
                pass
        history = simulation.simulate(file, tmp_path / "killed")
        assert without_times(history) == without_times(expected)
        assert state_of(tmp_path / "killed") == state_of(tmp_path / "whole")
    # Two clients, a model and a line in each round, and the reference for the limits.
    writes = 2 * (2 + 1 + 1 + ("width" not in kept))
    writes += 1 + (expected[1].accuracy > expected[0].accuracy)  # the best model
    assert writes <= number < writes + step


def test_a_seed_replaces_those_of_the_file(file: Path, tmp_path: Path) -> None:
    came = simulation.simulate(file, tmp_path / "came", seed=7)
    file.write_text("seed = 7\n" + TEXT.replace("[simulation]", "[simulation]\nseed = 7"))
    assert without_times(simulation.simulate(file, tmp_path / "expected")) == without_times(came)
    assert state_of(tmp_path / "came") == state_of(tmp_path / "expected")
    with refused("simulation.other-settings", key="seed"):
        simulation.simulate(file, tmp_path / "came", seed=8)


def test_a_client_with_a_personal_model_keeps_its_submodel(file: Path, tmp_path: Path) -> None:
    changed(file, "[simulation]", '[simulation]\ncapacities = "dynamic"')
    with refused("simulation.personal-model", submodel=PFEDME):
        simulation.simulate(file, tmp_path / "out")


@pytest.mark.long
def test_a_killed_process_continues(file: Path, tmp_path: Path) -> None:
    """With factors of families that keep them, in a process that really is killed.

    Its workers end with it, and the run continues without workers.
    """
    changed(file, PFEDME, "cp:2.0,penalty=2.0,personal-steps=1,factor-steps=1")
    arguments = ("simulate", file, "--out", tmp_path / "killed")
    process = subprocess.Popen(
        command("edgetailor", *arguments, "--workers", 2),
        cwd=tmp_path,
        env=environment(PYTHONPATH=TESTS),
        stderr=subprocess.DEVNULL,
    )
    history = tmp_path / "killed" / "history.jsonl"
    while not (history.exists() and history.read_bytes()):
        assert process.poll() is None, "it ended before its first round"
        time.sleep(0.01)
    workers = descendants(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < limit, "workers are left"
        time.sleep(0.01)
    done = edgetailor(*arguments, cwd=tmp_path).succeeded()
    assert "Continuing after round" in done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'killed'}: 3 rounds, accuracy ")
    edgetailor("simulate", file, "--out", "whole", cwd=tmp_path).succeeded()
    assert state_of(tmp_path / "killed") == state_of(tmp_path / "whole")
    lines = (tmp_path / "whole" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


@pytest.mark.long
def test_ctrl_c_while_workers_start_is_one_line(file: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("edgetailor", "simulate", str(file), "--out", "out", "--workers", "2"),
        cwd=tmp_path,
        env=environment(PYTHONPATH=TESTS),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    limit = time.monotonic() + LIMIT_S
    while not descendants(process.pid):
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < limit, "no worker is started"
        time.sleep(0.01)
    time.sleep(0.5)  # the process that workers are forked from loads PyTorch, which takes longer
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "Interrupted." in said
    assert "Traceback" not in said


def test_more_rounds_continue_a_finished_simulation(file: Path, tmp_path: Path) -> None:
    simulation.simulate(changed(file, "rounds = 3", "rounds = 1"), tmp_path / "out")
    changed(file, "rounds = 3", "rounds = 2")
    assert len(simulation.simulate(file, tmp_path / "out")) == 2
    file.write_text("port = 1\nstate = 'elsewhere'\n" + file.read_text())
    assert len(simulation.simulate(file, tmp_path / "out")) == 2
    changed(file, "batch_size = 8", "batch_size = 9")
    with refused("simulation.other-settings", key="training"):
        simulation.simulate(file, tmp_path / "out")
    changed(file, "rounds = 3", "rounds = 4")
    for kept in (tmp_path / "out" / "state").glob("personal-*"):
        kept.write_bytes(kept.read_bytes()[:50])
    with refused("simulation.damaged-folder"):
        simulation.simulate(file, tmp_path / "out")
    (tmp_path / "out" / "history.jsonl").write_text("{}\n")
    changed(file, "rounds = 3", "rounds = 2")
    with refused("simulation.damaged-folder"):
        simulation.simulate(file, tmp_path / "out")


@pytest.mark.parametrize(
    "judge", half_quick(["held_out = 'others.npz'", "[evaluation]\nshare = 0.3"])
)
def test_rounds_end_if_models_do_not_improve(file: Path, tmp_path: Path, judge: str) -> None:
    write_noise(tmp_path / "others.npz", 40, 1, INPUT_SHAPE, CLASSES)
    endless = TEXT.replace("rounds = 3", 'rounds = "endless"').replace(PFEDME, "full")
    endless = endless.replace("[training]", f"{judge}\n[training]\nlearning_rate = 0.2")
    file.write_text(endless)
    with refused("simulation.endless", rounds="endless"):
        simulation.simulate(file, tmp_path / "out")
    history = simulation.simulate(file, tmp_path / "out", rounds=12)
    # A later round judges the model that the devices received: that of the round before.
    figures = [
        (r.accuracy, -r.loss) if r.devices is None else (r.devices.accuracy, -r.devices.loss)
        for r in history
    ]
    best = ended = 0
    for number, figure in enumerate(figures):
        best = number if figure > figures[best] else best
        if number - best == 2:
            ended = number + 1
            break
    assert 0 < ended < 12
    file.write_text("early_stopping = 2\n" + endless)
    for rounds in (11, 12):  # the second finds the first finished
        again = simulation.simulate(file, tmp_path / "early", rounds=rounds)
        assert without_times(again) == without_times(history[:ended])


def test_the_model_of_the_best_round_is_kept(file: Path, tmp_path: Path) -> None:
    """It is also kept if the simulation continues. Of equal rounds, the first is the best."""
    accuracies = iter([0.2, 0.7, 0.4, 0.7, 0.6])
    run, models = results.RunFolder.finish_round, []

    def finish(
        folder: results.RunFolder, result: RoundResult, model: bytes, reference: Reference
    ) -> None:
        models.append(model)
        run(folder, msgspec.structs.replace(result, accuracy=next(accuracies)), model, reference)

    changed(file, PFEDME, "full")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results.RunFolder, "finish_round", finish)
        for rounds in (1, 3, 5):
            simulation.simulate(file, tmp_path / "out", rounds=rounds)
            best = (tmp_path / "out" / "best.safetensors").read_bytes()
            assert best == models[0 if rounds == 1 else 1]
    assert len(set(models)) == 5
    names = sorted(path.name for path in (tmp_path / "out" / "state").iterdir())
    assert names == ["best-2", "model-5", "reference-5"]


def test_another_folder_stays_as_it_is(file: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    for force in (False, True):
        with refused("simulation.other-folder"):
            simulation.simulate(file, tmp_path / "notes", force=force)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_a_folder_in_which_nothing_was_finished_is_used(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # what a full disk leaves; a kill leaves the temporary file, too
    (out / ".config.json.k3j").write_text("{")
    history = simulation.simulate(file, out)
    for name in ("mine.txt", "state/.DS_Store", "state/my-notes"):
        (out / name).write_text("keep")
    assert simulation.simulate(changed(file, "rounds = 3", "rounds = 4"), out)[:3] == history
    again = simulation.simulate(file, out, force=True)
    assert without_times(again[:3]) == without_times(history)
    assert (out / "mine.txt").read_text() == "keep"


def test_a_selection_of_the_clients_that_an_earlier_version_drew(
    file: Path, tmp_path: Path
) -> None:
    """Over-selection trains the clients that come first; the others only cost their download."""
    share = changed(file, "participation = 0.5\n", "")
    share.write_text("clients_per_round = 0.5\nover_selection = 1.5\n" + share.read_text())
    result = simulation.simulate(share, tmp_path / "out")[0]
    assert (result.clients, result.not_needed, result.late) == (2, 1, 0)
    assert result.bytes_down == pytest.approx(1.5 * result.bytes_up, rel=0.01)
    settings = tmp_path / "out" / "config.json"
    written = json.loads(settings.read_text())
    file.write_text(TEXT)
    simulation.simulate(file, tmp_path / "old")
    for key in ("clients_per_round", "over_selection", "selection"):
        assert key in written
        earlier = json.loads((tmp_path / "old" / "config.json").read_text())
        del earlier[key]
        (tmp_path / "old" / "config.json").write_text(json.dumps(earlier))
    simulation.simulate(changed(file, "rounds = 3", "rounds = 4"), tmp_path / "old")


def test_a_loss_that_is_no_number_damages_nothing(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    simulation.simulate(file, out)
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    lines[-1]["loss"] = None  # what is written for one that is infinite
    (out / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = simulation.simulate(changed(file, "rounds = 3", "rounds = 4"), out)
    assert [math.isnan(result.loss) for result in history] == [False, False, True, False]


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ("participation = 0.5", "participation = 0", "config.bad-value", "participation"),
        ("participation = 0.5", "participations = 1", "config.unknown-key", "did you mean"),
        (
            "participation = 0.5",
            "alpha = 0.5",
            "config.bad-value",
            '"dirichlet"; partition is "iid"',
        ),
        ("participation = 0.5", "shards = 2", "config.bad-value", '"shards"; partition is "iid"'),
        ("rounds = 3", "rounds = 3\nclients_per_round = 2", "config.bad-value", "remove `part"),
        ("participation = 0.5", "clients = 5", "config.bad-value", "have 4 places"),
        ("count = 4", 'count = "any"', "config.bad-value", "set `clients`"),
        ('data = "data.npz"', "", "config.missing-key", "simulation.data"),
        ("[simulation]", "[simulations]", "config.unknown-key", "simulation"),
        (f'"{PFEDME}"', '"auto"', "config.bad-value", "real device"),
    ],
)
def test_mistakes_in_the_file(file: Path, before: str, after: str, code: str, words: str) -> None:
    with refused(code) as error:
        load_simulation(changed(file, before, after))
    assert words in str(error.value)
    assert "fleet.toml" in str(error.value)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("data.npz", "nothing.npz", "data.missing-file"),
        ("count = 4", "count = 40", "data.too-few-for-clients"),
        (PFEDME, "slice:nothing", "spec.unknown-cut-point"),
        ("batch_size = 8", "learning_rate = 1e30", "update.diverged"),
    ],
)
def test_what_cannot_be_simulated(
    file: Path, tmp_path: Path, before: str, after: str, code: str
) -> None:
    with refused(code):
        simulation.simulate(changed(file, before, after), tmp_path / "out")


def test_kinds_of_any_number_share_the_rest(file: Path) -> None:
    more = '[[devices]]\nname = "{}"\nsubmodel = "width:0.{}"\ncount = "any"\n'
    text = TEXT.replace("[simulation]", "[simulation]\nclients = 9")
    file.write_text(text + more.format("two", 5) + more.format("three", 25))
    assert load_simulation(file).specs() == [PFEDME] * 4 + ["width:0.5"] * 3 + ["width:0.25"] * 2


def test_a_mistake_is_one_sentence(file: Path, tmp_path: Path) -> None:
    for before, after in (("rounds = 3", "round = 3"), ("data.npz", "nothing.npz")):
        changed(file, before, after)
        assert refusal(edgetailor("simulate", file, cwd=tmp_path))
        assert not (tmp_path / "fleet").exists()
