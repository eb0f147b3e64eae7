"""What recording removes from a graph: the results stay those of the model."""

import torch
from torch import Tensor, nn

from exporters.programs.capture import capture

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
        found = graph(x)
        torch.testing.assert_close(found, model(x))
