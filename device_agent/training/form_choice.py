"""The form of a bundle's graphs that this device runs: plain, blocked or Winograd's."""

from dataclasses import replace

import msgspec

from device_agent.formats.bundle import Bundle
from device_agent.formats.graph_forms import WINOGRAD, form_file
from device_agent.formats.manifest import Signature
from device_agent.runtime.blocked_probe import best_form, block_size
from device_agent.runtime.graph_form import device_form


def in_device_form(bundle: Bundle) -> Bundle:
    """Return `bundle` with its graphs in the form that this device runs fastest.

    Graphs in ONNX format run in blocked form if the runtime has blocked convolutions. Otherwise
    they run in Winograd's form if this form is faster. Winograd's form may need more memory than
    the plain graphs.
    """
    if bundle.manifest.runtime != "onnx":
        return bundle
    # Run the probe now: later, under a memory limit, it may fail and report no blocks.
    return in_blocked_form(bundle) if block_size() is not None else in_winograd_form(bundle)


def in_blocked_form(bundle: Bundle) -> Bundle:
    """Return `bundle` with the blocked form of each graph; graphs without such a form stay plain.

    The predicted memory stays the same, because the manifest has the larger of the predictions
    for both forms.
    """
    forms = {
        name: msgspec.structs.replace(signature, graph=file)
        for name, signature in bundle.manifest.signatures.items()
        if (file := best_form(bundle.graph(name)).name) in bundle.manifest.files
        and file != signature.graph
    }
    return _with_signatures(bundle, forms)


def in_winograd_form(bundle: Bundle) -> Bundle:
    """Return `bundle` with Winograd's forms of graphs, if these are faster on this device."""
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
    if not forms or device_form() != WINOGRAD:
        return bundle
    return _with_signatures(bundle, forms)


def _with_signatures(bundle: Bundle, signatures: dict[str, Signature]) -> Bundle:
    """Return `bundle` with the entries of `signatures` replaced, or `bundle` if there are none."""
    if not signatures:
        return bundle
    known = bundle.manifest.signatures
    manifest = msgspec.structs.replace(bundle.manifest, signatures=known | signatures)
    return replace(bundle, manifest=manifest)
