"""`edgetailor aggregate`: its table, and the updates that it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save, save_file

from bundles import flip_a_bit, tiny_bundle, tiny_model, write_data
from command_models import digits_weights
from commands import edgetailor, refused, stages
from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.update import RECORD, TENSORS
from edgetailor import GlobalModel
from trainings import train_bundle


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the global model `global.safetensors` and two updates of it, `one`, `two`."""
    folder = tmp_path_factory.mktemp("round")
    (folder / "global.safetensors").write_bytes(tiny_model()[1].save())
    for seed, (name, family) in enumerate([("one", "slice"), ("two", "cp")]):
        data = write_data(folder / f"{name}.npz", seed=seed)
        train_bundle(tiny_bundle(tmp_path_factory, family), str(data), folder / name, threads=1)
    return folder


@pytest.fixture
def round_(updates: Path, tmp_path: Path) -> Path:
    """A copy of that folder to work in."""
    return shutil.copytree(updates, tmp_path / "round")


def edit(update: Path, **changes: object) -> None:
    record = json.loads((update / RECORD).read_bytes())
    (update / RECORD).write_text(json.dumps({**record, **changes}))


def retensor(update: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of an update and make its hash right again."""
    tensors = load_file(update / TENSORS)
    change(tensors)
    data = save(tensors)
    (update / TENSORS).write_bytes(data)
    entry = fingerprint(data)
    edit(update, file={"size": entry.size, "sha256": entry.sha256})


def test_aggregate(round_: Path) -> None:
    """The model's statistics are drawn, not measured: update 2 alone has a norm, far from them."""
    done = edgetailor("aggregate", "global.safetensors", "one", "two", "--out", "new", cwd=round_)
    assert done.code == 0
    assert stages(done) == [
        "loading PyTorch",
        "reading global.safetensors",
        "measuring the updates",
        "adding update 1: slice:classifier",
        "adding update 2: cp:2.0",
        "computing the new model",
        "writing new",
    ]
    assert re.fullmatch(
        r"submodel          samples  steps  +loss *\n"
        r"slice:classifier       21     10  \d\.\d{3} to \d\.\d{3} *\n"
        r"cp:2\.0                 21     10  \d\.\d{3} to \d\.\d{3} *\n"
        r"update 2 was limited: its change of 'norm\.running_var' was 1\.\d+ times the limit\n"
        r"global model: new\n",
        done.stdout,
    )
    before, after = load_file(round_ / "global.safetensors"), load_file(round_ / "new")
    assert {n: a.shape for n, a in after.items() if not n.startswith("kept|")} == {
        n: a.shape for n, a in before.items()
    }


def test_one_epoch_has_one_loss_in_the_table(round_: Path) -> None:
    edit(round_ / "one", loss_first=0.5, loss_last=0.5)
    done = edgetailor("aggregate", "global.safetensors", "one", "--out", "new", cwd=round_)
    assert (done.code, done.stdout) == (
        0,
        "submodel          samples  steps   loss\n"
        "slice:classifier       21     10  0.500\n"
        "global model: new\n",
    )


def test_aggregate_as_json_and_by_force(round_: Path) -> None:
    (round_ / "new").write_bytes(b"old")
    done = edgetailor(
        "aggregate", "global.safetensors", "one", "--out", "new", "--force", "--json", cwd=round_
    ).succeeded()
    assert json.loads(done.stdout) == {
        "version": 1,
        "out": "new",
        "updates": [{"submodel": "slice:classifier", "samples": 21, "limited": None}],
    }
    assert (round_ / "new").read_bytes() != b"old"


def test_aggregate_by_another_rule(round_: Path) -> None:
    """The median of two updates is that of `et.aggregate`, and not the weighted mean."""
    shutil.copytree(round_ / "one", round_ / "more")
    retensor(round_ / "more", lambda tensors: tensors.update({n: -a for n, a in tensors.items()}))
    edit(round_ / "more", samples=10**6)
    command = ("aggregate", "global.safetensors", "one", "more", "--out", "new", "--rule", "median")
    assert edgetailor(*command, "--no-bounds", cwd=round_).code == 0
    one, more = (load_file(round_ / name / TENSORS) for name in ("one", "more"))
    after = load_file(round_ / "new")
    trained = one.keys() & after.keys()
    assert trained
    for name in trained:
        np.testing.assert_allclose(after[name], (one[name] + more[name]) / 2, atol=1e-6)


def test_an_update_that_differs_much_is_limited_unless_told_otherwise(round_: Path) -> None:
    """One of two equal updates claims 50 times the samples."""
    shutil.copytree(round_ / "one", round_ / "far")
    retensor(round_ / "far", lambda t: t.update({n: a + np.float32(10) for n, a in t.items()}))
    edit(round_ / "far", samples=21 * 50)
    command = ("aggregate", "global.safetensors", "one", "far", "--out", "new", "--force")
    done = edgetailor(*command, cwd=round_)
    (line,) = [line for line in done.stdout.splitlines() if "limited" in line]
    assert re.fullmatch(
        r"update 2 was limited: its change of 'classifier.\w+' was \d+(\.\d+)? times the limit, "
        r"and 1 further tensor too; of its 1,050 samples 42 count",
        line,
    )
    limited = load_file(round_ / "new")
    assert "limited" not in edgetailor(*command, "--no-bounds", cwd=round_).stdout
    free, first = load_file(round_ / "new"), load_file(round_ / "global.safetensors")
    moved = [
        np.abs(m["classifier.weight"] - first["classifier.weight"]).mean() for m in (limited, free)
    ]
    assert moved[0] < moved[1] / 2


def another_round(folder: Path) -> None:
    tensors = load_file(folder / "global.safetensors")
    tensors["classifier.bias"] += 1
    save_file(tensors, folder / "global.safetensors")


def another_model(folder: Path) -> None:
    model = GlobalModel({name: torch.from_numpy(a) for name, a in digits_weights().items()})
    (folder / "global.safetensors").write_bytes(model.save())


def passed_off(folder: Path) -> None:
    """An update that claims to be of another model's round."""
    another_model(folder)
    base = fingerprint((folder / "global.safetensors").read_bytes()).sha256
    for name in ("one", "two"):
        edit(folder / name, base=base)


def not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["classifier.bias"] = tensors["classifier.bias"] * np.float32("nan")


def in_place_of_two(folder: Path) -> None:
    shutil.rmtree(folder / "two")
    shutil.move(folder / "two.npz", folder / "two")


REFUSED = {
    "another round": (another_round, r"^one was not trained from the global model global\.s"),
    "another model": (
        another_model,
        r"it belongs to another model or another round\. Give the global",
    ),
    "passed off": (passed_off, r"'classifier\.weight'.* (global model|model's)"),
    "altered": (lambda f: flip_a_bit(f / "two" / TENSORS), r"^two/update\.safetensors is not the "),
    "nan": (lambda f: retensor(f / "one", not_finite), r"'classifier\.bias' .* is not finite"),
    "foreign": (lambda f: retensor(f / "one", dict.clear), r"^one: the tensor 'classifier\."),
    "no update": (lambda f: shutil.rmtree(f / "two"), r"^two is not an update: update\.json is mi"),
    "a file": (in_place_of_two, r"^two is a file; an update is a folder"),
    "family": (lambda f: edit(f / "one", submodel="no:1"), r"Unknown family 'no'"),
    "version": (lambda f: edit(f / "one", version=2), r"^one/update\.json has version 2"),
    "no samples": (lambda f: edit(f / "one", samples=0), r"^The update of .* samples, not on 0\."),
    "no global": (lambda f: (f / "global.safetensors").unlink(), r"^global\.safetensors cannot be"),
    "bad global": (
        lambda f: (f / "global.safetensors").write_text("x"),
        r"^global\.safetensors is not a safetensors file",
    ),
    "out exists": (lambda f: (f / "new").write_bytes(b"old"), r"^new exists already: give another"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_aggregate_refuses(round_: Path, case: str) -> None:
    damage, message = REFUSED[case]
    damage(round_)
    command = ("aggregate", "global.safetensors", "one", "two", "--out", "new")
    assert re.search(message, refused(round_, *command))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("one", "one is a folder: give the name of a file."),
        ("one.npz/new", "one.npz/new cannot be written: one.npz is a file, not a folder."),
    ],
)
def test_aggregate_refuses_places_first(round_: Path, out: str, message: str) -> None:
    command = ("aggregate", "missing.safetensors", "one", "--out", out, "--force")
    assert refused(round_, *command) == message


def test_each_update_counts_once(round_: Path) -> None:
    shutil.copytree(round_ / "one", round_ / "copy")
    command = ("aggregate", "global.safetensors", "one", "two", "copy", "--out", "new")
    assert refused(round_, *command) == "copy is the same update as one: give each update once."


def test_aggregate_needs_updates(round_: Path) -> None:
    assert refused(round_, "aggregate", "global.safetensors", "--out", "new") == (
        "Give at least one UPDATE: a folder that `edgetailor-agent train` wrote."
    )


def test_updates_given_ahead_of_the_global_model(round_: Path) -> None:
    options = ("--out", "new", "--beta", "0.5", "--json")
    done = edgetailor("aggregate", "one", "two", "global.safetensors", *options, cwd=round_)
    assert done.code == 2
    assert done.stderr == (
        "Error: The weights file global.safetensors must come before the update one. Run: "
        "edgetailor aggregate global.safetensors one two --out new --beta 0.5 --json\n"
    )
    assert json.loads(done.stdout)["error"]["code"] == "aggregate.wrong-order"
