"""The training steps that `bench_step.py` times, each as a bundle and as plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from mobilenet import MobileNet
from torch import Tensor, nn

import edgetailor
from exporters.programs.training.training_signatures import Penalty
from exporters.recording.capture import capture
from toolkit import models
from toolkit.families.low_rank import FAMILY as LOW_RANK
from toolkit.submodels.global_model import from_model
from toolkit.submodels.rewritten_model import Rewritten
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel

BATCH = 32
RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """One submodel of one of the papers' models.

    `tail` is what PyTorch trains of it; samples of `shape` are what the trained part takes.
    """

    model: Callable[[], nn.Module]
    spec: str
    sample_shape: tuple[int, ...]
    tail: Callable[[nn.Module], Rewritten]
    shape: tuple[int, ...]
    classes: int = 10
    words: int = 0
    momentum: float = MOMENTUM
    batch: int = BATCH

    def submodel(self) -> Submodel:
        training = edgetailor.TrainingConfig(
            batch_size=self.batch, learning_rate=RATE, momentum=self.momentum
        )
        return edgetailor.split(self.model(), self.spec, self.sample_shape, training)

    def problem(self) -> tuple[nn.Module, Tensor, Tensor]:
        """A global model, samples and labels, the same in every process."""
        torch.manual_seed(0)
        model = self.model()
        if self.words:
            x = torch.randint(self.words, (self.batch, *self.shape))
        else:
            x = torch.randn(self.batch, *self.shape)
        return model, x, torch.randint(self.classes, (self.batch,))

    def trained(self, model: nn.Module) -> Rewritten:
        """What PyTorch trains of `model`, its factors standing for `model`'s weights."""
        rewritten = self.tail(model)
        rewritten.model.load_state_dict(rewritten.factors(from_model(model)), strict=False)
        rewritten.model.train()
        return rewritten


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def whole(model: nn.Module) -> Rewritten:
    return Rewritten(model)


def blocks_from(first: int) -> Callable[[nn.Module], Rewritten]:
    """ResNet-20 from its block `first` on."""

    def tail(model: nn.Module) -> Rewritten:
        blocks = model.get_submodule("blocks")
        assert isinstance(blocks, nn.Sequential)
        rest = (Mean(), model.get_submodule("classifier"))
        return Rewritten(nn.Sequential(blocks[first:], *rest))

    return tail


def factorized(spec: str, shape: tuple[int, ...]) -> Callable[[nn.Module], Rewritten]:
    def tail(model: nn.Module) -> Rewritten:
        return LOW_RANK.rewrite(model, capture(model, shape), parse_spec(spec))

    return tail


class Patches(nn.Module):
    """Patches of 4 x 4 pixels with learned positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(64, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2) + self.places


class MeanOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def vit() -> nn.Module:
    """A small vision transformer: four layers, 128 wide, without dropout."""
    layers = [
        nn.TransformerEncoderLayer(128, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in range(4)
    ]
    return nn.Sequential(Patches(128), *layers, MeanOfTokens(), nn.Linear(128, 10))


IMAGE = (3, 32, 32)
RESNET20 = Case(models.resnet20, "full", IMAGE, whole, IMAGE)
CASES = {
    "resnet20 full": RESNET20,
    "resnet20 moderate": replace(
        RESNET20, spec="slice:blocks.3", tail=blocks_from(3), shape=(16, 32, 32)
    ),
    "resnet20 weak": replace(
        RESNET20, spec="slice:blocks.6", tail=blocks_from(6), shape=(32, 16, 16)
    ),
    "resnet18 low-rank:0.25": Case(
        models.resnet18, "low-rank:0.25", IMAGE, factorized("low-rank:0.25", IMAGE), IMAGE
    ),
    "femnist_cnn full": Case(models.femnist_cnn, "full", (1, 28, 28), whole, (1, 28, 28), 62),
    "mobilenet full": Case(MobileNet, "full", IMAGE, whole, IMAGE),
    "vit full": Case(vit, "full", IMAGE, whole, IMAGE),
    "imdb_bilstm full": Case(models.imdb_bilstm, "full", (256,), whole, (256,), 2, words=10_000),
}
PLAIN = {f"{name}, plain SGD": replace(case, momentum=0.0) for name, case in CASES.items()}
"""The same without momentum, which onnxruntime-training lacks."""


@dataclass(frozen=True)
class Eager:
    """What PyTorch trains, on one batch. A pickle of it can be read by another version of torch."""

    model: nn.Module
    penalty: Penalty | None
    x: Tensor
    y: Tensor
    momentum: float


def eager(case: Case) -> Eager:
    model, x, y = case.problem()
    rewritten = case.trained(model)
    return Eager(rewritten.model, rewritten.penalty, x, y, case.momentum)


def eager_step(given: Eager) -> Callable[[], float]:
    """One training step as PyTorch users write it."""
    model, x, y = given.model, given.x, given.y
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, RATE, given.momentum)
    # torch.compile puts a prefix before the names.
    named = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}

    def step() -> float:
        optimizer.zero_grad()
        logits = model(x)
        if logits.shape[1] == 1:
            loss = F.binary_cross_entropy_with_logits(logits.squeeze(1), y.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits, y)
        if given.penalty is not None:
            (loss + given.penalty(named)).backward()
        else:
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
