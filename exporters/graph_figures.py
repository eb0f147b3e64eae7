"""Computes a graph's other forms and its figures: the memory and the repeated work of a run."""

from collections.abc import Callable, Iterator
from functools import partial

from device_agent.formats.graph_forms import BLOCKS, WINOGRAD, blocked_form
from exporters.memory.onnx_footprint import Footprint, SizedGraph
from exporters.onnx.forms import winograd
from exporters.onnx.forms.blocked_layout import way_to_rewrite
from exporters.onnx.forms.graph_rewriting import rewritten
from exporters.onnx.recomputed.forward_pass import repeated_share
from exporters.runtime_graph import Figures, Form, Graph
from profiles.errors import ExportError


def figures_of(graph: Graph, batch: int) -> Figures:
    """Return the figures of `graph` for `batch` samples. If the graph has none, compute them."""
    if graph.figures is not None and graph.figures.batch == batch:
        return graph.figures
    if graph.runtime != "onnx":
        return Figures(batch, predicted(partial(graph.footprint, batch)), 0.0)
    return onnx_figures(SizedGraph(graph.data, batch))


def onnx_figures(sized: SizedGraph) -> Figures:
    """The figures of an ONNX graph."""
    return Figures(sized.batch, predicted(sized.footprint), repeated_share(sized))


def forms(sized: SizedGraph) -> Iterator[tuple[str, Form]]:
    """Yield the name and the content of each other form of an ONNX graph."""
    rewrites = {blocked_form(block): way_to_rewrite(sized, block) for block in BLOCKS}
    for name, rewrite in (rewrites | {WINOGRAD: winograd.rewrite}).items():
        if (data := rewritten(sized.graph, rewrite)) is not None:
            yield name, Form(data, predicted(partial(sized.footprint, rewrite)))


def predicted(footprint: Callable[[], Footprint]) -> Footprint | None:
    """Return the result of `footprint`, or None if shapes depend on the data."""
    try:
        return footprint()
    except ExportError:
        return None
