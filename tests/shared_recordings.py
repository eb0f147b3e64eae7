"""Models of the same structure are recorded once in a process: recording takes most of a split."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import Tensor, nn
from torch.fx import GraphModule

from exporters.programs.recorded_graph import attribute
from exporters.recording import capture
from exporters.recording.captured import Captured
from exporters.recording.inputs.input_ranges import input_range_of

Key = tuple[object, ...]
RECORDED: dict[Key, Captured] = {}
"""The recordings of all models in this process whose layers are known."""
OF_MODEL: WeakKeyDictionary[nn.Module, dict[Key, Captured]] = WeakKeyDictionary()
"""Those of each other model."""
KNOWN = ("torch.nn.", "toolkit.factor_layers.", "toolkit.models.", "models_for_tests")
"""Where layers are defined whose function follows from their class, attributes and tensors."""
record_and_check = capture.record_and_check


def structure(model: nn.Module) -> Key:
    """All that a submodel of a sequence of layers depends on: no weights, but which are shared."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    places = {id(value): number for number, (_, value) in enumerate(tensors)}
    return repr(model), *((n, v.shape, v.requires_grad, places[id(v)]) for n, v in tensors)


def options_of(layer: nn.Module) -> Key:
    """All attributes of a layer that are no modules, tensors or hooks."""
    return tuple((name, value) for name, value in vars(layer).items() if name[0] != "_")


def changed(layer: nn.Module) -> bool:
    """Whether something was hung onto a layer that its attributes do not tell."""
    hooks: Any = (layer._forward_pre_hooks, layer._forward_hooks)
    return "forward" in vars(layer) or any(hooks) or bool(layer._non_persistent_buffers_set)


def record_once(
    model: nn.Module, sample_shape: tuple[int, ...], own_loss: bool = False
) -> Captured:
    """Record a model once for all of the same structure; the recording has the tensors of `model`.

    If one of its layers is not known, it is recorded once for itself.
    """
    layers = list(model.modules())
    if any(map(changed, layers)) or input_range_of(model):
        return record_and_check(model, sample_shape, own_loss)
    known = all(type(layer).__module__.startswith(KNOWN) for layer in layers)
    recorded = RECORDED if known else OF_MODEL.setdefault(model, {})
    options = repr([options_of(m) for m in layers])
    key = type(model), structure(model), options, sample_shape, own_loss
    if key not in recorded:
        recorded[key] = record_and_check(model, sample_shape, own_loss)
    recording = recorded[key]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def of_this(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: own[name].detach() for name in tensors}

    return replace(
        recording,
        training=with_tensors(recording.training, own),
        inference=with_tensors(recording.inference, own),
        parameters=of_this(recording.parameters),
        frozen=of_this(recording.frozen),
        buffers=of_this(recording.buffers),
    )


def with_tensors(recorded: GraphModule, own: Mapping[str, Tensor]) -> GraphModule:
    """The graph `recorded` with the tensors `own` of another model; its constants stay."""
    read = {str(node.target) for node in recorded.graph.find_nodes(op="get_attr")}
    values = {name: own.get(name, attribute(recorded, name)) for name in read}
    graph = GraphModule(
        {
            name: nn.Parameter(value.detach(), value.requires_grad)
            if isinstance(value, nn.Parameter)
            else value.clone()  # which running the graph may change
            for name, value in values.items()
        },
        recorded.graph,
    )
    graph.meta = recorded.meta
    return graph


@contextmanager
def shared_recordings() -> Iterator[pytest.MonkeyPatch]:
    """Record models of the same structure once; yields what undoes further patches, too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capture, "record_and_check", record_once)
        yield patched


@pytest.fixture(autouse=True, scope="module")
def models_recorded_once() -> Iterator[None]:
    """For the conftest of a folder. Its scope is a module: fixtures of modules share them, too."""
    with shared_recordings():
        yield
