"""EmbracingFL's bidirectional LSTM for film reviews, in the shape of its Table 1."""

import torch
from torch import Tensor, nn


class ImdbBiLSTM(nn.Module):
    """Embedding, one bidirectional LSTM, and a dense layer from its last states to one logit.

    An LSTM of the paper's framework has one bias a direction, PyTorch's two that are added up: the
    second stays zero and is not trained. The paper's dropout is left out.
    """

    def __init__(self, words: int = 10_000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * width, 1)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter.requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        """Word numbers (N, T) int64 -> logits (N, 1)."""
        _, (last, _) = self.lstm(self.embedding(x))
        return self.classifier(torch.cat((last[0], last[1]), 1))  # type: ignore[no-any-return]


def imdb_bilstm() -> ImdbBiLSTM:
    """Two classes by one logit, 10,000 words (256 a review): 3,611,137 trained parameters."""
    return ImdbBiLSTM()
