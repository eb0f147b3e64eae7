"""The command `edgetailor-agent predict`."""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device_agent.cli.console import print_json, say
from device_agent.cli.options import (
    json_option,
    max_memory_option,
    state_option,
    threads_option,
)
from profiles.text_formatting import counted

if TYPE_CHECKING:
    from device_agent.inference.predictor import Prediction, Predictor
    from profiles.errors import DataError

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
    help="Samples without labels: FILE.npy, FILE.npz with x (x_NAME for several inputs), a folder "
    "of such .npy files, or - for standard input; also a picture, a CSV file or a folder of these, "
    "if the federation takes them.",
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

    Without BUNDLE, the command uses the current release of this device. If there is no release, it
    uses the newest model that the device received. If a file in the folder DATA cannot be used, the
    command names the file, and its exit code is not 0.

    \b
        edgetailor-agent predict --data picture.png
        edgetailor-agent predict bundles/phone --data samples.npy --json
    """
    from device_agent.federation.newest_model import (
        newest_model,
        personal_model,
        refuse_state_folder,
    )
    from device_agent.inference.predictor import Predictor

    if bundle is None and personal and Path(personal).is_dir():
        raise click.UsageError(
            f"--personal takes a file, and {personal} is a folder. Put the bundle first: "
            f"predict {personal} --personal FILE."
        )
    if bundle is not None:
        refuse_state_folder(bundle)
    folder = bundle or newest_model(state, personal=personal is not None)
    own = None if personal is None else Path(personal) if personal else personal_model(state)
    predictor = Predictor(folder, personal=own, threads=threads, max_memory=max_memory)
    failed: list[DataError] = []

    def on_error(error: "DataError") -> None:
        say(f"Error: {error}")
        failed.append(error)

    with _source(data, predictor) as source:
        predictions = list(predictor.predict_files(source, on_error=on_error))
    if as_json:
        import msgspec

        document = _document(folder, own, predictor, predictions, failed)
        print_json(msgspec.json.format(msgspec.json.encode(document), indent=1))
    else:
        for line in _lines(predictor, predictions[:SHOWN]):
            click.echo(line)
        if len(predictions) > SHOWN:
            say(f"... and {len(predictions) - SHOWN} more: --json prints all.")
    if failed:
        say(f"{counted(len(failed), 'file')} could not be used.")
        raise click.exceptions.Exit(failed[0].exit_code)


@contextmanager
def _source(data: str, predictor: "Predictor") -> Iterator[Path]:
    """Yield the file at `data`, or a copy of standard input that is deleted afterwards."""
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
    """Format a title and a line for each prediction, at 80 columns unless names are longer."""
    if not predictions:
        return
    titles: tuple[str, ...] = ("file", "class", "probability")
    if not _is_class(predictor, predictions[0]):
        columns = {"numbers": "numbers", "outputs": "numbers", "ctc": "labels"}
        titles = ("file", columns.get(predictor.meaning, "classes"))
    rows = [titles, *(_cells(predictor, prediction) for prediction in predictions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _is_class(predictor: "Predictor", prediction: "Prediction") -> bool:
    """Whether a sample has a single class."""
    return predictor.meaning in ("softmax", "sigmoid") and prediction.values.ndim == 1


def _cells(predictor: "Predictor", prediction: "Prediction") -> tuple[str, ...]:
    values = prediction.values
    if not _is_class(predictor, prediction):
        return prediction.file, predictor.describe(values)
    best = int(values.argmax())
    return prediction.file, predictor.classes[best], f"{values[best]:.1%}"


def _as_json(prediction: "Prediction") -> object:
    """The numbers of a prediction, with the name of each if the model has several outputs."""
    if not prediction.outputs:
        return prediction.values.tolist()
    return {name: values.tolist() for name, values in prediction.outputs.items()}


def _document(
    folder: Path,
    personal: Path | None,
    predictor: "Predictor",
    predictions: Sequence["Prediction"],
    failed: Sequence["DataError"],
) -> dict[str, object]:
    about, meaning = predictor.bundle.manifest, predictor.meaning
    key = "values" if meaning in ("numbers", "outputs") else "probabilities"
    return {
        "version": 1,
        "bundle": str(folder),
        "submodel": about.submodel,
        "personal": None if personal is None else str(personal),
        "classes": list(predictor.classes),
        "predicted_bytes": predictor.predicted_bytes,
        "predictions": [
            {"file": prediction.file, key: _as_json(prediction)}
            | (
                {"class": predictor.classes[int(prediction.values.argmax())]}
                if _is_class(predictor, prediction)
                else {}
            )
            | ({"labels": predictor.decode(prediction.values)} if meaning == "ctc" else {})
            for prediction in predictions
        ],
        "failed": [{"code": error.code, "message": str(error)} | error.values for error in failed],
    }
