"""The bytes that a device will receive and send. Its owner sees them before it joins."""

from collections.abc import Mapping
from typing import TypedDict

from device_agent.formats.graph_forms import form_of
from device_agent.formats.manifest import MANIFEST, WEIGHTS, FileEntry
from device_agent.privacy.summed_updates import elements
from toolkit.coordinator.rounds.upload_validation import expected_tensors, tensor_bytes
from toolkit.coordinator.storage.blobs import Blobs


class Traffic(TypedDict, total=False):
    """The bytes that a device receives and sends in its first round, and in each later round."""

    first_bytes: int
    round_bytes: int


def round_traffic(bundle: Mapping[str, FileEntry], blobs: Blobs, summed: bool) -> Traffic:
    """The traffic of a device with this bundle; empty while there is no bundle.

    With `summed`, the device sends the vector of a secure sum in place of its update.

    Graphs are fetched once; the manifest and the weights are fetched in every round. Alternative
    forms of the graphs, which only some devices fetch, are not counted.
    """
    if MANIFEST not in bundle:
        return {}
    manifest = blobs.path(bundle[MANIFEST].sha256).read_bytes()
    table = expected_tensors(manifest)
    sent = 4 * elements(table) if summed else tensor_bytes(table)
    again = sum(bundle[name].size for name in (MANIFEST, WEIGHTS) if name in bundle)
    first = sum(entry.size for name, entry in bundle.items() if form_of(name) is None)
    return {"first_bytes": first + sent, "round_bytes": again + sent}
