"""Prints the result of `edgetailor inspect`: sizes of submodels, their layers, places to cut."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from device_agent.formats.manifest import Part
from exporters.recording.captured import Captured
from profiles.text_formatting import format_bytes, format_capacity, format_macs
from toolkit.inspection import CutPlace, Inspection, NotPossible
from toolkit.terminal_output import filled, print_table, table
from toolkit.trained_outputs import TrainedOutputs


def show_inspections(
    captured: Captured,
    inspections: Sequence[Inspection | NotPossible],
    batch: int,
    trained: TrainedOutputs,
) -> None:
    """Print the sizes of each submodel of the model `captured`, and the form of each layer."""
    console = Console(highlight=False)
    possible = [inspection for inspection in inspections if isinstance(inspection, Inspection)]
    sizes = table("submodel", "params", "activations", "MACs", "capacity", "weights")
    for inspection in possible:
        sizes.add_row(
            inspection.submodel,
            f"{inspection.params:,}",
            f"{inspection.activations:,}",
            format_macs(inspection.macs),
            format_capacity(inspection.capacity),
            format_bytes(inspection.bytes),
        )
    console.print(sizes)
    console.print(f"activations and MACs for a batch of {batch}")
    limit = "" if captured.sample_limit is None else f" below {captured.sample_limit:,}"
    console.print(
        f"a sample: {shape(captured.sample_shape)} {captured.sample_dtype}{limit}; "
        f"its output: {shape(captured.output_shape)}"
    )
    if captured.parts:
        inputs = ", ".join(map(_described, captured.parts))
        print(filled(f"its inputs: {inputs}", console.width))
    for output in () if trained.usual else trained.outputs:
        sizes_of = "" if output.shape is None else f" ({shape(output.shape)})"
        print(filled(f"{output.output}{sizes_of}: {output.use}", console.width))
    if trained.without_gradient:
        still = ", ".join(trained.without_gradient)
        print(filled(f"these get no gradient, so they do not train: {still}", console.width))
    for inspection in possible:
        if inspection.note:
            print(filled(f"note: {inspection.note}", console.width))
    for missing in inspections:
        if isinstance(missing, NotPossible):
            name = "" if missing.error.startswith(repr(missing.submodel)) else missing.submodel
            reason = f"not possible: {name and repr(name) + ': '}{missing.error}"
            print(filled(reason, console.width))
    for inspection in possible:
        if inspection.layers:
            console.print()
            layers = Table(
                "layer", "form", "why", box=None, pad_edge=False, title=inspection.submodel
            )
            layers.title_justify = "left"
            layers.columns[0].no_wrap = True  # names are copied into specs
            for layer in inspection.layers:
                layers.add_row(layer.layer, layer.form, layer.reason)
            width = max(console.width, max(len(layer.layer) for layer in inspection.layers) + WORDS)
            print_table(layers, width)


def shape(sizes: Sequence[int]) -> str:
    """A shape in the form of `--input-shape`, or "one number" for the empty shape."""
    return ",".join(map(str, sizes)) or "one number"


WORDS = 36
"""The minimum number of columns for the text beside the names of layers."""

FEW = 3
"""A model with fewer places to cut gets an explanation."""


def _described(part: Part) -> str:
    limit = "" if part.limit is None else f" below {part.limit:,}"
    sizes = f"{shape(part.shape)} " if part.shape else ""
    return f"{part.name} {sizes}{part.dtype}{limit}"


def show_cut_places(places: Sequence[CutPlace]) -> None:
    """Print the places to cut a model, with the sizes of the slice after each."""
    console = Console(highlight=False)
    console.print()
    if places:
        rows = table("cut ahead of", "params", "activations", "capacity", "recorded")
        for cut in places:
            rows.add_row(
                cut.module,
                f"{cut.params:,}",
                f"{cut.activations:,}",
                format_capacity(cut.capacity),
                f"{cut.recorded:,}",
            )
        whole = console.measure(rows, options=console.options.update(width=1000)).maximum
        print_table(rows, max(console.width, whole))
        console.print("recorded: numbers that the device stores on disk for each sample")
    if len(places) < FEW:
        number = ("no place", "one place", "two places")[len(places)]
        sentence = (
            f"This model can be cut at {number}: a cut needs parameters on both sides, and "
            "activations with an axis for the samples."
        )
        print(filled(sentence, console.width))
