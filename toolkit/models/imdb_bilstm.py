"""EmbracingFL's bidirectional LSTM for film reviews, with the shapes of its Table 1."""

import torch
from torch import Tensor, nn


class ImdbBiLSTM(nn.Module):
    """Embedding, one bidirectional LSTM, and a dense layer from its last states to one logit.

    In the paper's framework an LSTM has one bias for each direction. PyTorch adds two biases, so
    the second is set to zero and not trained. The paper's dropout is left out.
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
    """One logit for two classes, 10,000 words, 256 words a review: 3,611,137 trained parameters."""
    return ImdbBiLSTM()
