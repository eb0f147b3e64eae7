"""The weighted layers of any model, in the order in which it uses them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from exporters.programs.captured import Captured
from exporters.programs.recorded_graph import attributes_read, module_of

Convolution = nn.Conv1d | nn.Conv2d
FORMS = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True)
class Layer:
    """A module that owns parameters of two axes or more.

    `obstacle` says why no other layer can take its place; empty where one can.
    """

    name: str
    module: nn.Module
    obstacle: str

    @property
    def groups(self) -> int:
        """Groups of channels that do not mix."""
        return int(getattr(self.module, "groups", 1))

    @property
    def title(self) -> str:
        """What to call it in a table."""
        return self.name or "(the model itself)"

    def path(self, own: str) -> str:
        """The model's name of the layer's tensor `own`."""
        return join(self.name, own)

    def weights(self) -> Iterator[str]:
        """The module's own names of its trained parameters of two axes or more."""
        own = self.module.named_parameters(recurse=False)
        return (n for n, p in own if p.dim() > 1 and p.requires_grad)


def join(layer: str, own: str) -> str:
    """The model's name of what the module `layer` calls `own`."""
    return f"{layer}.{own}" if layer else own


def weighted_layers(model: nn.Module, captured: Captured) -> list[Layer]:
    """All weighted layers of `model` from the input to the output; unused ones come last."""
    order = {name: place for place, name in enumerate(attributes_read(captured.training))}
    strangers = read_elsewhere(captured)
    found = []
    for name, module in model.named_modules():
        own = [join(name, n) for n, _ in module.named_parameters(recurse=False)]
        if any(p.dim() > 1 for p in module.parameters(recurse=False)):
            first = min((order[n] for n in own if n in order), default=len(order))
            used = first < len(order)
            found.append((first, Layer(name, module, obstacle(module, used, strangers & set(own)))))
    return [layer for _, layer in sorted(found, key=lambda pair: pair[0])]


def obstacle(module: nn.Module, used: bool, strangers: set[str]) -> str:
    """Why `module` has to stay; `strangers` are its tensors that other modules read."""
    if type(module) is NonDynamicallyQuantizableLinear:
        return "attention reads its weights itself"
    if type(module) not in FORMS:
        return f"{type(module).__name__} has no factorized form"
    if not used:
        return "the model does not use it"
    if not any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False)):
        return "its weight is frozen (requires_grad=False)"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks"
    return "another module reads its weights" if strangers else ""


def read_elsewhere(captured: Captured) -> set[str]:
    """Parameters that are read outside of the module that owns them."""
    return {
        str(node.target)
        for node in captured.training.graph.find_nodes(op="get_attr")
        if any(module_of(user) != str(node.target).rpartition(".")[0] for user in node.users)
    }


def keep_settings(new: nn.Module, dense: Convolution | nn.Linear | nn.RNNBase) -> None:
    """Give `new` the settings of the layer whose place it takes: the model may ask for them."""
    for name in dense.__constants__:
        if hasattr(dense, name):
            setattr(new, name, getattr(dense, name))
