"""Complex parameters as pairs of real numbers, which can be trained, averaged and exported.

The pair of a + bi is (a, b). The gradient of a complex parameter has the gradients of a and b as
its parts (PyTorch's notes on autograd, "Complex Numbers"). SGD and Adam step each of
the parts separately. So a pair trains as its complex number does.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from exporters.recording.replacements.shown_attributes import show


def with_real_parameters(model: nn.Module) -> nn.Module:
    """Make each complex parameter (...) of `model` a float32 parameter (..., 2), in place.

    Code of the model still reads a complex tensor under the parameter's name. Layers of torch.nn
    keep complex weights, because families would take the pairs for weights of real layers.

    Returns:
        The same model.

    Examples:
        >>> model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
        >>> with_real_parameters(model)[0]
        tensor([1.+0.j, 1.+0.j, 1.+0.j], grad_fn=<ViewAsComplexBackward0>)
        >>> [value.shape for value in model.state_dict().values()]
        [torch.Size([3, 2])]
    """
    pairs: dict[int, nn.Parameter] = {}  # one pair for a parameter of several modules
    for module in model.modules():
        found = {n: v for n, v in module._parameters.items() if v is not None and v.is_complex()}
        if not found or _is_layer(module):
            continue
        for name, value in found.items():
            pair = torch.view_as_real(value.detach().to(torch.complex64)).clone()
            new = nn.Parameter(pair, requires_grad=value.requires_grad)
            module._parameters[name] = pairs.setdefault(id(value), new)
        show(module, {name: _complex(name) for name in found})
    return model


def _is_layer(module: nn.Module) -> bool:
    lists = isinstance(module, nn.ParameterList | nn.ParameterDict)
    return type(module).__module__.startswith("torch.nn.") and not lists


def _complex(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda module: torch.view_as_complex(cast(Tensor, module._parameters[name]))
