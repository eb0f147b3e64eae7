"""Checks of a model and of what it returns: can it be split and trained? Errors name the cause."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn.parameter import UninitializedParameter

from exporters.programs import source_lines
from exporters.recording.shared_tensors import first_names
from profiles.errors import ModelError

OUTPUT_RULE = "it must be one tensor with the batch as its first axis and all other sizes fixed."
PRODUCTS = (
    " Return the vectors of each sample (batch, n), and compute their products in a loss of your "
    "own: --loss module:function."
)
BATCH_LOSS = (
    " If the model computes its own loss, pass it on by a loss of your own: --loss "
    "module:function, with a function that returns what it gets."
)
COMPLEX = (
    " `et.load_model` makes pairs of real numbers of the complex parameters of your own modules. "
    "If this one belongs to a layer of torch.nn, write the layer as a module of your own."
)
WEIGHTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TAKEN = frozenset({*dir(GraphModule(nn.Module(), Graph()))} - {*dir(nn.Module())})
"""The attributes of recorded graphs that modules do not have, such as `code` and `graph`. Modules
or tensors of a model with these names would hide the attributes of its recording."""


def check_parameters(model: nn.Module) -> None:
    """Check that families can split and train all parameters and buffers of `model`.

    Raises:
        ModelError: A layer has no weight or is not supported. A tensor is lazy, empty, sparse, not
            float32 or not finite, or has an invalid name. Two parameters are in the same memory. Or
            no parameter is trained.
    """
    for name in (*model._modules, *model._parameters, *model._buffers):
        if name in TAKEN:
            raise ModelError(
                "The model has an attribute {name!r}{place}. Recordings of torch.fx also have an "
                "attribute of this name. Rename the model's attribute, for example to "
                "`self.own_{name}`.",
                code="model.invalid-name",
                name=name,
                place=source_lines.place_of_assignment(model, name),
            )
    for name, module in model.named_modules():
        # If `forward` computes the weight of a layer, the layer has none before the first call.
        if isinstance(module, WEIGHTED_LAYERS) and getattr(module, "weight", module) is None:
            raise ModelError(
                "{layer!r} has no weight: its `weight` is None. Give it a weight tensor.",
                code="model.missing-weight",
                layer=name,
            )
        check_layer(name, module)
        check_dense(name, {**vars(module), **module._parameters, **module._buffers})
    parameters = dict(model.named_parameters())
    for name, value in parameters.items():
        check_parameter(name, value)
    # One parameter may have several names, but two parameters must not be one tensor: an optimizer
    # would change it twice in each step.
    for name, first in first_names(parameters).items():
        if name != first:
            raise ModelError(
                "{name!r} and {first!r} are two parameters in the same memory. Give both modules "
                "one parameter, as in `module.weight = other.weight`, or copy its values.",
                code="model.shared-memory",
                parameters=[name, first],
                name=name,
                first=first,
            )
    for name, value in model.state_dict().items():
        check_saved_tensor(name, value)
    if not parameters:
        raise ModelError(
            "The model has no parameters, so there is nothing to train.",
            code="model.no-parameters",
        )
    if not any(value.requires_grad for value in model.parameters()):
        raise ModelError(
            "All parameters of the model are frozen (requires_grad=False), so there is nothing to "
            "train. Set requires_grad=True for some of them.",
            code="model.all-frozen",
        )


def check_dense(module: str, attributes: Mapping[str, object]) -> None:
    """Raise ModelError for a sparse tensor among the `attributes` of `module`."""
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise ModelError(
                "{tensor!r} is a sparse tensor, which ONNX and TFLite do not have. Load the model "
                "with `et.load_model`, which keeps sparse matrices as indices and values, or make "
                "the tensor dense by .to_dense() in __init__.",
                code="model.sparse-tensor",
                tensor=f"{module}.{name}".removeprefix("."),
            )


def check_parameter(name: str, value: Tensor) -> None:
    """Raise ModelError if the parameter `name` is lazy, empty, not float32 or has a bad name."""
    if isinstance(value, UninitializedParameter):
        raise ModelError(
            "{parameter!r} has no shape yet: its module is lazy. Run the model once on a batch.",
            code="model.lazy-parameter",
            parameter=name,
        )
    if value.dtype != torch.float32:
        raise ModelError(
            "{tensor!r} is {dtype}; parameters must be float32.{remedy}",
            code="model.wrong-dtype",
            tensor=name,
            dtype=str(value.dtype),
            remedy=COMPLEX
            if value.is_complex()
            else " Call .float() on the model."
            if value.is_floating_point()
            else " Make it a buffer, by register_buffer.",
        )
    check_name(name)
    if value.numel() == 0:
        raise ModelError(
            "{parameter!r} has shape {shape} and so no elements. Remove it.",
            code="model.empty-parameter",
            parameter=name,
            shape=tuple(value.shape),
        )


def check_saved_tensor(name: str, value: object) -> None:
    """Raise ModelError if the entry `name` of the state dict is not a finite float32 tensor."""
    if not isinstance(value, Tensor):
        raise ModelError(
            "{name!r} is not a tensor. A weights file contains only tensors; remove the extra "
            "state.",
            code="model.extra-state",
            name=name,
        )
    # Integer buffers, for example batch counters, keep their type and are always finite.
    if not value.is_floating_point():
        return
    if value.dtype != torch.float32:
        raise ModelError(
            "{tensor!r} is {dtype}; buffers must be float32.",
            code="model.wrong-dtype",
            tensor=name,
            dtype=str(value.dtype),
        )
    if not torch.isfinite(value).all():
        raise ModelError(
            "{tensor!r} contains a number that is not finite (nan or infinity). A mask of -inf "
            "needs register_buffer(..., persistent=False), or -1e9 in place of -inf.",
            code="model.not-finite",
            tensor=name,
        )


def check_name(name: str) -> None:
    """Raise ModelError for a parameter name that graphs cannot contain."""
    if name.endswith("+"):
        raise ModelError(
            "{name!r} ends in '+', which graphs use for new values. Rename it.",
            code="model.invalid-name",
            name=name,
        )
    if set(name) & {'"', "\\"} or not name.isprintable():
        raise ModelError(
            "The name {name!r} contains a quotation mark, a backslash or a control character. "
            "Recorded models cannot have such names. Rename the module that has this name.",
            code="model.invalid-name",
            name=name,
        )


def check_layer(name: str, module: nn.Module) -> None:
    """Raise ModelError for a layer that can be recorded but not exported."""
    if (
        isinstance(module, BATCH_NORMS)
        and module.running_mean is not None
        and module.momentum is None
    ):
        raise ModelError(
            "{layer!r} averages its statistics over all batches so far (momentum=None), so they "
            "depend on the number of batches. Give it a momentum, for example 0.1.",
            code="model.cumulative-statistics",
            layer=name,
        )


def check_output_type(output: object) -> None:
    """Raise ModelError unless the model's `output` is a float32 tensor."""
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise ModelError(
            "The model's output is a {type}; {rule}",
            code="model.wrong-output",
            type=kind,
            rule=OUTPUT_RULE,
        )
    if output.dtype != torch.float32:
        raise ModelError(
            "The model's output is {dtype}; it must be float32.",
            code="model.wrong-output",
            dtype=str(output.dtype),
        )


def check_output(output: object, batch: object) -> None:
    """Raise ModelError unless the model's `output` is one float32 tensor (batch, ...)."""
    check_output_type(output)
    assert isinstance(output, Tensor)
    rows, *sizes = output.shape or (None,)
    # Compare symbolic expressions: `rows == batch` would add a guard on the numbers and so fix the
    # batch size of the recording.
    fits = (
        isinstance(rows, torch.SymInt)
        and isinstance(batch, torch.SymInt)
        and rows.node.expr == batch.node.expr
        and all(isinstance(size, int) and size > 0 for size in sizes)
    )
    if not fits:
        shape = name_batch(str(tuple(output.shape)))
        raise ModelError(
            "The model's output is {shape}; {rule}{remedy}",
            code="model.wrong-output",
            shape=shape,
            rule=OUTPUT_RULE,
            remedy=PRODUCTS if shape.count("batch") > 1 else BATCH_LOSS if not output.shape else "",
        )


def name_batch(text: str) -> str:
    """In `text`, replace torch's symbol for the batch size, for example s77, by `batch`."""
    return re.sub(r"\bs\d+\b", "batch", text)
