"""What a model must be to be recorded, split and trained; refusals name what is in the way."""

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.parameter import UninitializedParameter

from device_agent.formats.manifest import SAFE_LIMIT
from exporters.programs import source_lines
from exporters.programs.dropout import SEEDED, SeededBernoulli
from exporters.programs.recorded_graph import MINIMUM_BATCH, writes_in_place
from exporters.recurrence.recurrent_layers import RECURRENT
from profiles.errors import ModelError

if TYPE_CHECKING:
    from exporters.programs.captured import Captured

aten = torch.ops.aten
FAITHFUL = 1e-3
"""Most that a recorded model may differ from itself, relative to the norm: only rounding does."""
RANDOM = (
    *("rand", "bernoulli", "dropout", "normal_", ".normal.", "uniform", "rrelu", "multinomial"),
    *("exponential", "geometric", "cauchy", "poisson", "binomial"),
)
"""What the names of operators that draw random numbers have in them."""
RULE = "it must be one tensor of shape (batch, classes)."
CONTROL = ("cond", "while_loop", "map_impl", "scan", "associative_scan")
DROPS = dict.fromkeys(RECURRENT, 5)
"""Operators whose own dropout has no seed, and the place of its probability in their arguments."""
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
VIEWS = ("aten.detach", "aten.alias", "aten.view", "aten.slice", "aten.select", "aten.transpose")


def check_parameters(model: nn.Module) -> None:
    """Raise ModelError for parameters that no family can split or train."""
    for name, module in model.named_modules():
        if isinstance(module, WEIGHTED) and module.weight is None:
            raise ModelError(f"{name!r} has no weight: its `weight` is None.")
        check_layer(name, module)
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
        check_name(name)
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


def check_name(name: str) -> None:
    """Raise ModelError for a parameter's name that no graph can have."""
    if name.endswith("+"):
        raise ModelError(f"{name!r} ends in '+', which graphs use for new values; rename it.")
    if set(name) & {'"', "\\"} or not name.isprintable():
        raise ModelError(
            f"{name!r} has a quotation mark, a backslash or a control character in its name, "
            "which no recorded model can have; rename its module."
        )


def check_layer(name: str, module: nn.Module) -> None:
    """Raise ModelError for a layer that can be recorded, if at all, but never exported."""
    if isinstance(module, nn.RNNCellBase):
        kind = type(module).__name__
        raise ModelError(
            f"{name!r} is a {kind}, whose training step cannot be exported; take the layer "
            f"nn.{kind.removesuffix('Cell')}, which goes along the whole sequence."
        )
    if isinstance(module, NORMS) and module.running_mean is not None and module.momentum is None:
        raise ModelError(
            f"{name!r} averages its statistics over all batches so far (momentum=None), which "
            "depends on their number; give it a momentum, like 0.1."
        )


def check_output_type(output: object) -> None:
    """Raise ModelError unless the model's `output` is a float32 tensor."""
    if not isinstance(output, Tensor):
        raise ModelError(f"The model's output is a {type(output).__name__}; {RULE}")
    if output.dtype != torch.float32:
        raise ModelError(f"The model's output is {output.dtype}; it must be float32.")


def check_output(output: object, batch: object) -> None:
    """Raise ModelError unless the model's `output` is one float32 tensor (batch, classes)."""
    check_output_type(output)
    assert isinstance(output, Tensor)
    rule = f"The model's output is {named_batch(str(tuple(output.shape)))}; {RULE}"
    if output.dim() != 2:
        raise ModelError(rule)
    rows, classes = output.shape
    # Expressions are compared: asking whether the numbers are equal needs the numbers.
    same = (
        isinstance(rows, torch.SymInt)
        and isinstance(batch, torch.SymInt)
        and rows.node.expr == batch.node.expr
    )
    if not same or not isinstance(classes, int):
        raise ModelError(rule)


def named_batch(words: str) -> str:
    """`words` of torch's with `batch` in place of the symbol that it has for it, like s77."""
    return re.sub(r"\bs\d+\b", "batch", words)


def check_sizes(graph: GraphModule) -> None:
    """Raise ModelError where a size depends on anything but the batch."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        if any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes):
            raise ModelError(
                f"The size of {node.target}{source_lines.of_node(node)} depends on the numbers "
                "that flow through the model; only the batch may vary. Mask with torch.where "
                "instead of selecting."
            )


def check_kinds(graph: GraphModule) -> None:
    """Raise ModelError for complex numbers and for branches and loops that are operators."""
    for node in graph.graph.nodes:
        value, place = node.meta.get("val"), source_lines.of_node(node)
        if isinstance(value, Tensor) and value.is_complex():
            raise ModelError(
                f"The model computes with complex numbers ({node.target}){place}, which cannot be "
                "exported; compute with real and imaginary parts, each a tensor."
            )
        if isinstance(node.target, HigherOrderOperator) and str(node.target) in CONTROL:
            raise ModelError(
                f"The model branches or loops by torch's {node.target}{place}, which cannot "
                "be exported; compute all branches and choose with torch.where."
            )


def check_deterministic(graph: GraphModule) -> None:
    """Raise ModelError where training draws random numbers other than those of a plain dropout."""
    for node in graph.graph.nodes:
        if node.target in SEEDED:
            continue
        named = node.op == "call_function" and any(word in str(node.target) for word in RANDOM)
        place = DROPS.get(node.target, len(node.args))
        if named or (place < len(node.args) and node.args[place] > 0):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            where = f" in {stack[-1][0]!r}" if stack and stack[-1][0] else ""
            line = source_lines.line_of(node)
            drops = "dropout" in str(node.target) or node.target in DROPS
            remedy = "set dropout to 0" if drops else "leave it out, or take a dropout"
            raise ModelError(
                f"The model draws random numbers when it trains ({node.target}{where}"
                f"{line and f', {line}'}), which only nn.Dropout, nn.Dropout1d to 3d and attention "
                f"may; {remedy}."
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


def check_faithful(model: nn.Module, captured: "Captured") -> None:
    """Raise ModelError where what was recorded computes or trains otherwise than `model` does.

    Recording follows operators: it does not see what happens outside of them, such as a backward
    pass of the user's own.
    """
    for training, graph in ((True, captured.training), (False, captured.inference)):
        own = copy.deepcopy(model).train(training)
        generator = torch.Generator().manual_seed(0)
        x = random_samples(captured, generator)
        tensors = {n: v.detach().clone() for n, v in captured.tensors.items()}
        leaves = {n: tensors[n].requires_grad_() for n in captured.parameters}
        expected = output_of(own, x)
        with SeededBernoulli(0):
            came = functional_call(graph, tensors, (x,))
        came = came[0] if isinstance(came, tuple | list) else came
        parameters = dict(own.named_parameters())
        pairs = [(came, expected, "computes something else")]
        weight = torch.randn(came.shape, generator=generator)
        if training:
            theirs = trained(expected, weight, [parameters[n] for n in leaves])
            pairs.append((gradients(came, weight, leaves.values()), theirs, "trains otherwise"))
        for ours, expected, what in pairs:
            apart, size = (float(v.detach().norm()) for v in (ours - expected, expected))
            if not apart <= FAITHFUL * (size + 1e-6):
                raise ModelError(
                    f"The model, recorded, {what} than it does by itself: hooks, in-place writes, "
                    "an embedding's max_norm or a backward pass of its own cannot be exported."
                )


def random_samples(captured: "Captured", generator: torch.Generator) -> Tensor:
    """A batch of what the recorded model takes."""
    shape = (MINIMUM_BATCH + 1, *captured.sample_shape)
    if captured.sample_dtype == "int64":
        return torch.randint(captured.sample_limit or SAFE_LIMIT, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def output_of(model: nn.Module, x: Tensor) -> Tensor:
    """What `model` itself says to `x`. Raises ModelError where that is no tensor of numbers."""
    try:
        with SeededBernoulli(0):
            output = model(x)
    except Exception as error:  # the user's code may raise anything
        raise ModelError(
            f"The model fails on a batch of random samples: {source_lines.first_line(error)}"
            f"{source_lines.of_error(error)}"
        ) from error
    check_output_type(output)
    assert isinstance(output, Tensor)
    check_finite(output, "output")
    return output


def trained(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> Tensor:
    """The model's own `gradients`. Raises ModelError where PyTorch has none, or no finite ones."""
    try:
        found = gradients(output, weight, leaves)
    except RuntimeError as error:
        raise ModelError(
            f"PyTorch itself cannot train the model: {source_lines.first_line(error)}. Run "
            "loss.backward() on a batch to see where."
        ) from error
    check_finite(found, "gradient")
    return found


def check_finite(values: Tensor, what: str) -> None:
    """Raise ModelError where the model's own `values` are nan or infinite."""
    if not torch.isfinite(values).all():
        raise ModelError(
            f"The model's {what} on a batch of random samples holds a number that is not finite, "
            "as a root or a logarithm of a negative number does; it must be finite for any samples."
        )


def gradients(output: Tensor, weight: Tensor, leaves: Iterable[Tensor]) -> Tensor:
    """Gradients of (output * weight).sum() in one row; zeros where there is none."""
    leaves = list(leaves)
    found = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return torch.cat([(torch.zeros_like(v) if g is None else g).flatten() for g, v in pairs])
