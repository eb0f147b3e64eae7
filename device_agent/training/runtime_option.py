"""A bundle as the runtime that the owner chose trains it."""

from dataclasses import replace

import msgspec

from device_agent.formats.bundle import Bundle
from device_agent.formats.manifest import Manifest, Signature
from device_agent.runtime.openvino_runtime import PACKAGE as OPENVINO
from device_agent.training.memory_estimate import batch_of, size_of
from profiles.cost_model.memory_rule import openvino_growth
from profiles.errors import BundleError


def with_runtime(bundle: Bundle, chosen: str | None) -> Bundle:
    """`bundle` with the runtime `chosen`, and the memory that this one is predicted to need.

    Only graphs in ONNX format have a choice: "openvino", otherwise ONNX Runtime.

    Raises:
        BundleError: The bundle has dropout. Its masks are hashes in 64-bit integers, of which
            OpenVINO keeps 32 bits: it would train with other masks, without an error.
    """
    manifest = bundle.manifest
    if chosen != OPENVINO or manifest.runtime != "onnx":
        return bundle
    if any(port.kind == "seed" for one in manifest.signatures.values() for port in one.inputs):
        raise BundleError(
            f"{manifest.submodel} has dropout, whose masks need integers of 64 bits; OpenVINO "
            "computes with 32. Train with --runtime onnxruntime.",
            code="bundle.no-dropout",
            runtime=OPENVINO,
        )
    signatures = {
        name: msgspec.structs.replace(one, peak_bytes=peak_bytes(manifest, one))
        for name, one in manifest.signatures.items()
    }
    changed = msgspec.structs.replace(manifest, runtime=OPENVINO, signatures=signatures)
    return replace(bundle, manifest=changed)


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
