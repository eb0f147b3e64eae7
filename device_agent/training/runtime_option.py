"""A bundle as the runtime that the owner chose trains it on this device."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from device_agent.formats.bundle import Bundle
from device_agent.formats.graph_forms import WINOGRAD, form_file, form_of
from device_agent.formats.manifest import Manifest, Signature
from device_agent.runtime.blocked_probe import best_form, block_size
from device_agent.runtime.graph_form import device_form
from device_agent.runtime.runtime_packages import OPENVINO
from device_agent.training.memory_estimate import batch_of, size_of
from profiles.cost_model.memory_rule import openvino_growth
from profiles.errors import BundleError

Fits = Callable[[Manifest], bool]
"""Whether a training is predicted to fit into the memory of this device."""


def with_runtime(bundle: Bundle, chosen: str | None, fits: Fits = lambda manifest: True) -> Bundle:
    """`bundle` with the runtime `chosen`, and the memory that this one is predicted to need.

    Only graphs in ONNX format have a choice: "openvino", otherwise ONNX Runtime. That runs the
    graphs in blocked form if the device has its blocks, else in Winograd's form on devices that
    gain from it, unless this form does not fit.

    Args:
        bundle: The bundle as it was opened.
        chosen: Name of the runtime; None means ONNX Runtime for graphs in ONNX format.
        fits: Tells whether a form fits that needs more memory than the bundle's own.

    Raises:
        BundleError: The bundle has dropout. Its masks are hashes in 64-bit integers, of which
            OpenVINO keeps 32 bits: it would train with other masks, without an error.
    """
    manifest = bundle.manifest
    if manifest.runtime != "onnx":
        return bundle
    if chosen != OPENVINO:
        # Asked now: when memory is limited, the probe may fail and find no blocks.
        if block_size() is not None:
            return in_blocked_form(bundle)
        other = in_winograd_form(bundle)
        return other if fits(other.manifest) else bundle
    if any(port.kind == "seed" for one in manifest.signatures.values() for port in one.inputs):
        raise BundleError(
            "{submodel} has dropout, whose masks need integers of 64 bits; OpenVINO computes with "
            "32. Train with --runtime onnxruntime.",
            code="bundle.no-dropout",
            runtime=OPENVINO,
            submodel=manifest.submodel,
        )
    signatures = {
        name: msgspec.structs.replace(one, peak_bytes=peak_bytes(manifest, one))
        for name, one in manifest.signatures.items()
    }
    return changed(bundle, runtime=OPENVINO, signatures=signatures)


def in_blocked_form(bundle: Bundle) -> Bundle:
    """`bundle` with the graphs that it has in blocks of this device's size.

    Their predicted memory is that of the plain graphs: the manifest names the larger one.
    """
    forms = {
        name: msgspec.structs.replace(one, graph=file)
        for name, one in bundle.manifest.signatures.items()
        if (file := best_form(bundle.graph(name)).name) in bundle.manifest.files
        and file != one.graph
    }
    return changed(bundle, signatures=bundle.manifest.signatures | forms) if forms else bundle


def in_winograd_form(bundle: Bundle) -> Bundle:
    """`bundle` with the graphs that it has in Winograd's form, if this device gains from them."""
    forms = {
        name: msgspec.structs.replace(one, graph=file, peak_bytes=one.winograd_peak_bytes)
        for name, one in bundle.manifest.signatures.items()
        if (file := form_file(one.graph, WINOGRAD)) in bundle.manifest.files
        and (bundle.folder / file).exists()
        # A form of unknown size cannot be checked against limits that the plain one is checked by.
        and (one.winograd_peak_bytes is not None or one.peak_bytes is None)
    }
    if not forms or device_form() != WINOGRAD:
        return bundle
    return changed(bundle, signatures=bundle.manifest.signatures | forms)


def has_forms(bundle: Bundle) -> bool:
    """Whether the manifest lists other forms of a graph."""
    return any(form_of(name) is not None for name in bundle.manifest.files)


def without_forms(bundle: Bundle) -> Bundle:
    """`bundle` as if it had its graphs in no other form."""
    files = bundle.manifest.files.items()
    return changed(bundle, files={name: one for name, one in files if form_of(name) is None})


def changed(bundle: Bundle, **fields: object) -> Bundle:
    """`bundle` with other fields in its manifest."""
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, **fields))


def peak_bytes(manifest: Manifest, signature: Signature) -> int | None:
    """Growth of a process that runs `signature` alone with OpenVINO."""
    if signature.peak_bytes is None:
        return None
    batch = batch_of(manifest)
    inputs = sum(size_of(port, batch) for port in signature.inputs)
    outputs = {port.name: size_of(port, batch) for port in signature.outputs}
    over = sum(outputs[name] for name in signature.in_place)
    results = sum(outputs.values())
    return openvino_growth(signature.peak_bytes, inputs, results, over)
