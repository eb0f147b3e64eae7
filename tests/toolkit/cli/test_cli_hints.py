"""Mistakes of a newcomer: the whole sentence that the command answers, with what to write."""

from pathlib import Path

import pytest

from commands import refused

SHAPE = ("--input-shape", "1,6,6")
EXPORT = ("export", "nets:tiny", *SHAPE, "--out", "b")
PLAN = ("plan", "nets:tiny", *SHAPE, "--profile")
FOLDER = (
    "update is a folder, but the weights of the global model are one file. Give the .safetensors "
    "file that `edgetailor export --save-weights` or `edgetailor aggregate --out` wrote."
)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("aggregate", "update", "other", "--out", "new"), FOLDER),
        (("evaluate", "nets:tiny", *SHAPE, "--weights", "update", "--data", "d.npz"), FOLDER),
        (
            ("inspect", "nets.py:tiny", *SHAPE),
            "Invalid model 'nets.py:tiny': it names a file, but a model is named by its module. "
            "To use this file, write nets:tiny.",
        ),
        (
            (*EXPORT, "--format", "onxx"),
            "Invalid value for '--format': 'onxx' is not one of 'onnx', 'tflite': did you mean "
            "'onnx'?",
        ),
        (
            (*EXPORT, "--loss", "likelihood"),
            "loss is 'likelihood', but there is no loss 'likelihood'. The losses are "
            "cross-entropy, binary-cross-entropy, ctc, mse, mae, huber, dice, cosine, contrastive, "
            "or module:function for a loss of your own.",
        ),
        (
            (*EXPORT, "--submodel", "low-rank:0,5"),
            "Invalid number 'low-rank:0,5' in 'low-rank:0,5': write decimals with a point, "
            "'low-rank:0.5'.",
        ),
    ],
)
def test_the_sentence_says_what_to_write(
    folder: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (folder / "update").mkdir()
    assert refused(folder, *arguments) == sentence


def test_a_profile_with_almost_the_name_of_a_built_in_one(folder: Path) -> None:
    sentence = refused(folder, *PLAN, "raspberry-pi4-2gb")
    assert sentence.startswith(
        "There is no device profile 'raspberry-pi4-2gb': did you mean 'raspberry-pi-4-2gb' or "
        "'raspberry-pi-4-8gb' or 'raspberry-pi-4-4gb'? Give a file that `edgetailor-agent "
    )
