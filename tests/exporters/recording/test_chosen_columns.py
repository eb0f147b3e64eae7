"""Indices that are tensors with a single integer; the lines that refusals name."""

import numpy as np
import torch
from torch import Tensor, nn

from exporters.recording.capture import capture
from refusals import refused


class Chosen(nn.Module):
    """Columns that a tensor chooses, as in Autoformer, also from the end and before slices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        best = torch.topk(h.detach().mean(0), 2)[1]
        columns = torch.stack([h[:, best[k]] for k in range(2)], -1)
        table = h.unsqueeze(-1) * h.unsqueeze(1)
        return torch.cat([columns, table[:, best[0] - 5, 1:3]], -1)


def test_a_tensor_may_choose_a_column() -> None:
    capture(Chosen(), (6,))  # compares outputs and gradients


def chosen_rows(x: Tensor) -> Tensor:
    """A helper of a model."""
    rows = x[x[:, 0] > 0]
    return rows.sum(0) + x


class Helped(nn.Module):
    """Its size depends on values in a function that `forward` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return chosen_rows(self.layer(x))


def test_the_line_is_that_of_the_innermost_function() -> None:
    with refused("model.data-dependent-size", "rows = x[x[:, 0] > 0])"):
        capture(Helped(), (6,))


class Tiled(nn.Module):
    """Its positions come from numpy, which needs the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        places = np.linspace(0, 1, x.shape[0])
        return self.layer(torch.as_tensor(places).long()) * x[:, :1]


def test_the_line_is_that_of_the_model_and_not_of_numpy() -> None:
    with refused("model.fixed-batch") as caught:
        capture(Tiled(), (6,))
    assert "(tests/exporters/recording/test_chosen_columns.py, line " in str(caught.value)
    assert "places = np.linspace" in str(caught.value)
