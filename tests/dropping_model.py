"""A test model with every supported kind of dropout."""

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 4


class Dropping(nn.Module):
    """Dropout of elements, of channels and of attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.channels = nn.Dropout2d(0.3)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 12, dropout=0.2, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(torch.tanh(self.conv(x)))
        x = self.layer(x.flatten(2).transpose(1, 2)).mean(1)
        return self.head(functional.dropout(x, 0.5, self.training))


SHAPE = (2, 4, 5)
