"""Writes an inference bundle with its model card: the public `edgetailor.deploy`."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from device_agent.formats.atomic_files import write_file
from device_agent.formats.bundle import open_bundle
from device_agent.formats.preprocessing import Preprocessing
from exporters.export import Format, check_places, write_bundle
from exporters.quantization.precision import Precision
from exporters.verification.verdict import Verdict
from profiles.progress import Report, silent
from profiles.text_formatting import counted
from toolkit.deployment.card_fields import ModelCard
from toolkit.deployment.inference_bundle import InferenceBundle, inference_bundle
from toolkit.deployment.make_card import card_files, model_card
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target
from toolkit.deployment.trained_model import Samples, TrainedModel
from toolkit.submodels.global_model import from_model
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.spec import parse_spec


@dataclass(frozen=True)
class Deployed:
    """An inference bundle that was written to `out`: the result of `deploy`.

    Attributes:
        out: The bundle's folder.
        card: Its model card.
        verdict: The result of comparing the float32 graph with PyTorch.
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
    """Write a trained model as an inference bundle: a graph with the weights inside, and a card.

    Use it after the last round, to predict with the trained model. A device opens the bundle with
    `Predictor`; any program can run the bundle's graph with ONNX Runtime or LiteRT.

    Args:
        model: The model with its trained weights.
        spec: The submodel that the devices train. If this submodel cannot predict alone (a slice)
            or is personal (`cp`, `pfedme`), the bundle has the whole model.
        sample_shape: Shape of one sample, without the batch.
        out: The folder to write. It must not exist, unless `force` is set.
        training: How the model was trained. Its loss gives the meaning of the output.
        data: Held-out samples (n, *sample_shape) and labels, for the accuracy in the card: a pair
            of arrays, or the path of a file or folder.
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
        InputError: If `out` exists or cannot be written, or int8 has no samples to calibrate.

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


def fitting_bundle(
    trained: TrainedModel, target: Target, report: Report
) -> tuple[Target, InferenceBundle]:
    """Make the bundle for `target`. Returns the target with the bundle's submodel, and the bundle.

    If the devices train a slice, they may have too little memory for the whole graph. Then the
    bundle has the stages of the slice instead, if these need less memory.
    """
    whole = inference_bundle(trained, target, report)
    chosen = target.submodel
    if chosen.staged is None or target.memory is None:
        return target, whole
    if target.fits(whole.memory):
        reason = f"{chosen.reason}; it fits the memory of the devices in one graph"
        return replace(target, submodel=replace(chosen, reason=reason)), whole
    report("the whole graph does not fit the memory of the devices: trying stages")
    staged = replace(target, submodel=replace(chosen, spec=chosen.staged))
    parts = inference_bundle(trained, staged, report)
    if parts.memory is None or whole.memory is None or parts.memory >= whole.memory:
        return target, whole
    inner = parse_spec(chosen.staged).inner
    reduced = (
        f"; after the cut it is reduced to the devices' {inner.family} submodel" if inner else ""
    )
    reason = (
        f"{chosen.reason}{reduced}; it runs in {counted(len(parts.graphs), 'stage')}, one after "
        "another, because the memory of the devices is too small for one graph"
    )
    return replace(staged, submodel=replace(staged.submodel, reason=reason)), parts


def deploy_to(trained: TrainedModel, target: Target, report: Report) -> Deployed:
    """Write the inference bundle for `target`. Raises the same errors as `deploy`."""
    check_places(target.out, force=target.force)
    target, made = fitting_bundle(trained, target, report)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in made.files.items():
            write_file(Path(folder, name), data)
        # Read the files back as a device does.
        bundle = open_bundle(Path(folder))
        card = model_card(trained, target, made, bundle, report)
    files = {**made.files, **card_files(trained, card)}
    write_bundle(target.out, files, target.force)
    return Deployed(target.out, card, made.verdict)
