"""Writes a model card as Markdown, for people."""

from collections.abc import Iterator, Sequence

from device_agent.formats.manifest import CARD, CARD_SIGNATURE, MANIFEST, Part
from device_agent.formats.packing import columns
from device_agent.formats.preprocessing import Images
from device_agent.formats.protocol.fleet import further_text
from profiles.text_formatting import counted, format_bytes, format_seconds
from toolkit.deployment.card_fields import DeviceQuality, KindQuality, ModelCard, Quality

PROBABILITIES = {
    "softmax": "logits; softmax gives the probabilities of the classes",
    "sigmoid": "one logit; sigmoid gives the probability of class 1",
    "numbers": "the predicted numbers",
    "independent": "a logit for each yes-or-no answer; sigmoid gives the probability of yes",
    "outputs": "numbers as the model computes them; only its loss says what they mean",
    "ctc": "logits for each step; softmax gives the probabilities of the symbols, 0 is the blank",
}


def card_markdown(card: ModelCard) -> str:
    """The content of CARD.md."""
    return "\n".join(_lines(card)) + "\n"


def _lines(card: ModelCard) -> Iterator[str]:
    yield f"# {card.model}"
    yield ""
    after = "" if card.round is None else f", after round {card.round}"
    yield f"The submodel `{card.submodel}`{after}: {card.reason}."
    for note in card.notes:
        yield ""
        yield f"**Note:** {note}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for title, text in _rows(card):
        yield f"| {title} | {text} |"
    yield ""
    yield f"`{CARD}` has the same for programs."


def _rows(card: ModelCard) -> Iterator[tuple[str, str]]:
    if card.kind is not None:
        yield "devices", f"kind `{card.kind}`, which trains `{card.trained}`"
    files = ", then ".join(f"`{graph.file}`" for graph in card.graphs)
    yield (
        "graph" if len(card.graphs) == 1 else "graphs, each reads the output of the previous one",
        f"{files}, {card.format}, {card.precision}, {format_bytes(card.graph_bytes)}",
    )
    shape = _shape(card.input.shape)
    limit = "" if card.input.limit is None else f", from 0 to {card.input.limit - 1}"
    yield "input", f"`{card.graphs[0].input}`: {card.input.dtype} {shape}{limit}"
    meaning = PROBABILITIES[card.output.probabilities]
    yield "output", f"`{card.graphs[-1].output}`: float32 {_shape(card.output.shape)}; {meaning}"
    yield from _parts("input", card.input.parts)
    yield from _parts("output", card.output.parts)
    if card.calibrated_on is not None:
        yield "calibrated", f"on {counted(card.calibrated_on, 'sample')}"
    if card.preprocessing is not None:
        what = "pictures" if isinstance(card.preprocessing, Images) else "CSV files"
        yield "preprocessing", f"of {what}: see `preprocessing` in `{CARD}`"
    if card.class_names:
        yield (
            "classes",
            ", ".join(f"{number} {name}" for number, name in enumerate(card.class_names)),
        )
    elif card.output.class_axis is not None:
        yield "classes", str(max(card.classes, 2))
    if card.quality is not None:
        yield "this file", _quality(card.quality)
    elif card.device_quality is not None and card.precision != "float32":
        yield "this file", "not measured without held-out samples; devices judged the float32 model"
    if card.global_quality is not None:
        yield "the whole model in PyTorch, float32", _quality(card.global_quality)
    if card.device_quality is not None:
        yield "on the devices, as they received the model", device_text(card.device_quality)
        if card.device_quality.kind is not None:
            yield f"on the devices of kind `{card.kind}`", _judged(card.device_quality.kind)
    if card.cost.memory_bytes is not None:
        at_a_time = "" if len(card.graphs) == 1 else " with one graph in memory at a time,"
        memory = format_bytes(card.cost.memory_bytes)
        yield "memory", f"{memory} more than the idle agent takes,{at_a_time} predicted"
    if card.cost.seconds is not None:
        yield (
            "time",
            f"{format_seconds(card.cost.seconds)} a sample on {card.cost.profile}, predicted",
        )
    if card.speed is not None:
        ratio = card.speed.seconds / card.speed.float32_seconds
        yield "time relative to float32", f"{ratio:.2f}, measured on {card.speed.processor}"
    yield f"SHA-256 of `{MANIFEST}`", f"`{card.bundle_sha256}`"
    if card.signer is not None:
        yield (
            "signed",
            f"by the coordinator with the key `{card.signer.fingerprint}`, in `{CARD_SIGNATURE}`",
        )
    yield "written by", f"EdgeTailor {card.edgetailor}"


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('n' if size is None else str(size) for size in shape)})"


def _parts(what: str, parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """A row for each array that lies in an input or output: its columns, shape and meaning."""
    for part in parts:
        own = columns(parts)[part.name]
        place = f"columns {own.start} to {own.stop - 1}, {_shape((None, *part.shape))} {part.dtype}"
        meaning = "" if part.output is None else f"; {PROBABILITIES[part.output]}"
        yield f"{what} `{part.name}`", f"{place}{meaning}"


def device_text(quality: DeviceQuality) -> str:
    """One line that says how the devices judge the model."""
    worst = quality.worst_accuracy
    tenth = "" if worst is None else f"; accuracy {worst:.2%} on the worst tenth of them"
    return f"{_judged(quality)}{tenth}"


def _judged(quality: DeviceQuality | KindQuality) -> str:
    samples, devices = counted(quality.samples, "sample"), counted(quality.devices, "device")
    return f"{_figures(quality)} on {samples} of {devices}"


def _quality(quality: Quality) -> str:
    return f"{_figures(quality)} on {counted(quality.samples, 'held-out sample')}"


def _figures(quality: Quality | DeviceQuality | KindQuality) -> str:
    accuracy = "" if quality.accuracy is None else f"accuracy {quality.accuracy:.2%}, "
    return f"{accuracy}loss {quality.loss:.4f}{further_text(quality)}"
