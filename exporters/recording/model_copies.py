"""Copies of a model that need no memory for its parameters."""

import copy

from torch import nn


def twin_of(model: nn.Module) -> nn.Module:
    """Copy `model`, but share the numbers of its parameters.

    Running the copy changes no parameters, because models that write into them are refused. It may
    change buffers, such as the statistics of batch norms, so these are copied.
    """
    parameters = {
        id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad)
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter
    }
    return copy.deepcopy(model, memo=dict(parameters))
