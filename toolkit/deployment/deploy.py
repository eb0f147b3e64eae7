"""Writes an inference bundle with its model card: the public `edgetailor.deploy`."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from device_agent import __version__
from device_agent.formats.atomic_files import write_file
from device_agent.formats.bundle import Bundle, open_bundle
from device_agent.formats.label_rule import class_axis
from device_agent.formats.manifest import PREDICT, encode
from device_agent.formats.preprocessing import Preprocessing
from exporters.export import Format, check_places, write_bundle
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.graph_workload import graph_work
from exporters.verification.verdict import Verdict
from profiles.cost_model.memory_rule import UNCALIBRATED
from profiles.cost_model.prediction import TimeModel
from profiles.progress import Report, silent
from profiles.text_formatting import counted, format_bytes
from toolkit.deployment.card_text import card_markdown
from toolkit.deployment.inference_bundle import InferenceBundle, inference_bundle, predictor
from toolkit.deployment.model_card import (
    CARD,
    CARD_SIGNATURE,
    CARD_TEXT,
    Cost,
    GraphInput,
    GraphOutput,
    ModelCard,
    Quality,
    Signer,
)
from toolkit.deployment.predicting_submodel import predicting_submodel
from toolkit.deployment.targets import Target
from toolkit.deployment.trained_model import TrainedModel
from toolkit.model_evaluation import Evaluation, evaluate_outputs
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
    data: str | Path | tuple[np.ndarray, np.ndarray] | None = None,
    preprocessing: Preprocessing | None = None,
    format: Format = "onnx",
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
        force: Replace an earlier bundle at `out`.
        progress: Called with the name of each stage when it begins.

    Returns:
        The folder, the model card and the result of the verification.

    Raises:
        SpecError: If the submodel is not possible for this model.
        DataError: If the data do not fit the model.
        ExportError: If the format does not support an operator of the model.
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
    )
    target = Target(Path(out), spec, predicting_submodel(spec), format=format, force=force)
    return deploy_to(trained, target, progress)


def deploy_to(trained: TrainedModel, target: Target, report: Report) -> Deployed:
    """Write the inference bundle for `target`. Raises like `deploy`."""
    check_places(target.out, force=target.force)
    made = inference_bundle(trained, target.submodel.spec, target.format, target.out, report)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in made.files.items():
            write_file(Path(folder, name), data)
        # Read the files back as a device does.
        bundle = open_bundle(Path(folder))
        card = model_card(trained, target, made, bundle, report)
    files = {**made.files, **card_files(trained, card)}
    write_bundle(target.out, files, target.force)
    return Deployed(target.out, card, made.verdict)


def model_card(
    trained: TrainedModel, target: Target, made: InferenceBundle, bundle: Bundle, report: Report
) -> ModelCard:
    """The card of `bundle`, which is opened and run for it."""
    manifest, (signature,) = bundle.manifest, bundle.manifest.signatures.values()
    (x,), (output,) = signature.inputs, signature.outputs
    measured = None
    if trained.held_out is not None:
        samples, labels = trained.held_out
        report(f"evaluating {signature.graph} on {counted(len(samples), 'sample')}")
        measured = evaluate_outputs(
            predictor(bundle), samples, labels, "The held-out data", trained.training.loss
        )
    probabilities = made.program.output
    assert probabilities is not None
    return ModelCard(
        model=trained.name,
        submodel=manifest.submodel,
        kind=target.kind,
        trained=target.trained,
        reason=target.submodel.reason,
        notes=notes(target, signature.peak_bytes),
        round=trained.round,
        format=target.format,
        precision=target.precision,
        graph=signature.graph,
        input=GraphInput(name=x.name, dtype=x.dtype, shape=x.shape, limit=manifest.sample_limit),
        output=GraphOutput(
            name=output.name,
            shape=output.shape,
            probabilities=probabilities,
            class_axis=None if probabilities == "numbers" else class_axis(len(output.shape)),
        ),
        preprocessing=manifest.preprocessing,
        classes=manifest.classes,
        class_names=() if manifest.preprocessing is None else manifest.preprocessing.classes,
        quality=quality(measured),
        global_quality=quality(trained.evaluation),
        graph_bytes=manifest.files[signature.graph].size,
        cost=cost(made, target, signature.peak_bytes),
        bundle_sha256=bundle.sha256,
        edgetailor=__version__,
        signer=None
        if trained.key is None
        else Signer(key=trained.key.public, fingerprint=trained.key.fingerprint),
    )


def quality(evaluation: Evaluation | None) -> Quality | None:
    """An evaluation as a part of the card."""
    return (
        None
        if evaluation is None
        else Quality(
            samples=evaluation.samples,
            labels=evaluation.counted,
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
        )
    )


def cost(made: InferenceBundle, target: Target, memory: int | None) -> Cost:
    """Memory of a prediction and, with a calibrated profile, its time."""
    profile, seconds = target.profile, None
    calibration = None if profile is None else profile.calibration
    if calibration is not None and made.graph.runtime == "onnx" and memory is not None:
        work = graph_work(SizedGraph(made.graph.data, 1), PREDICT)
        seconds = TimeModel(calibration).batch([work]).value
    return Cost(
        memory_bytes=memory, profile=None if profile is None else profile.name, seconds=seconds
    )


def notes(target: Target, memory: int | None) -> tuple[str, ...]:
    """What the operator should know before using the bundle."""
    if target.memory is None or memory is None:
        return ()
    needed = UNCALIBRATED.idle_bytes + memory
    if needed <= target.memory:
        return ()
    return (
        f"A prediction needs {format_bytes(needed)} of memory, and the devices have a budget of "
        f"{format_bytes(target.memory)}. Deploy a reduced submodel for them, or let them predict "
        "with the bundle that they train.",
    )


def card_files(trained: TrainedModel, card: ModelCard) -> Mapping[str, bytes]:
    """The files of the card, and its signature if the model comes from a federation."""
    content = encode(card)
    files = {CARD: content, CARD_TEXT: card_markdown(card).encode()}
    if trained.key is not None:
        files[CARD_SIGNATURE] = f"{trained.key.card_signature(content)}\n".encode()
    return files
