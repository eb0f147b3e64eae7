"""Checks whether a model and its graph can be split and trained. Errors name the cause."""

import operator
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.parameter import UninitializedParameter

from exporters.programs import source_lines
from exporters.programs.recorded_graph import keeps_new_value, module_of, written_inputs
from exporters.programs.seeded_random import SEEDED, UNIFORM, dropout_rate
from exporters.recording.shared_tensors import first_names
from profiles.errors import ModelError

aten = torch.ops.aten
RANDOM_NAMES = (
    *("rand", "bernoulli", "dropout", "normal_", ".normal.", "uniform", "rrelu", "multinomial"),
    *("exponential", "geometric", "cauchy", ".poisson.", "binomial"),
)
"""Parts of the names of operators that draw random numbers."""
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
NUMBERS = (aten.item.default, aten._local_scalar_dense.default)
"""Operators that read a number from a tensor."""
CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
WEIGHTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TAKEN = frozenset({*dir(GraphModule(nn.Module(), Graph()))} - {*dir(nn.Module())})
"""The attributes of recorded graphs that modules do not have, such as `code` and `graph`. Modules
or tensors of a model with these names would hide the attributes of its recording."""
VIEWS = ("aten.detach", "aten.alias", "aten.view", "aten.slice", "aten.select", "aten.transpose")


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


def check_sizes(graph: GraphModule) -> None:
    """Raise ModelError if the size of a tensor depends on anything except the batch size."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        if any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes):
            named = node.args[0] if node.target is operator.getitem else node
            raise ModelError(
                "The size of the result of {operator}{place} depends on values; only the batch "
                "size may vary. Mask elements with torch.where instead of selecting them. In a "
                "mixture of experts, run each expert on all samples and multiply by its gate.",
                code="model.data-dependent-size",
                operator=str(getattr(named, "target", node.target)),
                place=source_lines.place_of_node(node),
            )


def check_vmap(graph: GraphModule) -> None:
    """Raise ModelError if the model calls torch.vmap.

    The results of vmap have no storage, but this package finds views by their storage.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
            raise ModelError(
                "The model calls torch.vmap{place}, which cannot be recorded. Let the operators "
                "work on the whole batch, for example by broadcasting.",
                code="model.vmap",
                place=source_lines.place_of_node(node),
            )


def check_operators(graph: GraphModule) -> None:
    """Raise ModelError for operators that cannot be exported, such as torch.cond.

    The error states the reason.
    """
    for node in graph.graph.nodes:
        value, place = node.meta.get("val"), source_lines.place_of_node(node)
        if isinstance(value, Tensor) and value.is_complex():
            raise ModelError(
                "The model computes with complex numbers ({operator}){place}, which cannot be "
                "exported. Compute the real and the imaginary part as two tensors.",
                code="model.complex-numbers",
                operator=str(node.target),
                place=place,
            )
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            raise ModelError(
                "The model computes in {dtype}{place}, and devices compute in float32. Leave out "
                ".half(), .bfloat16() and .to(...) with this type; torch.autocast is ignored.",
                code="model.low-precision",
                dtype=str(value.dtype),
                place=place,
            )
        if node.target in NUMBERS:
            raise reads_number(place)
        if isinstance(node.target, HigherOrderOperator) and str(node.target) in CONTROL_FLOW:
            raise ModelError(
                "The model branches or loops with torch's {operator}{place}, which cannot be "
                "exported. Compute all branches and choose with torch.where.",
                code="model.control-flow",
                operator=str(node.target),
                place=place,
            )
        groups = argument(node, "groups")
        if isinstance(groups, Node):
            raise ModelError(
                "A convolution{place} has a group for each sample. Multiply the patches of each "
                "sample by its own kernel instead: torch.bmm(kernels, F.unfold(x, size)).",
                code="model.grouped-by-sample",
                place=place,
            )
        if argument(node, "reduce") == "prod":
            raise ModelError(
                "The model writes several values to one element and multiplies them{place}. "
                "Neither ONNX nor TFLite has the gradient of this product. Instead, add the "
                "logarithms with scatter_add, and take the exponential of the sum.",
                code="model.scattered-product",
                place=place,
            )


def reads_number(place: str) -> ModelError:
    """The error for a model that reads a number from a tensor at `place`."""
    return ModelError(
        "The model reads a Python number from a tensor{place}. A graph contains only tensors: "
        "leave out .item(), .tolist(), float() and int(), and compute with the tensor. To choose "
        "or shift elements, use a tensor as the index, as in x.index_select(1, (torch.arange(n) + "
        "shift) % n).",
        code="model.data-dependent-code",
        place=place,
    )


def argument(node: Node, name: str) -> object:
    """The argument `name` of the operator that `node` calls. None if the argument is missing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for index, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name)
    return None


def check_deterministic(training: GraphModule, inference: GraphModule) -> None:
    """Raise ModelError if there are random numbers without a seed, or dropouts in a prediction.

    A training step has a seed for dropouts and uniform numbers. A prediction uses fixed numbers.
    """
    for node in training.graph.nodes:
        if node.target not in (*SEEDED, UNIFORM) and draws(node):
            raise ModelError(
                "The model draws random numbers when it trains ({operator}{place}{line}), but a "
                "device cannot repeat these numbers from a seed. Draw with torch.rand, "
                "torch.randn, torch.randint or torch.bernoulli, or use nn.Dropout.",
                code="model.random-numbers",
                **drawn_by(node),
            )
    for node in inference.graph.nodes:
        if node.target is not UNIFORM and draws(node):
            raise ModelError(
                "The model drops values when it predicts ({operator}{place}{line}), so its "
                "predictions for a sample differ each time. Pass training=self.training to "
                "functions such as F.dropout, or draw with torch.rand or torch.randn.",
                code="model.random-numbers",
                **drawn_by(node),
            )


def check_draws_nothing(graph: GraphModule) -> None:
    """Raise ModelError if `graph` draws random numbers."""
    for node in filter(draws, graph.graph.nodes):
        raise ModelError(
            "The model draws random numbers ({operator}{place}{line}).",
            code="model.random-numbers",
            **drawn_by(node),
        )


def draws(node: Node) -> bool:
    """Whether `node` draws random numbers."""
    if node.op != "call_function":
        return False
    if node.target in SEEDED:
        return dropout_rate(node.target, node.args) > 0
    return any(word in str(node.target) for word in RANDOM_NAMES)


def drawn_by(node: Node) -> dict[str, str]:
    """The operator, the layer and the line of a draw, as text for an error."""
    layer, line = module_of(node), source_lines.line_of_node(node)
    return {
        "operator": str(node.target),
        "layer": layer,
        "place": f" in {layer!r}" if layer else "",
        "line": line and f", {line}",
    }


def check_writes(training: GraphModule, inference: GraphModule, kept: Collection[str]) -> None:
    """Raise ModelError if the model changes one of its tensors that must stay unchanged.

    In training, the model may change the tensors in `kept`. In a prediction, it may not change any.
    """
    check_training_writes(training, kept)
    for node in filter(keeps_new_value, inference.graph.nodes):
        (written, _) = node.args
        assert isinstance(written, Node)
        raise ModelError(
            "The model changes its own tensor {tensor!r} when it predicts{place}. A prediction "
            "must leave the model as it is: change the tensor only `if self.training:`.",
            code="model.writes-own-tensor",
            tensor=str(written.target),
            place=source_lines.place_of_node(node),
        )


def check_training_writes(graph: GraphModule, kept: Collection[str]) -> None:
    """Raise ModelError if a training step changes own tensors of the model that are not `kept`."""
    for node, written in ((n, w) for n in graph.graph.nodes for w in written_inputs(n)):
        # A write through a view, for example `weight[0].zero_()`, changes the viewed tensor.
        while isinstance(written, Node) and any(word in str(written.target) for word in VIEWS):
            written = written.args[0]
        if not isinstance(written, Node) or written.op != "get_attr":
            continue
        if not keeps_new_value(node) or str(written.target) not in kept:
            raise ModelError(
                "The model changes its own tensor {tensor!r} when it runs ({operator}){place}. A "
                "model may only change buffers and frozen parameters that are float32 and saved "
                "with it, such as averages. If the tensor is a weight, compute with a changed "
                "copy, as in F.linear(x, weight.clamp(-1, 1)). If it is a count, count in a "
                "float32 buffer. If it is an embedding, remove max_norm.",
                code="model.writes-own-tensor",
                tensor=str(written.target),
                operator=str(node.target),
                place=source_lines.place_of_node(node),
            )
