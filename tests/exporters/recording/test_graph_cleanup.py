"""What recording removes from a graph: the results stay those of the model."""

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule

from exporters.recording.capture import capture
from exporters.recording.graph_constants import fold_double_constants

aten = torch.ops.aten


class Cached(nn.Linear):
    """Keys are appended to an empty cache, as language models do, and types are converted."""

    def forward(self, input: Tensor) -> Tensor:
        keys = super().forward(input).unsqueeze(1)
        keys = torch.cat([torch.tensor([]), keys, 2 * keys], 1)
        return torch.cat([torch.tensor([]), keys.to(torch.float32)], 1).mean(1)


def test_empty_tensors_and_checks_of_types(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Cached(4, 3), torch.randn(5, 4)
    captured = capture(model, (4,))
    for graph in (captured.training, captured.inference):
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count(aten.cat.default) == 1
        assert aten._assert_tensor_metadata.default not in targets
        came = graph(x)
        torch.testing.assert_close(came, model(x))


class Regions(nn.Linear):
    """A table made without gradients, a product in float32 whatever the user's autocast says."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.weight.abs().sum(1)
            scale = scale.clone().clamp_(0.5, 2.0)
        hidden = super().forward(input) * scale
        with torch.autocast("cpu", enabled=False):
            return (hidden - hidden.mean(0, keepdim=True)).tanh()


def test_regions_without_gradients_or_autocast(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Regions(4, 3), torch.randn(5, 4)
    captured = capture(model, (4,))
    gradients = []
    for function in (model, captured.training):
        leaves = list(function.parameters())
        output = function(x)
        output = output if isinstance(output, Tensor) else output[0]
        gradients.append(
            dict(
                zip(
                    ("weight", "bias"),
                    torch.autograd.grad(output.square().sum(), leaves),
                    strict=True,
                )
            )
        )
    targets = [node.target for node in captured.training.graph.nodes]
    assert not [target for target in targets if isinstance(target, HigherOrderOperator)]
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)


def test_a_deep_graph_that_selects_is_cleaned_up_in_one_pass() -> None:
    """Each of 600 blocks reads the one before twice: 2 to the power of 600 paths to the samples."""
    graph, root = Graph(), nn.Module()
    root.register_buffer("chosen", torch.tensor([0, 2]))
    x = graph.placeholder("x")
    for _ in range(600):
        tanh = graph.call_function(aten.tanh.default, (x,))
        x = graph.call_function(aten.add.Tensor, (tanh, x))
    selected = graph.call_function(aten.index.Tensor, (x, [None, graph.get_attr("chosen")]))
    graph.output(selected)
    module, count = GraphModule(root, graph), len(graph.nodes)
    fold_double_constants(module)
    assert len(module.graph.nodes) == count


class Drawing(nn.Linear):
    """Multiplies by a random number that Python code reads."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.rand(1).item()


def test_a_random_number_does_not_become_a_constant() -> None:
    assert "aten.rand.default" in str(capture(Drawing(4, 3), (4,)).training.graph)


class Sized(nn.Linear):
    """Computes with a number of a constant that an operator makes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * torch.full((1,), torch.arange(4)[2].item())


def test_a_number_of_a_constant_becomes_a_constant() -> None:
    captured = capture(Sized(4, 3), (4,))
    assert not captured.training.graph.find_nodes(op="call_function", target=aten.item.default)
