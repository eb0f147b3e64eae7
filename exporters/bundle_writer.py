"""Combines graphs, weights and manifest into the files of a bundle."""

from collections.abc import Mapping

from msgspec import UNSET
from safetensors.torch import save
from torch import Tensor

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.graph_forms import WINOGRAD, form_file
from device_agent.formats.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    Signature,
    encode,
)
from exporters.graph_figures import figures_of
from exporters.programs.program import Program
from exporters.programs.tracing import DTYPES
from exporters.runtime_graph import Graph, Graphs
from profiles.errors import ExportError


def bundle_files(
    program: Program, graphs: Graphs, values: Mapping[str, Tensor], base: str
) -> dict[str, bytes]:
    """Make the files of a bundle.

    Args:
        program: The program of a submodel.
        graphs: The graph of every signature. If a graph contains a tensor as a constant, the tensor
            is left out of the weights, the ports and the table of tensors.
        values: Every stored tensor of the program, by name.
        base: Fingerprint of the global model from which `values` were cut.

    Returns:
        The content of each file, by file name.

    Raises:
        ExportError: The shape or type of a value differs from the program.
    """
    held = frozenset[str]().union(*(graph.held for graph in graphs.values()))
    tensors = tuple(entry for entry in program.tensors if entry.name not in held)
    stored = {}
    for entry in tensors:
        if entry.stored:
            value = values[entry.name]
            if tuple(value.shape) != entry.shape:
                raise ExportError(
                    "The tensor {tensor!r} has shape {shape}; the submodel's program needs "
                    "{expected}. Take the values for this submodel from the global model.",
                    code="export.wrong-shape",
                    tensor=entry.name,
                    shape=tuple(value.shape),
                    expected=entry.shape,
                )
            if value.dtype != DTYPES[entry.dtype]:
                raise ExportError(
                    "The tensor {tensor!r} has type {dtype}; the submodel's program needs "
                    "{expected}. Take the values for this submodel from the global model.",
                    code="export.wrong-type",
                    tensor=entry.name,
                    dtype=str(value.dtype).removeprefix("torch."),
                    expected=entry.dtype,
                )
            stored[entry.name] = value.detach().contiguous()
    files = {graph.file: graph.data for graph in graphs.values()}
    for graph in graphs.values():
        files |= {form_file(graph.file, name): form.data for name, form in graph.forms.items()}
    if program.output is None:  # otherwise the graph holds the weights
        files[WEIGHTS] = save(stored)
    manifest = Manifest(
        version=FORMAT_VERSION,
        submodel=program.submodel,
        runtime=next(iter(graphs.values())).runtime,
        base=base,
        sample_shape=program.sample_shape,
        classes=program.classes,
        sample_dtype=program.sample_dtype,
        sample_limit=program.sample_limit,
        preprocessing=program.preprocessing,
        output=program.output or UNSET,
        signatures={
            s.name: Signature(
                graph=graphs[s.name].file,
                inputs=tuple(port for port in s.inputs if port.name not in held),
                outputs=s.outputs,
                peak_bytes=peak_bytes(graphs[s.name], program.batch_of(s.name)),
                winograd_peak_bytes=winograd_peak_bytes(graphs[s.name]),
                in_place=graphs[s.name].in_place,
            )
            for s in program.signatures
        },
        tensors=tensors,
        schedule=program.schedule,
        files={name: fingerprint(data) for name, data in files.items()},
    )
    return {MANIFEST: encode(manifest), **files}


def peak_bytes(graph: Graph, batch: int) -> int | None:
    """Predict the memory peak of a run on `batch` samples, in bytes.

    Returns the largest peak of the plain and the blocked forms of the graph, or None if shapes
    depend on the data. The blocked forms must have been made for `batch` samples.
    """
    footprints = [figures_of(graph, batch).footprint]
    footprints += [form.footprint for name, form in graph.forms.items() if name != WINOGRAD]
    peaks = [footprint.process for footprint in footprints if footprint is not None]
    return max(peaks) if len(peaks) == len(footprints) else None


def winograd_peak_bytes(graph: Graph) -> int | None:
    """Predict the memory peak of the Winograd form in bytes, on the batch for which it was made.

    Returns None if the graph has no such form, or if shapes depend on the data.
    """
    form = graph.forms.get(WINOGRAD)
    return None if form is None or form.footprint is None else form.footprint.process
