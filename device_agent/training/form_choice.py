"""The form of a bundle's graphs that this device runs: plain, blocked or Winograd's."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from device_agent.formats.bundle import Bundle
from device_agent.formats.graph_forms import WINOGRAD, form_file, form_of
from device_agent.formats.manifest import MANIFEST, Signature
from device_agent.formats.protocol.transfers import FileOffer
from device_agent.runtime.blocked_probe import best_form, block_size
from device_agent.runtime.graph_form import device_form
from device_agent.training.checkpoint import form_begun


def files_for_device(offers: Iterable[FileOffer], folder: Path) -> list[FileOffer]:
    """Leave out the forms of graphs that this device does not run.

    Args:
        offers: The files of a bundle.
        folder: The training folder. It may have a checkpoint of a training of this bundle.
    """
    offers = list(offers)
    begun = [form_begun(folder, offer.sha256) for offer in offers if offer.name == MANIFEST]
    form = next(filter(None, begun), None) or device_form()
    return [offer for offer in offers if form_of(offer.name) in (None, form)]


def in_device_form(bundle: Bundle, begun: str | None = None) -> Bundle:
    """Return `bundle` with its graphs in the form that this device runs fastest.

    Graphs in ONNX format run in blocked form if the runtime has blocked convolutions. Otherwise
    they run in Winograd's form if this form is faster. Winograd's form may need more memory than
    the plain graphs.

    Args:
        bundle: A bundle with its plain graphs.
        begun: The form with which a killed training must continue; None if the training is new.
    """
    if bundle.manifest.runtime != "onnx":
        return bundle
    # Run the probe now: later, under a memory limit, it may fail and report no blocks.
    if block_size() is not None:
        return in_blocked_form(bundle)
    return in_winograd_form(bundle, begun)


def in_blocked_form(bundle: Bundle) -> Bundle:
    """Return `bundle` with the blocked form of each graph. Graphs without this form stay plain.

    The predicted memory stays the same, because the manifest has the larger prediction of the plain
    and the blocked form.
    """
    forms = {
        name: msgspec.structs.replace(signature, graph=file)
        for name, signature in bundle.manifest.signatures.items()
        if (file := best_form(bundle.graph(name)).name) in bundle.manifest.files
        and file != signature.graph
    }
    return _with_signatures(bundle, forms)


def in_winograd_form(bundle: Bundle, begun: str | None = None) -> Bundle:
    """Return `bundle` with Winograd's forms of graphs if these are faster or named by `begun`."""
    forms = {
        name: msgspec.structs.replace(
            signature, graph=file, peak_bytes=signature.winograd_peak_bytes
        )
        for name, signature in bundle.manifest.signatures.items()
        if (file := form_file(signature.graph, WINOGRAD)) in bundle.manifest.files
        and (bundle.folder / file).exists()
        # If only the plain graph has a predicted peak, its form cannot be checked against limits.
        and (signature.winograd_peak_bytes is not None or signature.peak_bytes is None)
    }
    if not forms or (begun or device_form()) != WINOGRAD:
        return bundle
    return _with_signatures(bundle, forms)


def _with_signatures(bundle: Bundle, signatures: dict[str, Signature]) -> Bundle:
    """Return `bundle` with the entries of `signatures` replaced, or `bundle` if there are none."""
    if not signatures:
        return bundle
    known = bundle.manifest.signatures
    manifest = msgspec.structs.replace(bundle.manifest, signatures=known | signatures)
    return replace(bundle, manifest=manifest)
