"""`edgetailor deploy`: what it prints and writes, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest

import deployed_digits
from commands import STAGE, edgetailor, refused
from device_agent.formats.manifest import encode
from made_calibration import DEVICE, MAC_S, RUN_S

FILE = deployed_digits.FILE
REFERENCE = (deployed_digits.MODEL, "--input-shape", "1,8,8", "--weights", deployed_digits.WEIGHTS)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A copy of the federation's folder."""
    shutil.copytree(deployed_digits.federation(tmp_path_factory), tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_federation_is_deployed_for_its_kinds(folder: Path) -> None:
    arguments = ("deploy", FILE, "--out", "out", "--kind", "board", "--kind", "sensor")
    done = edgetailor(*arguments, cwd=folder).succeeded()
    assert all(re.match(STAGE, line) for line in done.stderr.splitlines())
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["board", "sensor"]
    lines = done.stdout.splitlines()
    card = json.loads((folder / "out/board/card.json").read_bytes())
    (row,) = (line.split() for line in lines if line.startswith("board "))
    assert row[1] == "low-rank:0.5"
    assert f"{card['quality']['accuracy']:.2%}" in row
    assert "board: out/board has the global model, reduced to the devices' low-rank" in done.stdout
    assert max(map(len, lines)) <= 80
    assert "the whole model on the devices: accuracy 93.75%, loss 0.2000 on 96" in done.stdout
    assert "time" not in lines[0]  # nothing is known about it
    assert "exists already" in refused(folder, *arguments)
    (folder / "device.json").write_bytes(encode(DEVICE))
    again = edgetailor(
        *arguments, "--round", "2", "--force", "--json", "--profile", "device.json",
        cwd=folder,
    )  # fmt: skip
    assert again.code == 0, again.stdout
    document = json.loads(again.stdout)
    first = document["bundles"][0]
    assert (first["name"], first["out"], first["card"]["round"]) == ("board", "out/board", 2)
    assert first["card"] == json.loads((folder / "out/board/card.json").read_bytes())
    assert first["card"]["quality"]["accuracy"] < card["quality"]["accuracy"]
    whole = document["bundles"][1]["card"]["cost"]
    # The products of four convolutions and a dense layer; other operators take little.
    products = 9 * (16 * 64 + 32 * 16 * 64 + 32 * 32 * 16 + 64 * 32 * 16) + 640
    least = RUN_S + products * MAC_S
    assert whole["profile"] == DEVICE.name
    assert least < whole["seconds"] < 1.2 * least


def test_a_model_is_deployed_from_its_weights(folder: Path) -> None:
    done = edgetailor(
        "deploy", *REFERENCE, "--out", "out", "--data", "held_out.npz", "--json",
        "--submodel", "full", "--submodel", "width:0.5", cwd=folder,
    ).succeeded()  # fmt: skip
    full, narrow = json.loads(done.stdout)["bundles"]
    assert (full["out"], narrow["out"]) == ("out/full", "out/width-0.5")
    assert full["card"]["quality"]["accuracy"] > 0.9
    assert (full["card"]["kind"], full["card"]["signer"]) == (None, None)
    assert narrow["card"]["graph_bytes"] < full["card"]["graph_bytes"] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([FILE, "--round", "7"], r"^state has no round 7\. The last round that is over is 2\."),
        ([FILE, "--round", "0"], r"^The model of round 0 is not kept: "),
        ([FILE, "--round", "last"], r"Invalid round 'last': write its number, or best"),
        ([FILE, "--kind", "bord"], r"^The federation has no kind 'bord'.*board"),
        ([FILE, "--weights", "w.safetensors"], r"^A federation's file has the model: leave out"),
        ([FILE, "--data", "nowhere.npz"], r"^nowhere\.npz does not exist"),
        ([FILE, "--profile", "raspberry-pi-5-4gb"], r"has no calibration, so it predicts no time"),
        ([FILE, "--profile", "x", "--precision", "int8"], r"^--profile needs --format onnx"),
        ([FILE, "--profile", "toaster"], r"^There is no device profile 'toaster'"),
        ([deployed_digits.MODEL], r"^A MODEL needs --weights, and --input-shape or --input"),
        ([*REFERENCE, "--round", "1"], r"^--round needs a federation's file as SOURCE"),
        (["federation.tml"], r"^A MODEL needs|^Invalid model"),
        ([*REFERENCE, "--submodel", "slim"], r"^Unknown family 'slim'"),
    ],
)
def test_what_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    sentence = refused(folder, "deploy", *arguments, "--out", "out")
    assert re.search(message, sentence.replace(f"{folder}/", ""))
    assert not (folder / "out").exists()


def test_another_model_and_other_data(folder: Path) -> None:
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(text.replace("digits_cnn", "digits_resnet"))
    assert "The file is of another model" in refused(folder, "deploy", FILE, "--out", "out")
    (folder / FILE).write_text(text.replace("[1, 8, 8]", "[1, 9, 9]"))
    assert "x must be (n, 1, 9, 9)" in refused(folder, "deploy", FILE, "--out", "out")
    (folder / FILE).write_text(text)
    (folder / "state" / "coordinator.key").write_text("no key")
    assert "is missing or damaged" in refused(folder, "deploy", FILE, "--out", "out")
    assert not (folder / "out").exists()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_an_earlier_output_is_replaced(folder: Path) -> None:
    """Neither a state folder nor files beside a bundle are lost or get company."""
    before = content(folder / "state")
    for options in ((), ("--force",)):
        said = refused(folder, "deploy", FILE, "--out", "state", "--kind", "desktop", *options)
        assert "state is not a folder of bundles: it has " in said
        assert "Give a new folder." in said
    assert content(folder / "state") == before
    arguments = ("deploy", FILE, "--out", "out", "--kind", "desktop")
    assert edgetailor(*arguments, cwd=folder).code == 0
    # Another kind may come later, and the same kind again.
    assert edgetailor(*arguments, "--kind", "sensor", "--force", cwd=folder).code == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["desktop", "sensor"]
    (folder / "out" / "desktop" / "notes.txt").write_text("mine")
    assert "it has desktop" in refused(folder, *arguments, "--force")
    said = refused(folder, "deploy", *REFERENCE, "--out", "out/desktop", "--force")
    assert "has more than a bundle: notes.txt, so --force does not replace it" in said
    assert (folder / "out" / "desktop" / "notes.txt").read_text() == "mine"
