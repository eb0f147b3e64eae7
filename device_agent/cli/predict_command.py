"""`edgetailor-agent predict`."""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device_agent.cli.console import print_json
from device_agent.cli.options import (
    json_option,
    max_memory_option,
    state_option,
    threads_option,
)

if TYPE_CHECKING:
    from device_agent.inference.predictor import Prediction, Predictor

STANDARD_INPUT = "-"
HEAD_BYTES = 16
"""How much of a file tells its kind."""
SHOWN = 20
"""The most predictions that the table shows."""


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--data",
    required=True,
    help="Samples without labels: FILE.npy, FILE.npz with x, a folder with x.npy, or - for "
    "standard input; also a picture, a CSV file or a folder of these, if the federation takes "
    "them.",
)
@click.option(
    "--personal",
    metavar="[FILE]",
    is_flag=False,
    flag_value="",
    help="Predict with the personal model of this device, or of FILE.",
)
@state_option
@max_memory_option
@threads_option
@json_option
def predict(
    bundle: Path | None,
    data: str,
    personal: str | None,
    state: Path | None,
    max_memory: int | None,
    threads: int,
    as_json: bool,
) -> None:
    """Predict with BUNDLE or this device's model.

    Without BUNDLE, the newest model that this device has received in its federation predicts.

    \b
        edgetailor-agent predict --data picture.png
        edgetailor-agent predict bundles/phone --data samples.npy --json
    """
    from device_agent.federation.newest_model import newest_model, personal_model
    from device_agent.inference.predictor import Predictor

    if bundle is None and personal and Path(personal).is_dir():
        raise click.UsageError(
            f"--personal takes a file, and {personal} is a folder. Put the bundle first: "
            f"predict {personal} --personal FILE."
        )
    folder = bundle or newest_model(state, personal=personal is not None)
    own = None if personal is None else Path(personal) if personal else personal_model(state)
    predictor = Predictor(folder, personal=own, threads=threads, max_memory=max_memory)
    with _source(data, predictor) as source:
        predictions = list(predictor.predict_files(source))
    if as_json:
        import msgspec

        document = _document(folder, own, predictor, predictions)
        print_json(msgspec.json.format(msgspec.json.encode(document), indent=1))
        return
    for line in _lines(predictor, predictions[:SHOWN]):
        click.echo(line)
    if len(predictions) > SHOWN:
        click.echo(f"... and {len(predictions) - SHOWN} more: --json prints all.", err=True)


@contextmanager
def _source(data: str, predictor: "Predictor") -> Iterator[Path]:
    """The file at `data`, or a copy of standard input while the block runs."""
    if data != STANDARD_INPUT:
        yield Path(data)
        return
    from device_agent.data.unlabelled import suffix_of

    head = sys.stdin.buffer.read(HEAD_BYTES)
    suffix = suffix_of(head, predictor.bundle.manifest.preprocessing)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"stdin{suffix}"
        with copy.open("wb") as file:
            file.write(head)
            shutil.copyfileobj(sys.stdin.buffer, file)  # it may be larger than memory
        yield copy


def _lines(predictor: "Predictor", predictions: Sequence["Prediction"]) -> Iterator[str]:
    """A line for each prediction, at most 80 columns wide if names are not longer."""
    width = max((len(prediction.file) for prediction in predictions), default=0)
    for prediction in predictions:
        yield f"{prediction.file:<{width}}  {predictor.describe(prediction.values)}"


def _document(
    folder: Path,
    personal: Path | None,
    predictor: "Predictor",
    predictions: Sequence["Prediction"],
) -> dict[str, object]:
    about, meaning = predictor.bundle.manifest, predictor.meaning
    key = "values" if meaning == "numbers" else "probabilities"
    return {
        "version": 1,
        "bundle": str(folder),
        "submodel": about.submodel,
        "personal": None if personal is None else str(personal),
        "classes": list(predictor.classes),
        "predicted_bytes": predictor.predicted_bytes,
        "predictions": [
            {"file": prediction.file, key: prediction.values.tolist()}
            | (
                {"class": predictor.classes[int(prediction.values.argmax())]}
                if meaning != "numbers" and prediction.values.ndim == 1
                else {}
            )
            | ({"labels": predictor.decode(prediction.values)} if meaning == "ctc" else {})
            for prediction in predictions
        ],
    }
