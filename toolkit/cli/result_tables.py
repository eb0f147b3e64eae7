"""Print the results of commands as tables on stdout."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from profiles.text_formatting import counted, format_bytes
from toolkit.aggregation.aggregate_files import Aggregated
from toolkit.exporting.model_export import Exported, SignatureCost
from toolkit.exporting.tiers import TierResult
from toolkit.inspection import CutPlace, Inspection, NotPossible
from toolkit.model_evaluation import Evaluation
from toolkit.terminal_output import filled, table


def products(macs: int) -> str:
    """Multiply-accumulates with a unit."""
    return f"{macs / 1e6:,.1f} M" if macs >= 1e6 else f"{macs / 1e3:.1f} k"


def capacity(value: float) -> str:
    """A capacity with two decimals, or with two significant digits if it would read 0.00."""
    return f"{value:.2f}" if value >= 0.005 else f"{value:.{1 - math.floor(math.log10(value))}f}"


def show_inspections(inspections: Sequence[Inspection | NotPossible], batch: int) -> None:
    """Print the sizes of each submodel, and what it does to each layer."""
    console = Console(highlight=False)
    possible = [found for found in inspections if isinstance(found, Inspection)]
    sizes = table("submodel", "params", "activations", "MACs", "capacity", "weights")
    for found in possible:
        sizes.add_row(
            found.submodel,
            f"{found.params:,}",
            f"{found.activations:,}",
            products(found.macs),
            capacity(found.capacity),
            format_bytes(found.bytes),
        )
    console.print(sizes)
    console.print(f"activations and MACs for a batch of {batch}")
    for found in possible:
        if found.note:
            print(filled(f"note: {found.note}", console.width))
    for missing in inspections:
        if isinstance(missing, NotPossible):
            name = "" if missing.error.startswith(repr(missing.submodel)) else missing.submodel
            reason = f"not possible: {name and repr(name) + ': '}{missing.error}"
            print(filled(reason, console.width))
    for found in possible:
        if found.layers:
            console.print()
            layers = Table("layer", "form", "why", box=None, pad_edge=False, title=found.submodel)
            layers.title_justify = "left"
            for layer in found.layers:
                layers.add_row(layer.layer, layer.form, layer.reason)
            with console.capture() as drawn:
                console.print(layers)
            # rich pads every column to its width, so lines would end in spaces.
            print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


FEW = 3
"""A model with fewer places to cut gets an explanation."""


def show_cut_places(places: Sequence[CutPlace]) -> None:
    """Print the places to cut a model, with the sizes of the slice after each."""
    console = Console(highlight=False)
    console.print()
    if places:
        rows = table("cut ahead of", "params", "activations", "capacity", "recorded")
        for place in places:
            rows.add_row(
                place.module,
                f"{place.params:,}",
                f"{place.activations:,}",
                capacity(place.capacity),
                f"{place.recorded:,}",
            )
        console.print(rows)
        console.print("recorded: numbers that the device stores on disk for each sample")
    if len(places) < FEW:
        number = ("no place", "one place", "two places")[len(places)]
        sentence = (
            f"This model can be cut at {number}: a cut needs parameters on both sides, and exactly "
            "one activation that crosses it."
        )
        print(filled(sentence, console.width))


def show_export(exported: Exported, batch: int) -> None:
    """Print the signatures of a bundle, its verification and its folder."""
    console = Console(highlight=False, soft_wrap=True)
    found = exported.inspection
    console.print(
        f"{found.submodel}: {found.params:,} trained parameters, "
        f"capacity {capacity(found.capacity)}, {format_bytes(found.bytes)} of weights"
    )
    if found.note:
        console.print(f"note: {found.note}", markup=False)
    if exported.bundle_sha256 is None:
        console.print(f"dry run: {exported.out} was not written", markup=False)
        return
    if exported.fit is not None:
        console.print(str(exported.fit), markup=False)
    graphs = table("signature", "operators", "MACs", "graph", "peak memory")
    for one in exported.signatures:
        operators, macs = f"{one.operators:,}", products(one.macs)
        graphs.add_row(
            one.name, operators, macs, format_bytes(one.graph_bytes), peak(one.peak_bytes)
        )
    console.print(graphs)
    console.print(f"for a batch of {batch}; peak memory: predicted, above the idle agent")
    if exported.training is not None:
        most, running = exported.training
        console.print(f"training: peak memory {format_bytes(most)}, running {running}")
    explain_unknown(exported.signatures)
    if exported.reused:
        count, of = exported.reused, len(exported.signatures)
        which = "" if count == of else f"{count} of {of} "
        earlier = ", verified earlier" if exported.verified_earlier else ""
        console.print(f"graphs: {which}reused from the cache{earlier}")
    if exported.verdict is None:
        console.print("not verified (--no-verify)")
    else:
        console.print(exported.verdict.result, markup=False)
        console.print(f"  {exported.verdict.worst}", markup=False)
    console.print(f"bundle: {exported.out}", markup=False)


def show_tiers(tiers: Sequence[TierResult]) -> None:
    """Print a row for each bundle, then the errors of those that failed."""
    rows = table("bundle", "submodel", "params", "peak memory", "size", "error")
    rows.columns[1].justify = "left"
    for one in tiers:
        rows.add_row(one.tier.name, one.tier.submodel, *figures(one))
    console = Console(highlight=False)
    console.print(rows)
    exported = [one.exported for one in tiers if one.exported is not None]
    if any(found.signatures for found in exported):
        console.print("peak memory: predicted, of the whole training, above the idle agent")
    explain_unknown([one for found in exported for one in found.signatures])
    if any(found.verdict for found in exported):
        console.print(
            "error: of the worst tensor, relative to its norm, against PyTorch in float64"
        )
    for one in tiers:
        if one.error is not None:
            reason = f"{one.tier.name}: {one.error}"
            print(filled(reason, console.width, indent="  "))


def figures(one: TierResult) -> tuple[str, str, str, str]:
    """Parameters, peak memory, size and error of a bundle; empty if not known."""
    if one.exported is None:
        return "", "", "", "failed"
    found = one.exported
    params = f"{found.inspection.params:,}"
    if found.bytes is None:
        return params, "", format_bytes(found.inspection.bytes), "dry run"
    error = "not verified" if found.verdict is None else f"{found.verdict.error:.1e}"
    peak_bytes = found.training and found.training[0]
    return params, peak(peak_bytes), format_bytes(found.bytes), error


def peak(predicted: int | None) -> str:
    """A peak of memory with its unit."""
    return "unknown" if predicted is None else format_bytes(predicted)


def explain_unknown(signatures: Sequence[SignatureCost]) -> None:
    """Say how to measure peaks of memory that are unknown, if there are any."""
    if any(one.peak_bytes is None for one in signatures):
        print("unknown: `edgetailor-agent profile` measures it on the device")


def show_evaluation(found: Evaluation) -> None:
    """Print the accuracy and the loss of a model."""
    samples = counted(found.samples, "sample")
    accuracy = "" if found.accuracy is None else f"accuracy {found.accuracy:.1%}, "
    print(f"{accuracy}loss {found.loss:.4f} on {samples}")


def show_aggregated(aggregated: Aggregated) -> None:
    """Print the updates that a new global model was made of."""
    console = Console(highlight=False, soft_wrap=True)
    rows = table("submodel", "samples", "steps", "loss")
    for record in aggregated.records:
        rows.add_row(
            record.submodel,
            f"{record.samples:,}",
            f"{record.steps:,}",
            record.losses(3),
        )
    console.print(rows)
    console.print(f"global model: {aggregated.out}", markup=False)
