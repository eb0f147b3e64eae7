"""Gradients that a model's own code computes by `torch.autograd.grad`, as operators of the graph.

Models of physics, gradient penalties and forces of molecules differentiate an output by an input
and use the result in further computations. `torch.export` does not record the operators of
autograd. Here it records one operator for each call. Afterwards the operators between the call's
inputs and outputs are differentiated one by one, and the results replace the recorded operator. So
the graph can be differentiated once more, for the training step.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch.func import functionalize, vjp
from torch.fx import GraphModule, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.decompositions import table
from exporters.decompositions.decomposition import Decompositions
from exporters.programs import source_lines
from exporters.programs.recorded_graph import is_impure
from exporters.programs.torch_internals import TRACING, lean_tracing
from exporters.recording.functional_form import UNTRACKED
from exporters.recurrence.loop_operator import LIBRARY
from profiles.errors import ModelError

aten = torch.ops.aten
LIBRARY.define("gradients(Tensor[] outputs, Tensor[] inputs, Tensor[] weights) -> Tensor[]")
gradients = torch.ops.edgetailor.gradients.default
torch.library.register_fake(
    "edgetailor::gradients",
    lambda outputs, inputs, weights: [torch.empty_like(value) for value in inputs],
    lib=LIBRARY,
)


@cache
def forms() -> Decompositions:
    """The forms of operators whose derivative is differentiated again.

    Autograd knows no gradient of the means and variances that norms return beside their result.
    """
    norms = (aten.native_layer_norm, aten.native_group_norm, aten._native_batch_norm_legit)
    return {**table(), **get_decompositions(norms)}


def recorded_grad(
    func: Any,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    create_graph: bool = False,
    is_grads_batched: bool = False,
    **others: Any,
) -> tuple[Tensor, ...]:
    """`torch.autograd.grad` as one operator. The gradient of an unused input is zero, not None."""
    if is_grads_batched:
        raise ModelError(
            "The model computes several gradients at once (is_grads_batched){place}, and a "
            "recording cannot follow that. Call torch.autograd.grad once for each of them.",
            code="model.inner-gradient",
            place=source_lines.called_place(),
        )
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or [])
    weights = [
        torch.ones_like(output) if weight is None else weight
        for output, weight in zip(outputs, given or [None] * len(outputs), strict=True)
    ]
    found = gradients(list(outputs), list(inputs), weights)
    return tuple(found if create_graph else (value.detach() for value in found))


def no_backward(func: Any, *args: Any, **kwargs: Any) -> None:
    """Raise ModelError: the results of `backward` in `grad` are not part of a graph."""
    raise ModelError(
        "The model calls backward(){place}, which a recording cannot follow. Call "
        "torch.autograd.grad(output, inputs, create_graph=True), which returns the gradients.",
        code="model.inner-gradient",
        place=source_lines.called_place(),
    )


GRADIENTS: dict[Any, Any] = {
    torch.autograd.grad: recorded_grad,
    torch.autograd.backward: no_backward,
    Tensor.backward: no_backward,
}
"""Functions of autograd that are recorded in another form, with these forms."""


def compute_gradients(module: GraphModule) -> None:
    """Replace each recorded call of `torch.autograd.grad` in `module` by the operators of autograd.

    Raises ModelError if a gradient is one of random numbers or of statistics.
    """
    calls = module.graph.find_nodes(op="call_function", target=gradients)
    for call in calls:
        InnerGradient(module, call).replace()
    if calls:
        module.graph.eliminate_dead_code(is_impure_node=is_impure)
        module.recompile()


class InnerGradient:
    """One recorded call of `torch.autograd.grad`."""

    def __init__(self, module: GraphModule, call: Node) -> None:
        self._module, self._call = module, call
        self._outputs, self._inputs, self._weights = cast(tuple[list[Node], ...], call.args)
        # For each node, the gradients of its results: several parts of one gradient are added.
        self._gradients: dict[Node, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))

    def replace(self) -> None:
        """Compute the gradients in the graph, in place of the call."""
        for output, weight in zip(self._outputs, self._weights, strict=True):
            self._gradients[output][0].append(weight)
        depending = self._depending()
        with self._module.graph.inserting_before(self._call):
            for node in reversed(depending):
                self._go_back(node, {*depending, *self._inputs})
            zeros = aten.zeros_like.default
            found = [self._total(node, 0) or self._add(zeros, node) for node in self._inputs]
        for user in list(self._call.users):  # each takes one of the gradients
            user.replace_all_uses_with(found[cast(int, user.args[1])])
            self._module.graph.erase_node(user)
        self._module.graph.erase_node(self._call)

    def _depending(self) -> list[Node]:
        """The nodes before the call that depend on the inputs with a gradient, in order."""
        known, found = set(self._inputs), list[Node]()
        for node in self._module.graph.nodes:
            if node is self._call:
                break
            stops = node.target is aten.detach.default or node.meta.get(UNTRACKED)
            if not stops and known.intersection(node.all_input_nodes):
                known.add(node)
                found.append(node)
        return found

    def _go_back(self, node: Node, depending: set[Node]) -> None:
        """Compute the gradients of the inputs of `node` from those of its results, if any."""
        totals = {n: total for n in self._gradients[node] if (total := self._total(node, n))}
        if not totals:
            return
        if node.target is operator.getitem:
            source, number = cast(tuple[Node, int], node.args)
            self._gradients[source][number].append(totals[0])
            return
        self._check(node)
        read = node.all_input_nodes
        wanted = [n for n, value in enumerate(read) if value in depending and is_real(value)]
        graph = self._derivative(node, wanted, totals)
        results = self._inline(graph, node, [*read, *totals.values()])
        for n, result in zip(wanted, results, strict=True):
            self._gradients[read[n]][0].append(result)

    def _derivative(
        self, node: Node, wanted: Sequence[int], totals: Mapping[int, Node]
    ) -> GraphModule:
        """The gradients of some of the values that `node` reads, as a graph of these values."""
        read = node.all_input_nodes

        def derivative(*flat: Any) -> tuple[Tensor, ...]:
            def run(*some: Tensor) -> tuple[Tensor, ...]:
                values = dict(zip(read, flat, strict=False))
                values |= {read[n]: value for n, value in zip(wanted, some, strict=True)}
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                result = node.target(*args, **kwargs)  # type: ignore[operator]
                return tuple(
                    (result,)[n] if isinstance(result, Tensor) else result[n] for n in totals
                )

            return vjp(run, *(flat[n] for n in wanted))[1](flat[len(read) :])  # type: ignore[no-any-return]

        values = [value.meta["val"] for value in (*read, *totals.values())]
        with self._mode, enable_python_dispatcher(), lean_tracing():
            made = make_fx(functionalize(derivative), decomposition_table=forms(), **TRACING)
            return made(*values)

    def _inline(self, graph: GraphModule, node: Node, values: Sequence[Node]) -> list[Node]:
        """Copy `graph` into the module's, with `values` as its inputs; the copies of its results.

        A value that `node` itself computes is not computed again.
        """
        placeholders = graph.graph.find_nodes(op="placeholder")
        copies = dict(zip(placeholders, values, strict=True))
        for part in graph.graph.nodes:
            if part.op in ("placeholder", "output"):
                continue
            copied = self._module.graph.node_copy(part, copies.__getitem__)
            copied.meta = {**self._call.meta, "val": part.meta["val"]}
            same = copied.target is node.target and copied.args == node.args
            if same and copied.kwargs == node.kwargs:
                self._module.graph.erase_node(copied)
                copied = node
            copies[part] = copied
        results = cast(list[Node], graph.graph.output_node().args[0])
        return [copies[result] for result in results]

    def _check(self, node: Node) -> None:
        """Raise ModelError if the results of `node` differ from call to call."""
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random or is_impure(node):
            raise ModelError(
                "The model computes a gradient by torch.autograd.grad{place} through {what}, and a "
                "recording cannot follow that. Differentiate a part without {without}.",
                code="model.inner-gradient",
                place=source_lines.place_of_node(self._call),
                what="random numbers" if random else "the statistics of a batch norm",
                without="dropout and other random numbers" if random else "batch norms in training",
            )

    def _total(self, node: Node, number: int) -> Node | None:
        """The gradient of a result of `node`; None if there is none."""
        parts = self._gradients[node][number]
        while len(parts) > 1:
            parts.append(self._add(aten.add.Tensor, parts.pop(), parts.pop()))
        return parts[0] if parts else None

    def _add(self, target: Any, *args: Node) -> Node:
        """A new node in the graph, with the shape of its result."""
        node = self._module.graph.call_function(target, args)
        with self._mode:
            value = target(*(read.meta["val"] for read in args))
        node.meta = {**self._call.meta, "val": value}
        return node

    @property
    def _mode(self) -> Any:
        return self._inputs[0].meta["val"].fake_mode


def is_real(node: Node) -> bool:
    """Whether the value of `node` is a tensor that can have a gradient."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
