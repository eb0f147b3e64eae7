"""Sparse matrices of a model, compared with those of PyTorch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from exporters.recording.replacements.function_forms.sparse_matrices import with_sparse_matrices
from refusals import refused

LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "repeated entries": lambda dense: torch.sparse_coo_tensor(
        dense.nonzero().t().repeat(1, 2), dense[dense != 0].repeat(2) / 2, dense.shape
    ),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "@": lambda a, x: a @ x,
    "matmul": torch.matmul,
    "a vector": lambda a, x: a.mv(x[:, 0]),
    "from the left": lambda a, x: x.t()[:, :4] @ a,
    "transposed": lambda a, x: a.t() @ x[:4],
    "dense": lambda a, x: a.to_dense() * x[:, 0],
    "a size": lambda a, x: x * a.size(1) + a.shape[0],
}


class Graph(nn.Module):
    """A matrix (4, 6) that is a buffer or an attribute, and the use of it."""

    def __init__(
        self, links: Tensor, use: Callable[[Tensor, Tensor], Tensor], buffer: bool
    ) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("links", links)
        else:
            self.links = links
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.links, x)


def links(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(4, 6) * (torch.rand(4, 6) < 0.4)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use", USES)
def test_products_are_those_of_the_dense_matrix(
    use: str, layout: str, buffer: bool, seed: int
) -> None:
    dense = links(seed)
    model = with_sparse_matrices(Graph(LAYOUTS[layout](dense), USES[use], buffer))
    x = torch.randn(6, 4)
    expected = USES["@" if use == "sparse.mm" else use](dense, x)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    assert not model.state_dict(), "constants are not trained"


def test_values_that_are_computed_get_gradients(seed: int) -> None:
    """Capture compares a recording with the model, which uses PyTorch's sparse tensors."""

    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]]))
            self.strengths, self.last = nn.Parameter(torch.rand(4)), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            matrix = torch.sparse_coo_tensor(self.edges, self.strengths.exp(), (3, 3)).coalesce()
            nodes = x.permute(1, 0, 2).reshape(3, -1)
            return self.last((matrix @ nodes).reshape(3, -1, 2).mean(0))

    torch.manual_seed(seed)
    captured = capture(Edges(), (3, 2))
    assert captured.output_shape == (3,)


def test_other_functions_are_refused_with_their_line(seed: int) -> None:
    for use in (lambda a, x: torch.sparse.softmax(a, 1), lambda a, x: a.sum(), lambda a, x: a * x):
        model = with_sparse_matrices(Graph(links(seed).to_sparse(), use, True))
        with refused("model.sparse-tensor") as caught:
            model(torch.ones(6, 3))
        assert "test_sparse_matrices.py, line" in str(caught.value)
