"""`edgetailor-agent train`: its output, what it refuses, and what it writes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bundles import (
    BATCH,
    CLASSES,
    FAMILIES,
    BundleOf,
    diverging,
    everything,
    rewrite,
    samples,
    write_data,
)
from commands import NUMBER, Agent, refusal

LOST = (
    "The personal model of this bundle is lost after this training. Use --personal "
    "FILE.safetensors to keep it.\n"
)


def test_train(agent: Agent, bundle: Path, data: str) -> None:
    done = agent("train", bundle, "--data", data, "--out", "update", "--threads", "1").succeeded()
    spec = FAMILIES[bundle.name.removeprefix("tiny-")]
    lost = LOST if spec == FAMILIES["cp"] else ""
    epochs = rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n"
    assert re.fullmatch(lost + epochs, done.stderr)
    assert re.fullmatch(
        rf"{spec}: 10 steps on 21 samples, loss {NUMBER} to {NUMBER}; update: update\n", done.stdout
    )


def test_train_as_json(agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path) -> None:
    done = agent("train", bundle_of("full"), "--data", data, "--out", "update", "--json")
    assert done.code == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "update/update.json").read_bytes())


def test_train_on_a_function_of_the_owners(
    agent: Agent, bundle_of: BundleOf, tmp_path: Path
) -> None:
    code = "import numpy as np\ndef local():\n    d = np.load('d.npz')\n    return d['x'], d['y']\n"
    (tmp_path / "owners.py").write_text(code)
    x, y = samples(9, seed=1)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    done = agent("train", bundle_of("full"), "--data", "owners:local", "--out", "update")
    assert done.code == 0
    assert "4 steps on 9 samples" in done.stdout


def bad_data(folder: Path) -> str:
    x, _ = samples(5, seed=0)
    np.savez(folder / "bad.npz", x=x, y=np.full(5, CLASSES))
    return "bad.npz"


REFUSED = {
    "no bundle": r"nowhere is not a bundle: manifest\.json cannot be read",
    "damaged bundle": r"train\.onnx was altered: its SHA-256 differs from the manifest",
    "no data": r"nowhere\.npz does not exist; give an \.npz file with x and y, or x_NAME and "
    r"y_NAME for several inputs or outputs\.",
    "bad data": r"bad\.npz: the label 8 is outside the model's classes 0 to 7\.",
    "out exists": r"update exists already: give another place",
    "diverges": r"not finite.*[Ll]ower the learning rate",
    "negative seed": r"seed",
}


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path, case: str
) -> None:
    used, source, more = bundle_of("full"), data, []
    match case:
        case "no bundle":
            used = Path("nowhere")
        case "damaged bundle":
            used = shutil.copytree(used, tmp_path / "bundle")
            (used / "train.onnx").write_bytes((used / "train.onnx").read_bytes()[::-1])
        case "no data":
            source = "nowhere.npz"
        case "bad data":
            source = bad_data(tmp_path)
        case "out exists":
            (tmp_path / "update").mkdir()
        case "diverges":
            used = diverging(used, tmp_path / "bundle")
        case "negative seed":
            more = ["--seed", "-1"]
    before = everything(tmp_path)
    done = agent("train", used, "--data", source, "--out", "update", *more)
    assert re.search(REFUSED[case], refusal(done))
    assert everything(tmp_path) == before


def test_one_epoch_has_one_loss(agent: Agent, bundle_of: BundleOf, tmp_path: Path) -> None:
    short = shutil.copytree(bundle_of("full"), tmp_path / "bundle")
    rewrite(short, lambda manifest: manifest["schedule"][-1].update(epochs=1))
    write_data(tmp_path / "few.npz", count=BATCH)
    done = agent("train", short, "--data", "few.npz", "--out", "update").succeeded()
    heard = re.fullmatch(rf"epoch 1 of 1: loss ({NUMBER})\n", done.stderr)
    assert heard
    assert done.stdout == f"full: 1 step on {BATCH} samples, loss {heard[1]}; update: update\n"


def test_train_replaces_an_update_by_force(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    command = ("train", bundle_of("full"), "--data", data, "--out", "update", "--threads", "1")
    assert agent(*command).code == 0
    first = everything(tmp_path)
    assert refusal(agent(*command)) == (
        "update exists already: give another place, or --force to replace it."
    )
    assert everything(tmp_path) == first
    done = agent(*command, "--seed", "1", "--force").succeeded()
    assert re.fullmatch(rf"epoch 1 of 2: loss {NUMBER}\nepoch 2 of 2: loss {NUMBER}\n", done.stderr)
    assert re.fullmatch(
        rf"full: 10 steps on 21 samples, loss {NUMBER} to {NUMBER}; update: update\n", done.stdout
    )
    assert everything(tmp_path).keys() == first.keys()
    assert everything(tmp_path) != first


def test_force_leaves_alone_what_is_no_update(
    agent: Agent, bundle_of: BundleOf, data: str, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    files = {"photos": b"folder", "photos/cat.jpg": b"cat"}
    for _ in range(2):
        done = agent("train", bundle_of("full"), "--data", data, "--out", "photos", "--force")
        assert refusal(done) == (
            "photos is not an update, or has other files too, so --force does not replace it: give "
            "another place."
        )
        assert everything(tmp_path) == files
        (tmp_path / "photos" / "update.json").write_bytes(b"{}")
        files["photos/update.json"] = b"{}"


def test_train_needs_data(agent: Agent, bundle_of: BundleOf) -> None:
    done = agent("train", bundle_of("full"), "--out", "update")
    assert refusal(done) == "Missing option '--data'."
