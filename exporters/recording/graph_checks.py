"""Checks of a recorded graph: can it be exported and trained? Errors name the line of the model."""

import operator
from collections.abc import Collection

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exporters.programs import source_lines
from exporters.programs.recorded_graph import keeps_new_value, module_of, written_inputs
from exporters.programs.seeded_random import SEEDED, UNIFORM, dropout_rate
from profiles.errors import ModelError

aten = torch.ops.aten
RANDOM_NAMES = (
    *("rand", "bernoulli", "dropout", "normal_", ".normal.", "uniform", "rrelu", "multinomial"),
    *("exponential", "geometric", "cauchy", ".poisson.", "binomial"),
)
"""Parts of the names of operators that draw random numbers."""
NUMBERS = (aten.item.default, aten._local_scalar_dense.default)
"""Operators that read a number from a tensor."""
CONTROL_FLOW = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
VIEWS = ("aten.detach", "aten.alias", "aten.view", "aten.slice", "aten.select", "aten.transpose")


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
