"""From an `nn.Module` to ATen graphs that any family can count, cut and differentiate.

`torch.export` records the model twice, as it trains and as it predicts, with the batch size left
open. Parameters keep the names that they have in the model.
"""

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.nn.parameter import UninitializedParameter

from device_agent.manifest import SAFE_LIMIT, Dtype
from exporters.lstm_shapes import lstm_shapes_only
from exporters.tracing import DTYPES, RECURRENT
from profiles.errors import ModelError

aten = torch.ops.aten
MINIMUM_BATCH = 2
FAITHFUL = 1e-3
"""Most that a recorded model may differ from itself, relative to the norm: only rounding does."""
RANDOM = ("rand", "bernoulli", "dropout", "normal_", ".normal.", "uniform", "rrelu", "multinomial")
"""What the names of operators that draw random numbers have in them."""
DROPS = {aten.scaled_dot_product_attention.default: 4, **dict.fromkeys(RECURRENT, 5)}
"""Operators with a dropout inside, and the place of its probability among their arguments."""
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
VIEWS = ("aten.detach", "aten.alias", "aten.view", "aten.slice", "aten.select", "aten.transpose")
RESHAPING = ("view", "reshape", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class Captured:
    """A model as two ATen graphs of one input (batch, *sample_shape) and one output (batch, n).

    `parameters` are trained, `frozen` ones (requires_grad=False) only read. Whole numbers in
    samples that index an embedding are below `sample_limit`; it is None where there are none or the
    model computes with them first.
    """

    training: GraphModule
    inference: GraphModule
    sample_shape: tuple[int, ...]
    classes: int
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    sample_dtype: Dtype = "float32"
    sample_limit: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parameters, trained and frozen, and buffers."""
        return {**self.parameters, **self.frozen, **self.buffers}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter or buffer `name`."""
        return tuple(self.tensors[name].shape)


def capture(model: nn.Module, sample_shape: tuple[int, ...]) -> Captured:
    """Record `model` for samples of `sample_shape` (without the batch).

    Samples are float32; a model with an embedding that takes none gets int64.

    Raises ModelError where the model cannot be recorded or is none that can be trained here:
    weights shared between modules, complex or integer parameters, all of them frozen, an output
    that is not (batch, classes).
    """
    check_parameters(model)
    training, dtype = record_either_way(model, sample_shape)
    inference = record(model, sample_shape, dtype, training=False)
    check_deterministic(training)
    check_writes(training)
    output = output_node(training).meta["val"]
    check_output(output, input_node(training).meta["val"].shape[0])
    captured = Captured(
        training=training,
        inference=inference,
        sample_shape=sample_shape,
        classes=int(output.shape[1]),
        parameters={n: v.detach() for n, v in model.named_parameters() if v.requires_grad},
        frozen={n: v.detach() for n, v in model.named_parameters() if not v.requires_grad},
        # Integer buffers only count batches; they are no part of the model's function. Buffers that
        # are not saved with the model are constants of the graph.
        buffers={
            name: v
            for name, v in model.named_buffers()
            if v.is_floating_point() and name in model.state_dict()
        },
        sample_dtype=dtype,
        sample_limit=smallest_table(training),
    )
    check_faithful(model, captured)
    return captured


def check_output(output: object, batch: object) -> None:
    """Raise ModelError unless the model's `output` is one tensor (batch, classes)."""
    came = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    rule = f"The model's output is {came}; it must be one tensor of shape (batch, classes)."
    if not isinstance(output, Tensor) or output.dim() != 2 or not output.is_floating_point():
        raise ModelError(rule)
    rows, classes = output.shape
    if not (isinstance(rows, torch.SymInt) and bool(rows == batch)) or not isinstance(classes, int):
        raise ModelError(rule)


def check_faithful(model: nn.Module, captured: Captured) -> None:
    """Raise ModelError where what was recorded computes or trains otherwise than `model` does.

    Recording follows operators: it does not see what happens outside of them, such as a backward
    pass of the user's own.
    """
    for training, graph in ((True, captured.training), (False, captured.inference)):
        own = copy.deepcopy(model).train(training)
        generator = torch.Generator().manual_seed(0)
        shape = (MINIMUM_BATCH + 1, *captured.sample_shape)
        if captured.sample_dtype == "int64":
            x = torch.randint(captured.sample_limit or SAFE_LIMIT, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator)
        tensors = {n: v.detach().clone() for n, v in captured.tensors.items()}
        leaves = {n: tensors[n].requires_grad_() for n in captured.parameters}
        came = functional_call(graph, tensors, (x,))
        came = came[0] if isinstance(came, tuple | list) else came
        parameters = dict(own.named_parameters())
        pairs = [(came, own(x), "computes something else")]
        weight = torch.randn(came.shape, generator=generator)
        if training:
            theirs = gradients(pairs[0][1], weight, [parameters[n] for n in leaves])
            pairs.append((gradients(came, weight, leaves.values()), theirs, "trains otherwise"))
        for ours, expected, what in pairs:
            if not float((ours - expected).norm()) <= FAITHFUL * (float(expected.norm()) + 1e-6):
                raise ModelError(
                    f"The model, recorded, {what} than it does by itself: hooks, in-place writes, "
                    "an embedding's max_norm or a backward pass of its own cannot be exported."
                )


def gradients(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> Tensor:
    """Gradients of (output * weight).sum() in one row; zeros where there is none."""
    leaves = list(leaves)
    found = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return torch.cat([(torch.zeros_like(v) if g is None else g).flatten() for g, v in pairs])


def check_parameters(model: nn.Module) -> None:
    """Raise ModelError for parameters that no family can split or train."""
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED) and module.weight is None:
            raise ModelError(f"{name!r} has no weight: its `weight` is None.")
    owners: dict[int, str] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if isinstance(value, UninitializedParameter):
            raise ModelError(
                f"{name!r} has no shape yet: its module is lazy. Run the model once on a batch."
            )
        if id(value) in owners:
            raise ModelError(
                f"{name!r} and {owners[id(value)]!r} share one weight; shared weights cannot be "
                "split yet. Give each module its own."
            )
        owners[id(value)] = name
        if value.dtype != torch.float32:
            raise ModelError(f"{name!r} is {value.dtype}; parameters must be float32.")
        if name.endswith("+"):
            raise ModelError(f"{name!r} ends in '+', which graphs use for new values; rename it.")
        if value.numel() == 0:
            raise ModelError(f"{name!r} has shape {tuple(value.shape)}, which holds no numbers.")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{name!r} is no tensor; a weights file cannot keep extra state.")
        if value.is_floating_point() and value.dtype != torch.float32:
            raise ModelError(f"{name!r} is {value.dtype}; buffers must be float32.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ModelError(f"{name!r} holds a number that is not finite.")
    if not owners:
        raise ModelError("The model has no parameters, so there is nothing to train.")
    if not any(value.requires_grad for value in model.parameters()):
        raise ModelError(
            "All parameters of the model are frozen (requires_grad=False), so there is nothing to "
            "train."
        )


def check_deterministic(graph: GraphModule) -> None:
    """Raise ModelError where training draws random numbers, which a device cannot reproduce yet."""
    for node in graph.graph.nodes:
        named = node.op == "call_function" and any(word in str(node.target) for word in RANDOM)
        place = DROPS.get(node.target, len(node.args))
        if named or (place < len(node.args) and node.args[place] > 0):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            where = f" in {stack[-1][0]!r}" if stack else ""
            raise ModelError(
                f"The model draws random numbers when it trains ({node.target}{where}); set "
                "dropout to 0."
            )


def check_writes(graph: GraphModule) -> None:
    """Raise ModelError where the model changes a parameter or buffer, batch norms apart."""
    for node in graph.graph.nodes:
        written = node.args[0] if writes_in_place(node) else None
        while isinstance(written, Node) and any(word in str(written.target) for word in VIEWS):
            written = written.args[0]
        if isinstance(written, Node) and written.op == "get_attr":
            raise ModelError(
                f"The model changes its own tensor {str(written.target)!r} as it runs "
                f"({node.target}); only batch norms may."
            )


def record_either_way(model: nn.Module, sample_shape: tuple[int, ...]) -> tuple[GraphModule, Dtype]:
    """The training graph, and the type of the samples that it takes."""
    try:
        return record(model, sample_shape, "float32", training=True), "float32"
    except ModelError:
        if not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules()):
            raise
    return record(model, sample_shape, "int64", training=True), "int64"


def record(
    model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype, training: bool
) -> GraphModule:
    """ATen graph of `model` in one mode, over any batch of at least two samples."""
    try:
        twin = copy.deepcopy(model)
    except RuntimeError as error:
        raise ModelError(
            "The model cannot be copied, as where torch.nn.utils.weight_norm is used (take "
            f"torch.nn.utils.parametrizations.weight_norm): {error}"
        ) from error
    return recorded(twin.train(training), sample_shape, dtype)


def recorded(model: nn.Module, sample_shape: tuple[int, ...], dtype: Dtype) -> GraphModule:
    """ATen graph of `model` in the mode it is in. Raises ModelError where it has none."""
    batch = torch.export.Dim("batch", min=MINIMUM_BATCH)
    example = torch.zeros(MINIMUM_BATCH + 1, *sample_shape, dtype=DTYPES[dtype])
    # What torch logs on the way to an exception, the exception says too.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), lstm_shapes_only():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                model, (example,), dynamic_shapes=({0: batch},), strict=False
            )
    except Exception as error:  # torch raises whatever the model's own code raises
        reason = str(error).strip().split("\n")[0]
        kind = "whole-number " if dtype == "int64" else ""
        raise ModelError(
            f"The model cannot be recorded for {kind}samples of shape {sample_shape}: {reason}"
        ) from error
    graph = program.module()
    assert isinstance(graph, GraphModule)
    return tidy(graph)


def tidy(graph: GraphModule) -> GraphModule:
    """Drop input guards and batch counters, which are no part of the model's function.

    Zeros that recurrent layers start from get their weights' type, so that float64 runs too.
    """
    for node in reversed(list(graph.graph.nodes)):
        if node.target in RECURRENT:
            retype_zeros(graph, node)
        if node.target is aten.dropout.default and node.args[1] == 0:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        guard = node.op == "call_module" and node.target == "_guards_fn"
        counter = is_counter(graph, node)
        if guard or counter:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.recompile()
    return graph


def retype_zeros(graph: GraphModule, recurrent: Node) -> None:
    """Let zero states of the layer `recurrent` follow its weights' type instead of float32."""
    states, weights = recurrent.args[1:3]
    for zeros in states if isinstance(states, list | tuple) else [states]:
        if isinstance(zeros, Node) and zeros.target is aten.zeros.default:
            with graph.graph.inserting_before(zeros):
                twin = graph.graph.call_function(
                    aten.new_zeros.default,
                    (weights[0], zeros.args[0]),  # type: ignore[index]
                )
            twin.meta = dict(zeros.meta)
            zeros.replace_all_uses_with(twin)


def is_impure(node: Node) -> bool:
    """Whether `node` must stay although nothing reads it: ports, and in-place updates."""
    if node.op in ("placeholder", "output"):
        return True
    return node.target is aten.batch_norm.default or writes_in_place(node)


def is_counter(graph: GraphModule, node: Node) -> bool:
    """Whether `node` counts a batch, in an integer buffer or after another count in it."""
    if node.target is not aten.add_.Tensor:
        return False
    counted = node.args[0]
    return is_integer_attribute(graph, counted) or (
        isinstance(counted, Node) and is_counter(graph, counted)
    )


def writes_in_place(node: Node) -> bool:
    """Whether `node` changes one of its inputs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


def is_integer_attribute(graph: GraphModule, node: object) -> bool:
    """Whether `node` reads an integer buffer of the model."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return False
    return not attribute(graph, str(node.target)).is_floating_point()


def attribute(graph: GraphModule, name: str) -> Tensor:
    """The tensor that a `get_attr` node called `name` reads."""
    value: object = graph
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def output_node(graph: GraphModule) -> Node:
    """The node whose value the graph returns."""
    (returned,) = graph.graph.find_nodes(op="output")
    value = returned.args[0]
    node = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
    if not isinstance(node, Node):
        raise ModelError("The model returns several values; it must return one tensor.")
    return node


def input_node(graph: GraphModule) -> Node:
    """The node that stands for the batch of samples."""
    nodes = graph.graph.find_nodes(op="placeholder")
    if len(nodes) != 1:
        raise ModelError(f"The model takes {len(nodes)} inputs; it must take one tensor.")
    node = nodes[0]
    assert isinstance(node, Node)
    return node


def smallest_table(graph: GraphModule) -> int | None:
    """Rows of the smallest embedding that the samples index as they are, None without one."""
    raw = {input_node(graph)}
    rows = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not raw & set(node.all_input_nodes):
            continue
        if node.target is aten.embedding.default and node.args[1] in raw:
            rows.append(int(node.args[0].meta["val"].shape[0]))
        if any(f"aten.{word}." in str(node.target) for word in RESHAPING):
            raw.add(node)
    return min(rows, default=None)


def attributes_read(graph: GraphModule) -> Iterator[str]:
    """Names of the parameters and buffers that `graph` reads, in order of first use."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    readers = graph.graph.find_nodes(op="get_attr")
    first = sorted(
        readers, key=lambda node: min((order[u] for u in node.users), default=len(order))
    )
    seen: set[str] = set()
    for node in first:
        if node.users and str(node.target) not in seen:
            seen.add(str(node.target))
            yield str(node.target)
