"""The models of all fields: how each is built, what its samples are, and which loss trains it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from edgetailor import set_input_range
from field_models import (
    biosignals,
    dynamics,
    experts,
    forecasting,
    generative,
    graphs,
    recommendation,
    sequences,
    speech,
    tables,
    vision,
)

Draw = Callable[[int], Tensor]
"""Draws samples or labels, by their number."""


class FieldModel(NamedTuple):
    """A model, random samples and labels for it, and the loss that trains it.

    With `is_table`, columns of float32 samples are ids, so that the user gives real samples.
    """

    build: Callable[[], nn.Module]
    samples: Draw
    labels: Draw
    loss: str = "cross-entropy"
    is_table: bool = False

    def model(self) -> nn.Module:
        """A new model, with the range of its samples if the user gives one."""
        model = self.build()
        return set_input_range(model, examples=self.samples(64).numpy()) if self.is_table else model

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.samples(1).shape[1:])


def numbers(*shape: int) -> Draw:
    return lambda n: torch.randn(n, *shape)


def whole(limit: int, *shape: int) -> Draw:
    """Whole numbers from 0 to `limit` - 1: classes, tokens or ids."""
    return lambda n: torch.randint(limit, (n, *shape))


def padded(limit: int, length: int, *, left: bool = False) -> Draw:
    """Tokens of sequences of random lengths, with 0 for padding."""

    def draw(n: int) -> Tensor:
        tokens = torch.randint(1, limit, (n, length))
        empty = torch.arange(length) >= torch.randint(1, length + 1, (n, 1))
        return tokens.masked_fill(empty.flip(1) if left else empty, 0)

    return draw


def columns(*draws: Draw) -> Draw:
    """Columns of several kinds in one array; float32 if one of them is."""

    def draw(n: int) -> Tensor:
        parts = [d(n) for d in draws]
        floats = any(part.is_floating_point() for part in parts)
        return torch.cat([part.float() if floats else part for part in parts], dim=1)

    return draw


def ids(*limits: int) -> Draw:
    """A column of ids for each of `limits`."""
    return lambda n: torch.stack([torch.randint(limit, (n,)) for limit in limits], dim=1)


def transcripts(vocab: int, steps: int) -> Draw:
    """Labels of CTC: two to three symbols, then positions that do not count."""

    def draw(n: int) -> Tensor:
        labels = torch.full((n, steps), -100)
        labels[:, :2] = torch.randint(1, vocab, (n, 2))
        return labels

    return draw


def noisy_pictures(n: int) -> Tensor:
    """A picture, and a channel with its time step."""
    steps = torch.randint(1000, (n, 1, 1, 1)).expand(-1, -1, 8, 8)
    return torch.cat([torch.randn(n, 1, 8, 8), steps.float()], dim=1)


MODELS = {
    # Speech
    "conformer with ctc": FieldModel(
        speech.ConformerCTC, numbers(24, 16), transcripts(8, 6), "ctc"
    ),
    "keywords in raw audio": FieldModel(speech.KeywordSpotter, numbers(320), whole(5)),
    "x-vector": FieldModel(speech.XVector, numbers(12, 20), whole(6)),
    # Biosignals
    "eegnet": FieldModel(biosignals.EEGNet, numbers(6, 64), whole(4)),
    "eegnet with largest norms": FieldModel(biosignals.ConstrainedEEGNet, numbers(6, 64), whole(4)),
    "ecg resnet": FieldModel(biosignals.ECGResNet, numbers(12, 64), whole(5)),
    "tcn": FieldModel(biosignals.TCN, numbers(20, 3), whole(6)),
    "sleep stages": FieldModel(biosignals.SleepStager, numbers(4, 64), whole(5, 4)),
    # Forecasting
    "n-beats": FieldModel(forecasting.NBeats, numbers(24), numbers(6), "mse"),
    "dlinear": FieldModel(forecasting.DLinear, numbers(24, 3), numbers(8, 3), "mse"),
    "informer": FieldModel(forecasting.Informer, numbers(16, 3), numbers(4, 3), "mse"),
    "lstm seq2seq": FieldModel(forecasting.Seq2Seq, numbers(10, 2), numbers(4, 2), "mse"),
    "lstm cell in a loop": FieldModel(forecasting.DeepAR, numbers(8), numbers(3), "mse"),
    "patchtst": FieldModel(forecasting.PatchTST, numbers(24, 3), numbers(6, 3), "mse"),
    # Recommendation
    "collaborative filtering": FieldModel(
        recommendation.NCF, ids(20, 30), whole(2), "binary-cross-entropy"
    ),
    "two towers": FieldModel(recommendation.TwoTower, padded(40, 9), whole(4)),
    "deepfm": FieldModel(
        recommendation.DeepFM, ids(10, 7, 5, 12), whole(2), "binary-cross-entropy"
    ),
    "dlrm": FieldModel(
        recommendation.DLRM,
        columns(numbers(4), ids(8, 5, 11)),
        whole(2),
        "binary-cross-entropy",
        is_table=True,
    ),
    "sasrec": FieldModel(recommendation.SASRec, padded(31, 8, left=True), whole(31)),
    # Tables
    "tabtransformer": FieldModel(
        tables.TabTransformer, columns(ids(4, 3, 6), numbers(3)), whole(2), is_table=True
    ),
    "entity embeddings": FieldModel(
        tables.EntityEmbeddings, columns(numbers(4), ids(7, 12, 31)), numbers(), "mse"
    ),
    "soft oblivious trees": FieldModel(tables.NODE, numbers(8), whole(3)),
    "tabnet": FieldModel(tables.TabNet, numbers(10), whole(3)),
    # Graphs
    "gcn": FieldModel(graphs.GCN, numbers(7, 12), whole(3)),
    "gat": FieldModel(graphs.GAT, numbers(7, 4), whole(3, 7)),
    "message passing": FieldModel(graphs.MPNN, numbers(7, 4), whole(3)),
    "graphsage": FieldModel(graphs.GraphSAGE, numbers(7, 4), whole(3)),
    # Vision
    "yolo head": FieldModel(vision.TinyYolo, numbers(3, 16, 16), numbers(32, 8), "mse"),
    "ssd": FieldModel(vision.SSD, numbers(3, 16, 16), numbers(40, 8), "mse"),
    "centernet": FieldModel(vision.CenterNet, numbers(3, 16, 16), numbers(6, 4, 4), "mse"),
    "unet": FieldModel(vision.UNet, numbers(3, 14, 14), whole(3, 14, 14)),
    "deeplab": FieldModel(vision.DeepLab, numbers(3, 16, 16), whole(3, 16, 16)),
    "mlp-mixer": FieldModel(vision.MLPMixer, numbers(3, 12, 12), whole(5)),
    # Generative
    "variational autoencoder": FieldModel(generative.VAE, numbers(16), numbers(16), "mse"),
    "autoencoder with unpooling": FieldModel(
        generative.PoolingAutoencoder, numbers(1, 10, 10), numbers(1, 10, 10), "mse"
    ),
    "diffusion denoiser": FieldModel(generative.Denoiser, noisy_pictures, numbers(1, 8, 8), "mse"),
    "gpt": FieldModel(generative.GPT, whole(24, 10), whole(24, 10)),
    # Experts
    "soft mixture of experts": FieldModel(experts.SoftMoE, numbers(5, 6), whole(4)),
    "top-k mixture of experts": FieldModel(experts.TopKMoE, numbers(5, 6), whole(4)),
    "hypernetwork": FieldModel(experts.Hypernetwork, numbers(10), numbers(1), "mse"),
    "capsules": FieldModel(experts.CapsuleNet, numbers(1, 12, 12), whole(4)),
    "kan": FieldModel(experts.KAN, numbers(5), whole(3)),
    # Dynamics
    "spiking": FieldModel(dynamics.SpikingNet, numbers(8, 6), whole(3)),
    "deep equilibrium": FieldModel(dynamics.DEQ, numbers(6), whole(3)),
    "neural ode": FieldModel(dynamics.NeuralODE, numbers(5), whole(3)),
    # Sets, pairs, sequences
    "deep sets": FieldModel(sequences.DeepSets, numbers(9, 3), whole(4)),
    "set transformer": FieldModel(sequences.SetTransformer, numbers(9, 3), whole(4)),
    "siamese": FieldModel(sequences.Siamese, numbers(2, 12, 12), whole(2), "binary-cross-entropy"),
    "padding mask": FieldModel(sequences.TextClassifier, padded(30, 10), whole(4)),
    "translation": FieldModel(sequences.Translator, whole(20, 11), whole(20, 5)),
    "packed lstm": FieldModel(sequences.PackedLSTM, padded(30, 9), whole(4)),
    "point cloud": FieldModel(sequences.PointNet, numbers(3, 12), whole(4)),
}
