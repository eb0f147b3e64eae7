"""Prints the result of `edgetailor export`: the signatures of a bundle, or a table of bundles."""

from collections.abc import Sequence

from rich.console import Console

from profiles.text_formatting import format_bytes, format_capacity, format_macs
from toolkit.exporting.model_export import Exported, SignatureCost
from toolkit.exporting.tiers import TierResult
from toolkit.terminal_output import filled, table

BUNDLE_TITLES = ("params", "peak memory", "size", "error")
WEIGHT_TITLES = ("params", "weights")
COLUMNS = 80
EARLIER = "from an earlier export of the same graphs; --verify compares them again"


def show_export(exported: Exported, batch: int) -> None:
    """Print the signatures of a bundle, its verification and its folder."""
    console = Console(highlight=False, soft_wrap=True)
    sizes = exported.inspection
    console.print(
        f"{sizes.submodel}: {sizes.params:,} trained parameters, "
        f"capacity {format_capacity(sizes.capacity)}, {format_bytes(sizes.bytes)} of weights"
    )
    if sizes.note:
        console.print(f"note: {sizes.note}", markup=False)
    if exported.bundle_sha256 is None:
        console.print(f"dry run: {exported.out} was not written", markup=False)
        return
    if exported.fit is not None:
        console.print(str(exported.fit), markup=False)
    graphs = table("signature", "operators", "MACs", "graph", "peak memory")
    for signature in exported.signatures:
        operators, macs = f"{signature.operators:,}", format_macs(signature.macs)
        graphs.add_row(
            signature.name,
            operators,
            macs,
            format_bytes(signature.graph_bytes),
            peak(signature.peak_bytes),
        )
    console.print(graphs)
    console.print(f"for a batch of {batch}; peak memory: predicted, above the idle agent")
    if exported.training is not None:
        most, running = exported.training
        console.print(f"training: peak memory {format_bytes(most)}, running {running}")
    explain_repeated(exported.signatures)
    explain_unknown(exported.signatures)
    if exported.reused:
        count, of = exported.reused, len(exported.signatures)
        which = "" if count == of else f"{count} of {of} "
        console.print(f"graphs: {which}reused from the cache")
    if exported.verdict is None:
        console.print("not verified (--no-verify)")
    else:
        console.print(exported.verdict.result, markup=False)
        console.print(filled(f"  {exported.verdict.worst}", COLUMNS, indent="  "), markup=False)
        if exported.verified_earlier:
            console.print(f"  {EARLIER}")
    console.print(f"bundle: {exported.out}", markup=False)


def show_tiers(tiers: Sequence[TierResult]) -> None:
    """Print a row for each bundle, then the errors of failed bundles."""
    exported = [result.exported for result in tiers if result.exported is not None]
    sized = any(bundle.bytes is not None for bundle in exported)
    figures, titles = (bundle_figures, BUNDLE_TITLES) if sized else (weight_figures, WEIGHT_TITLES)
    rows = table("bundle", "submodel", *titles)
    rows.columns[1].justify = "left"
    for result in tiers:
        rows.add_row(result.tier.name, result.tier.submodel, *figures(result))
    console = Console(highlight=False)
    console.print(rows)
    if any(bundle.bundle_sha256 is None for bundle in exported):
        console.print("dry run: nothing was written")
    if any(bundle.signatures for bundle in exported):
        console.print("peak memory: predicted, of the whole training, above the idle agent")
    explain_unknown([signature for bundle in exported for signature in bundle.signatures])
    if any(bundle.verdict for bundle in exported):
        console.print("error: relative, against PyTorch in float64; the one nearest to its limit")
    reused = [t.tier.name for t in tiers if t.exported is not None and t.exported.verified_earlier]
    if reused:
        print(filled(f"error of {', '.join(reused)}: {EARLIER}", console.width, indent="  "))
    for result in tiers:
        if result.error is not None:
            reason = f"{result.tier.name}: {result.error}"
            print(filled(reason, console.width, indent="  "))


def bundle_figures(result: TierResult) -> tuple[str, str, str, str]:
    """The table cells for the columns BUNDLE_TITLES; only "failed" if the export failed."""
    exported = result.exported
    if exported is None:
        return "", "", "", "failed"
    error = "not verified" if exported.verdict is None else f"{exported.verdict.error:.1e}"
    peak_bytes = exported.training and exported.training[0]
    return f"{exported.inspection.params:,}", peak(peak_bytes), format_bytes(exported.bytes), error


def weight_figures(result: TierResult) -> tuple[str, str]:
    """The table cells for the columns WEIGHT_TITLES of a dry run; "failed" if it failed."""
    if result.exported is None:
        return "", "failed"
    return f"{result.exported.inspection.params:,}", format_bytes(result.exported.inspection.bytes)


def peak(predicted: int | None) -> str:
    """A memory peak with its unit, or "unknown"."""
    return "unknown" if predicted is None else format_bytes(predicted)


def explain_repeated(signatures: Sequence[SignatureCost]) -> None:
    """Say which signatures compute activations again, and how to turn this off."""
    for signature in signatures:
        if signature.computed_again:
            share = (
                f"{signature.computed_again:.0%}"
                if signature.computed_again >= 0.01
                else "less than 1%"
            )
            again = f"{signature.name} computes {share} of its work again to save memory"
            print(f"{again}; recompute=no turns this off")


def explain_unknown(signatures: Sequence[SignatureCost]) -> None:
    """If memory peaks are unknown, say how to measure them."""
    if any(signature.peak_bytes is None for signature in signatures):
        print("unknown: `edgetailor-agent profile` measures it on the device")
