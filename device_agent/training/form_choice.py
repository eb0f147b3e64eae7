"""The form of a bundle's graphs that this device runs: plain, blocked or Winograd's."""

from dataclasses import replace

import msgspec

from device_agent.formats.bundle import Bundle
from device_agent.formats.graph_forms import WINOGRAD, form_file
from device_agent.formats.manifest import Signature
from device_agent.runtime.blocked_probe import best_form, block_size
from device_agent.runtime.graph_form import device_form


def in_device_form(bundle: Bundle) -> Bundle:
    """`bundle` with its graphs in the form that this device runs fastest.

    Graphs in ONNX format run in blocked form if the device has its blocks, else in Winograd's form
    on devices that gain from it. The latter may need more memory than the plain graphs.
    """
    if bundle.manifest.runtime != "onnx":
        return bundle
    # Asked now: when memory is limited, the probe may fail and find no blocks.
    return in_blocked_form(bundle) if block_size() is not None else in_winograd_form(bundle)


def in_blocked_form(bundle: Bundle) -> Bundle:
    """`bundle` with the graphs that it has in blocks of this device's size.

    Their predicted memory is that of the plain graphs: the manifest names the larger one.
    """
    forms = {
        name: msgspec.structs.replace(signature, graph=file)
        for name, signature in bundle.manifest.signatures.items()
        if (file := best_form(bundle.graph(name)).name) in bundle.manifest.files
        and file != signature.graph
    }
    return _with_signatures(bundle, forms)


def in_winograd_form(bundle: Bundle) -> Bundle:
    """`bundle` with the graphs that it has in Winograd's form, if this device gains from them."""
    forms = {
        name: msgspec.structs.replace(
            signature, graph=file, peak_bytes=signature.winograd_peak_bytes
        )
        for name, signature in bundle.manifest.signatures.items()
        if (file := form_file(signature.graph, WINOGRAD)) in bundle.manifest.files
        and (bundle.folder / file).exists()
        # A form of unknown size cannot be checked against limits that the plain one is checked by.
        and (signature.winograd_peak_bytes is not None or signature.peak_bytes is None)
    }
    if not forms or device_form() != WINOGRAD:
        return bundle
    return _with_signatures(bundle, forms)


def _with_signatures(bundle: Bundle, signatures: dict[str, Signature]) -> Bundle:
    """`bundle` with other entries for `signatures`; itself if there are none."""
    if not signatures:
        return bundle
    known = bundle.manifest.signatures
    manifest = msgspec.structs.replace(bundle.manifest, signatures=known | signatures)
    return replace(bundle, manifest=manifest)
