"""Tensors with shared memory: tensors with several names, and the parameters of a model's copy.

A model may have a tensor under several names, such as the weight of tied layers. All other modules
use only the first name of such a tensor.
"""

import copy
from collections.abc import Container, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

COPIED = (nn.Module, Tensor, list, dict)
"""Types of objects that functions inside a model may read, and that are copied with the model."""


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name to the first name of its tensor.

    Two names refer to the same tensor if the numbers are at the same place in memory.

    Args:
        tensors: Tensors by name, for example a state dict.

    Returns:
        For each name in `tensors`, the first name of its tensor.

    Examples:
        >>> import torch
        >>> weight = torch.ones(2, 3)
        >>> first_names({"first": weight, "second": weight.detach(), "other": torch.ones(2, 3)})
        {'first': 'first', 'second': 'first', 'other': 'other'}
    """
    owners: dict[object, str] = {}
    first = {}
    for name, value in tensors.items():
        # Tensors without numbers have no address in memory.
        memory = (
            (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else name
        )
        first[name] = owners.setdefault(memory, name)
    return first


def tensors_by_all_names(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of `model` under all their names, parameters first."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def twin_of(model: nn.Module, changing: Container[str] = ()) -> nn.Module:
    """Copy `model`, but share the numbers of its parameters.

    A run of the copy may change buffers, such as the statistics of batch norms, and the parameters
    in `changing`, so these are copied. `Captured.changed` has the trained parameters that a run may
    change.
    """
    parameters = {
        id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter and name not in changing
    }
    attributes = [value for module in model.modules() for value in vars(module).values()]
    # Scripted functions, such as activations, cannot be copied; they have no state.
    scripted = {id(v): v for v in attributes if isinstance(v, torch.jit.ScriptFunction)}
    # Computed weights cannot be copied either; torch.nn.utils.weight_norm computes them for each
    # run.
    computed = {id(v): v.detach() for v in attributes if isinstance(v, Tensor) and not v.is_leaf}
    memo: dict[int, Any] = {**parameters, **scripted, **computed}
    twin = copy.deepcopy(model, memo=memo)
    for module in twin.modules():
        bind_functions(vars(module), memo)
    return twin


def bind_functions(space: dict[Any, Any], copies: Mapping[int, Any]) -> None:
    """Let the functions in `space`, such as hooks, read the `copies` of objects in their closures.

    `copy.deepcopy` does not copy functions.
    """
    for name, value in space.items():
        if isinstance(value, FunctionType):
            space[name] = bound(value, copies)
        elif isinstance(value, dict) and str(name).endswith("_hooks"):
            bind_functions(value, copies)


def bound(function: FunctionType, copies: Mapping[int, Any]) -> FunctionType:
    """A copy of `function` that reads the copies of objects. `copies` has them by object id."""

    def copy_of(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return bound(value, copies)
        return copies.get(id(value), value) if isinstance(value, COPIED) else value

    try:
        read = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable without a value
        return function
    given = function.__defaults__ or ()
    cells, defaults = [copy_of(value) for value in read], tuple(map(copy_of, given))
    if all(a is b for a, b in zip((*read, *given), (*cells, *defaults), strict=True)):
        return function
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        defaults or None,
        tuple(map(CellType, cells)),
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def kept_tensors(model: nn.Module) -> set[str]:
    """The first names of the float tensors that are saved with `model` but not trained.

    A model may change these tensors while it trains, for example to compute averages.
    """
    first, saved = first_names(tensors_by_all_names(model)), model.state_dict()
    return {
        first[name]
        for name, value in tensors_by_all_names(model).items()
        if name in saved and value.is_floating_point() and not value.requires_grad
    }
