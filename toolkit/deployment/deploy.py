"""Writes an inference bundle with its model card: the public `edgetailor.deploy`."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from device_agent.formats.atomic_files import write_file
from device_agent.formats.bundle import open_bundle
from device_agent.formats.preprocessing import Preprocessing
from exporters.export import Format, check_places, write_bundle
from exporters.quantization.precision import Precision
from exporters.verification.verdict import Verdict
from profiles.progress import Report, silent
from toolkit.deployment.card_content import card_files, model_card
from toolkit.deployment.inference_bundle import inference_bundle
from toolkit.deployment.model_card import ModelCard
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target
from toolkit.deployment.trained_model import Samples, TrainedModel
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig


@dataclass(frozen=True)
class Deployed:
    """An inference bundle that was written to `out`: the result of `deploy`.

    Attributes:
        out: The bundle's folder.
        card: Its model card.
        verdict: What the comparison of the float32 graph with PyTorch found.
    """

    out: Path
    card: ModelCard
    verdict: Verdict | None


def deploy(
    model: nn.Module,
    spec: str,
    sample_shape: tuple[int, ...],
    out: str | Path,
    *,
    training: TrainingConfig | None = None,
    data: Samples | None = None,
    preprocessing: Preprocessing | None = None,
    format: Format = "onnx",
    precision: Precision = "float32",
    calibration: Samples | None = None,
    force: bool = False,
    progress: Report = silent,
) -> Deployed:
    """Write a trained model as an inference bundle: one graph with the weights inside, and a card.

    Use it after the last round, to predict with what was learned. A device opens the bundle with
    `Predictor`; any program can run its graph with ONNX Runtime or LiteRT.

    Args:
        model: The model with its trained weights.
        spec: The submodel that the devices train. If it cannot predict alone (a slice) or is
            personal (`cp`, `pfedme`), the bundle has the whole model.
        sample_shape: Shape of one sample, without the batch.
        out: The folder to write.
        training: How the model was trained. Its loss gives the meaning of the output.
        data: Held-out samples and labels, for the accuracy in the card.
        preprocessing: How pictures or CSV files become samples.
        format: `onnx` for ONNX Runtime, `tflite` for LiteRT.
        precision: `float32`; `float16` weights, which take half the space; or `int8`, which also
            computes with integers and needs samples to calibrate.
        calibration: Samples and labels to calibrate int8. Default: `data`.
        force: Replace an earlier bundle at `out`.
        progress: Called with the name of each stage when it begins.

    Returns:
        The folder, the model card and the result of the verification.

    Raises:
        SpecError: If the submodel is not possible for this model.
        DataError: If the data do not fit the model.
        ExportError: If the format does not support an operator of the model, or the precision is
            not possible.
        VerificationError: If graph and PyTorch differ by more than the tolerance.
        InputError: If `out` cannot be written.

    Examples:
        >>> import tempfile
        >>> import edgetailor as et
        >>> model = et.load_model("toolkit.models:digits_cnn")
        >>> deployed = et.deploy(model, "width:0.5", (1, 8, 8), f"{tempfile.mkdtemp()}/bundle")
        >>> sorted(path.name for path in deployed.out.iterdir())
        ['CARD.md', 'card.json', 'manifest.json', 'predict.onnx']
    """
    trained = TrainedModel(
        type(model).__name__,
        model,
        from_model(model),
        sample_shape,
        training or TrainingConfig(),
        preprocessing,
        data=data,
        calibration=calibration,
    )
    target = Target(
        Path(out),
        spec,
        predicting_submodel(spec),
        format=format,
        precision=precision,
        force=force,
    )
    return deploy_to(trained, target, progress)


def deploy_to(trained: TrainedModel, target: Target, report: Report) -> Deployed:
    """Write the inference bundle for `target`. Raises like `deploy`."""
    check_places(target.out, force=target.force)
    made = inference_bundle(trained, target, report)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in made.files.items():
            write_file(Path(folder, name), data)
        # Read the files back as a device does.
        bundle = open_bundle(Path(folder))
        card = model_card(trained, target, made, bundle, report)
    files = {**made.files, **card_files(trained, card)}
    write_bundle(target.out, files, target.force)
    return Deployed(target.out, card, made.verdict)
