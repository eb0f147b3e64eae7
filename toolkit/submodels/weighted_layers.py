"""Finds the weighted layers of a model, in the order in which the model uses them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from exporters.programs.recorded_graph import attributes_read, module_of
from exporters.recording.captured import Captured
from exporters.recording.shared_tensors import first_names, tensors_by_all_names

Convolution = nn.Conv1d | nn.Conv2d
REPLACEABLE = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LSTM, nn.GRU, nn.RNN)


def is_product(module: nn.Module) -> bool:
    """Whether `module` is `Conv1D` of transformers: x @ weight + bias, with a weight (m, n).

    GPT-2 uses `Conv1D` instead of linear layers. This function also works if transformers is not
    installed.
    """
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


@dataclass(frozen=True)
class Layer:
    """A module with its own parameters of two axes or more.

    Attributes:
        name: Name of the module in the model.
        module: The module.
        obstacle: The reason why it cannot be replaced; empty if it can.
        is_tied: Whether it shares a parameter with another module.
    """

    name: str
    module: nn.Module
    obstacle: str
    is_tied: bool

    @property
    def groups(self) -> int:
        """Number of groups of a convolution; 1 for other layers."""
        return int(getattr(self.module, "groups", 1))

    @property
    def title(self) -> str:
        """The name of the layer in a table."""
        return self.name or "(the model itself)"

    def path(self, own: str) -> str:
        """The full name, within the model, of the tensor `own` of this layer, such as `weight`."""
        return tensor_path(self.name, own)

    def weights(self) -> Iterator[str]:
        """Names, within the module, of its trained parameters with two axes or more."""
        own = self.module.named_parameters(recurse=False)
        return (n for n, p in own if p.dim() > 1 and p.requires_grad)


def tensor_path(layer: str, own: str) -> str:
    """The full name, within the model, of the tensor `own` of `layer`, such as `weight`."""
    return f"{layer}.{own}" if layer else own


def weighted_layers(model: nn.Module, captured: Captured) -> list[Layer]:
    """All weighted layers of `model`, from the input to the output; unused layers come last."""
    order = {name: number for number, name in enumerate(attributes_read(captured.training))}
    shared, names = read_elsewhere(captured), first_names(tensors_by_all_names(model))
    owned = {
        name: [names[tensor_path(name, n)] for n, _ in own_parameters(module)]
        for name, module in model.named_modules()
    }
    owners = Counter(name for own in owned.values() for name in own)
    layers = []
    for name, module in model.named_modules():
        own = owned[name]
        if any(p.dim() > 1 for _, p in own_parameters(module)):
            # In many models, the order of use differs from the order of registration.
            first = min((order[n] for n in own if n in order), default=len(order))
            tied = any(owners[n] > 1 for n in own)
            obstacle = replacement_obstacle(
                module, first < len(order), tied or not shared.isdisjoint(own)
            )
            layers.append((first, Layer(name, module, obstacle, tied)))
    return [layer for _, layer in sorted(layers, key=lambda pair: pair[0])]


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `module` itself, under all their names."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def replacement_obstacle(module: nn.Module, used: bool, shared: bool) -> str:
    """The reason why `module` cannot be replaced; empty if it can.

    `used` says whether the model calls the module. `shared` says whether other modules read the
    tensors of this module.
    """
    # nn.MultiheadAttention reads the weight of its output layer without calling the layer.
    if type(module) is NonDynamicallyQuantizableLinear:
        return "attention reads its weights itself"
    # A subclass may compute something else, so only the exact types can be replaced.
    if type(module) not in REPLACEABLE and not is_product(module):
        return f"{type(module).__name__} has no factorized form"
    if not used:
        return "the model does not use it"
    if not any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False)):
        return "its weight is frozen (requires_grad=False)"
    # A hook may depend on the type of the layer, and would be lost with it.
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks"
    return "another module reads its weights" if shared else ""


def read_elsewhere(captured: Captured) -> set[str]:
    """Tensors that are read outside of the module that owns them."""
    return {
        str(node.target)
        for node in captured.training.graph.find_nodes(op="get_attr")
        if any(module_of(user) != str(node.target).rpartition(".")[0] for user in node.users)
    }


def copy_settings(new: nn.Module, dense: Convolution | nn.Linear | nn.RNNBase) -> None:
    """Copy settings such as `in_features` to the layer `new` that replaces `dense`.

    The model's code may read them.
    """
    for name in dense.__constants__:
        if hasattr(dense, name):
            setattr(new, name, getattr(dense, name))


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the submodule `old` of `model` by `new`, under all its names."""
    names = [n for n, module in model.named_modules(remove_duplicate=False) if module is old]
    for name in names:
        model.set_submodule(name, new)
