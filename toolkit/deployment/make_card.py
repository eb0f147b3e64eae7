"""Makes the content of a model card. For its measurements, the bundle is opened and run."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from device_agent import __version__
from device_agent.formats.bundle import Bundle
from device_agent.formats.label_rule import class_axis
from device_agent.formats.manifest import CARD, CARD_SIGNATURE, CARD_TEXT, PREDICT, encode
from device_agent.formats.protocol.fleet import FederatedEvaluation, Measured
from device_agent.inference.predictor import stages
from device_agent.runtime.runtime_choice import runtime_of
from exporters.memory.onnx_footprint import SizedGraph
from exporters.onnx.graph_workload import graph_work
from profiles.cost_model.prediction import TimeModel
from profiles.documents.bundle_profile import this_machine
from profiles.progress import Report
from profiles.text_formatting import counted, format_bytes
from toolkit.deployment.card_fields import (
    Cost,
    DeviceQuality,
    GraphFile,
    GraphInput,
    GraphOutput,
    KindQuality,
    ModelCard,
    Quality,
    Signer,
    Speed,
)
from toolkit.deployment.card_markdown import card_markdown
from toolkit.deployment.inference_bundle import InferenceBundle, predictor, runner
from toolkit.deployment.speed import medians
from toolkit.deployment.targets import Target, needed_bytes
from toolkit.deployment.trained_model import TrainedModel
from toolkit.evaluation_sums import Evaluation
from toolkit.model_evaluation import evaluate_outputs

SLOWER = 1.1
"""Times differ by less than this factor between two measurements of the same graph."""


def model_card(
    trained: TrainedModel, target: Target, made: InferenceBundle, bundle: Bundle, report: Report
) -> ModelCard:
    """Make the card of `bundle`. The bundle is opened and run."""
    manifest = bundle.manifest
    graphs = {name: manifest.signatures[name] for name in stages(manifest)}
    (x,), (output,) = next(iter(graphs.values())).inputs, graphs[PREDICT].outputs
    measured = None
    if trained.held_out is not None:
        samples, labels = trained.held_out
        report(f"evaluating {graphs[PREDICT].graph} on {counted(len(samples), 'sample')}")
        measured = evaluate_outputs(
            predictor(bundle),
            samples,
            labels,
            "The held-out data",
            trained.training.loss,
            trained.outputs,
        )
    speed = None
    if target.precision != "float32":
        report(f"measuring the time of {target.precision} and float32")
        speed = measured_speed(made, bundle)
    probabilities = made.program.output
    assert probabilities is not None
    return ModelCard(
        model=trained.name,
        submodel=manifest.submodel,
        kind=target.kind,
        trained=target.trained,
        reason=target.submodel.reason,
        notes=(
            *memory_notes(target, made.memory),
            *speed_notes(target, speed),
            *privacy_notes(trained),
        ),
        round=trained.round,
        format=target.format,
        precision=target.precision,
        calibrated_on=made.calibrated_on,
        graphs=tuple(
            GraphFile(
                file=s.graph, signature=name, input=s.inputs[0].name, output=s.outputs[0].name
            )
            for name, s in graphs.items()
        ),
        input=GraphInput(dtype=x.dtype, shape=x.shape, limit=manifest.sample_limit, parts=x.packed),
        output=GraphOutput(
            shape=output.shape,
            probabilities=probabilities,
            class_axis=class_axis(len(output.shape))
            if probabilities in ("softmax", "sigmoid", "ctc")
            else None,
            parts=output.packed,
        ),
        preprocessing=manifest.preprocessing,
        classes=manifest.classes,
        class_names=() if manifest.preprocessing is None else manifest.preprocessing.classes,
        quality=quality(measured),
        global_quality=quality(trained.evaluation),
        device_quality=device_quality(trained.devices, target.kind),
        graph_bytes=sum(manifest.files[signature.graph].size for signature in graphs.values()),
        cost=cost(made, target),
        speed=speed,
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
            **further(evaluation),
        )
    )


def device_quality(judged: FederatedEvaluation | None, kind: str | None) -> DeviceQuality | None:
    """The judgement of all devices, and of the devices of `kind`, as a part of the card."""
    if judged is None:
        return None
    own = judged.kinds.get(kind or "")
    return DeviceQuality(
        devices=judged.devices,
        samples=judged.samples,
        accuracy=judged.accuracy,
        loss=judged.loss,
        worst_accuracy=judged.worst_accuracy,
        **further(judged),
        kind=None
        if own is None
        else KindQuality(
            devices=own.devices,
            samples=own.samples,
            accuracy=own.accuracy,
            loss=own.loss,
            **further(own),
        ),
    )


def further(figures: Measured) -> dict[str, Any]:
    """The fields of `Further` on the card, from the figures of an evaluation."""
    return {"rmse": figures.rmse, "mae": figures.mae, "metrics": figures.metrics or None}


def cost(made: InferenceBundle, target: Target) -> Cost:
    """Memory of a prediction and, with a calibrated profile, its time."""
    profile, seconds = target.profile, None
    calibration = None if profile is None else profile.calibration
    (graph, *more), memory = made.float32.values(), made.memory
    # No calibration measures how long a device takes to open graphs.
    predictable = graph.runtime == "onnx" and target.precision != "int8" and not more
    if calibration is not None and predictable and memory is not None:
        work = graph_work(SizedGraph(graph.data, 1), PREDICT)
        seconds = TimeModel(calibration).batch([work]).value
    return Cost(
        memory_bytes=memory, profile=None if profile is None else profile.name, seconds=seconds
    )


def measured_speed(made: InferenceBundle, bundle: Bundle) -> Speed:
    """Measure a prediction of one sample on one thread, with these files and with float32."""
    manifest = bundle.manifest
    x = np.zeros((1, *manifest.sample_shape), manifest.sample_dtype)
    with TemporaryDirectory() as folder:
        for graph in made.float32.values():
            Path(folder, graph.file).write_bytes(graph.data)
        seconds, float32_seconds = medians(
            runner(manifest, bundle.folder, 1), runner(manifest, Path(folder), 1), x
        )
    machine = this_machine(runtime_of(manifest.runtime).description())
    processor = machine.processor or machine.model or machine.architecture
    return Speed(processor=processor, seconds=seconds, float32_seconds=float32_seconds)


def privacy_notes(trained: TrainedModel) -> tuple[str, ...]:
    """The spent privacy budget; empty without differential privacy."""
    if trained.privacy is None:
        return ()
    return (f"Trained with differential privacy for each device: {trained.privacy.text()}.",)


def speed_notes(target: Target, speed: Speed | None) -> tuple[str, ...]:
    """A note if the precision makes predictions slower than float32."""
    if speed is None or speed.seconds <= SLOWER * speed.float32_seconds:
        return ()
    return (
        f"On this machine ({speed.processor}), a prediction takes "
        f"{speed.seconds / speed.float32_seconds:.1f} times as long as with float32. If size "
        "matters less than time, deploy float32.",
    )


def memory_notes(target: Target, memory: int | None) -> tuple[str, ...]:
    """A note if a prediction needs more memory than the devices' budget."""
    if target.memory is None or memory is None or target.fits(memory):
        return ()
    return (
        f"A prediction needs {format_bytes(needed_bytes(memory))} of memory, and the devices have "
        f"a budget of {format_bytes(target.memory)}. Deploy a reduced submodel for them, or let "
        "them predict with the bundle that they train.",
    )


def card_files(trained: TrainedModel, card: ModelCard) -> Mapping[str, bytes]:
    """The files of the card, and its signature if the model comes from a federation."""
    content = encode(card)
    files = {CARD: content, CARD_TEXT: card_markdown(card).encode()}
    if trained.key is not None:
        files[CARD_SIGNATURE] = f"{trained.key.card_signature(content)}\n".encode()
    return files
