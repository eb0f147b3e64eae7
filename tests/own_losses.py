"""Models of several outputs, and losses as users write them: `own_losses:detection` and others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import edgetailor as et

CLASSES, CUTS = 3, (0.1, 0.5, 0.9)


class Boxes(nn.Module):
    """A class and a box for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 12)
        self.kind, self.box = nn.Linear(12, CLASSES), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x).tanh()
        return {"kind": self.kind(hidden), "box": self.box(hidden)}


class Unused(nn.Sequential):
    """The last layer does not reach the output, as in the last block of N-BEATS."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6), nn.Linear(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self[2](self[1](self[0](x)))
        return out


class OwnLoss(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return (out - x).square().mean()


class Pair(Boxes):
    """A class and one number, as a tuple."""

    def forward(self, x: Tensor) -> Any:
        both = super().forward(x)
        return both["kind"], both["box"][:, :1]


class Points(nn.Module):
    """A class at each point."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


class Twins(nn.Module):
    """The embeddings of three samples: an anchor, one like it and another."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.embedding = nn.Linear(6, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.embedding(self.hidden(x[:, i]).tanh()) for i in range(3)]


class Forecast(nn.Module):
    """Quantiles of the next four values of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.quantiles = nn.Linear(8, 16), nn.Linear(16, 4 * len(CUTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.quantiles(self.hidden(x).tanh())
        return out.reshape(-1, 4, len(CUTS))


class Kind(nn.Linear):
    """A class, in a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return {"head": {"kind": super().forward(x)}}


class Speech(nn.Module):
    """Scores (steps, batch, classes), as recurrent layers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.scores = nn.GRU(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.rnn(x.transpose(0, 1))[0])
        return scores


class Coder(nn.Module):
    """An autoencoder, which returns what it got, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.restored = nn.Linear(6, 3), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"restored": self.restored(self.encoder(x).tanh()), "given": x}


@et.loss()
def restored(outputs: Any, labels: None) -> Tensor:
    """Reads no labels."""
    return (outputs["restored"] - outputs["given"]).square().mean(1)


@et.loss(et.classes(4, 3))
def spoken(scores: Tensor, labels: Tensor) -> Tensor:
    """CTC as in scripts that read text: zeros pad the labels."""
    steps, batch = scores.shape[:2]
    lengths = torch.IntTensor([steps] * batch)
    scores = scores.log_softmax(2)
    total = functional.ctc_loss(
        scores, labels, lengths, (labels > 0).sum(1), reduction="sum", zero_infinity=True
    )
    return total / batch


class Scaled(nn.Module):
    """A parameter with the name of a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@et.loss(box=et.numbers(4), kind=et.classes(CLASSES))
def detection(outputs: Any, labels: Any) -> Any:
    """Smooth L1 of the box and the class's cross-entropy; the mean distance is a metric."""
    far = functional.smooth_l1_loss(outputs["box"], labels["box"], reduction="none").mean(1)
    scores, kind = outputs["kind"].log_softmax(1), labels["kind"]
    wrong = -scores[range(len(kind)), kind]  # cross-entropy, as it is often written
    distance = (outputs["box"] - labels["box"]).abs().mean(1)
    right = (outputs["kind"].argmax(1) == labels["kind"]).to(far.dtype)
    return wrong + 2 * far, {"distance": distance, "right": right}


@et.loss(et.classes(CLASSES))
def only_kind(outputs: Any, labels: Tensor) -> Any:
    """Trains one of two outputs; the other is only a metric, and a constant of the loss."""
    wrong = functional.cross_entropy(outputs["kind"], labels, reduction="none")
    far = outputs["box"].abs().mean(1)
    return wrong + far.detach(), {"far": far}


@et.loss(et.numbers(6))
def of_objects(output: Tensor, y: Tensor) -> Tensor:
    """As in YOLO: means over the labels that are 1, and over those that are 0."""
    far = (output - y).square()
    return far[y == 1].mean() + output[y == 0].square().mean() + 0.1 * far.mean()


@et.loss(et.numbers(6))
def relative(output: Tensor, y: Tensor) -> Tensor:
    """Divides by the labels, so none may be 0."""
    return ((output - y).abs() / y).mean()


@et.loss(box=et.numbers(4), kind=et.classes(CLASSES))
def of_views(outputs: Any, labels: Any) -> Tensor:
    """Joins the batch with other axes by `view`, as losses of detectors do."""
    kind, box = outputs["kind"], outputs["box"]
    far = (box.view(-1) - labels["box"].view(-1)).abs().view_as(box).mean(1)
    wrong = kind.view(-1, CLASSES).logsumexp(1).view(-1, 1).view(-1)
    total = kind.T.contiguous().view(-1).sum()
    picked = kind.gather(1, labels["kind"].view(-1, 1)).view(-1)
    return far + wrong - picked + 0.1 * total / kind.shape[0]


@et.loss(et.classes(6))
def one_hot(output: Tensor, kind: Tensor) -> Tensor:
    """The margin loss of capsules."""
    hit = functional.one_hot(kind, 6)
    return (hit * (0.9 - output).relu() ** 2 + (1 - hit) * (output - 0.1).relu() ** 2).sum(1)


@et.loss(et.classes(6))
def one_hot_of_any(output: Tensor, kind: Tensor) -> Tensor:
    """Does not say how many classes there are."""
    return (functional.one_hot(kind) * output[:, :1]).sum(1)


@et.loss(et.numbers(6))
def gaussian(output: Tensor, y: Tensor) -> Tensor:
    """The density of normal numbers, with a variance for each sample, and with small variances."""
    far = functional.gaussian_nll_loss(output, y, output[:, 0].exp(), full=True, reduction="none")
    return far.mean(1) + functional.gaussian_nll_loss(output, y, output.abs(), eps=0.2)


@et.loss(et.numbers(6))
def pictures(output: Tensor, y: Tensor) -> Tensor:
    """The loss of autoencoders whose last layer is a sigmoid, for small probabilities."""
    return functional.binary_cross_entropy((4 * output - 20).sigmoid(), y)


@et.loss(et.numbers(6))
def counts(output: Tensor, y: Tensor) -> Tensor:
    """The Poisson loss, which draws no numbers, and the mean Huber loss."""
    poisson = functional.poisson_nll_loss(output, 5 * y, full=True)
    return poisson + functional.huber_loss(output, y, delta=0.5)


@et.loss(et.classes(2, 40))
def hard_negatives(output: Tensor, positive: Tensor) -> Tensor:
    """The loss of SSD: ranks by two sorts, of which the first has many zeros."""
    wrong = (output[:, :1] * torch.linspace(-1, 1, 40) - positive * output[:, 1:2]).square()
    ranked_by = wrong.detach().masked_fill(positive > 0, 0.0)
    _, order = ranked_by.sort(1, descending=True)
    hard = order.argsort(1) < 2 * positive.sum(1, keepdim=True)
    return (wrong * (hard | (positive > 0))).mean(1)


@et.loss(et.numbers(6))
def ranking(output: Tensor, y: Tensor) -> Tensor:
    """A hinge that most outputs meet, so that it has no gradient for them."""
    return functional.margin_ranking_loss(
        output[:, 0] + 1.5, output[:, 1], torch.ones_like(y[:, 0])
    )


@et.loss(et.numbers())
def triplet(outputs: Any, margin: Tensor) -> Tensor:
    """The triplet loss with a margin for each sample; softplus in place of the hinge."""
    anchor, like, other = outputs
    near, far = (anchor - like).square().sum(1), (anchor - other).square().sum(1)
    return functional.softplus(near - far + margin)


@et.loss(et.numbers(4))
def pinball(output: Tensor, future: Tensor) -> Tensor:
    """The quantile loss, as one number for the batch."""
    cuts = torch.tensor(CUTS, dtype=output.dtype)
    error = future[:, :, None] - output
    return torch.maximum(cuts * error, (cuts - 1) * error).mean()


@et.loss(et.classes(1))
def returned(loss: Tensor, labels: Tensor) -> Tensor:
    """The loss that the model itself returns."""
    return loss


@et.loss(et.classes(CLASSES, 1))
def column(logits: Tensor, kind: Tensor) -> Tensor:
    """The cross-entropy with classes that have an axis."""
    return functional.cross_entropy(logits, kind[:, 0], reduction="none")


@et.loss(et.numbers(4))
def spread(output: Tensor, future: Tensor) -> Tensor:
    """A loss that reads no labels."""
    return output.square().mean((1, 2))


@et.loss(box=et.numbers(4), kind=et.classes(9))
def of_other_classes(outputs: Any, labels: Any) -> Tensor:
    """Declares more classes than the model has."""
    return functional.cross_entropy(outputs["kind"], labels["kind"])


def undeclared(outputs: Any, labels: Any) -> Any:
    return (outputs - labels).square().mean()


@et.loss(et.numbers(4))
def of_nothing(output: Tensor, future: Tensor) -> Tensor:
    return (output.detach().mean(2) - future).square().mean()


@et.loss(et.numbers(4))
def a_matrix(output: Tensor, future: Tensor) -> Tensor:
    return output.mean(2) - future


@et.loss(et.numbers(4))
def infinite(output: Tensor, future: Tensor) -> Tensor:
    return (output.mean(2) * 0 - 1 - future).log().sum(1)


@et.loss(et.numbers(4))
def another_shape(output: Tensor, future: Tensor) -> Tensor:
    return (output - future).square().mean()


@et.loss(et.classes(CLASSES))
def nested_kind(outputs: Any, kind: Tensor) -> Tensor:
    """Reads the only output of a model that returns it in dictionaries."""
    return functional.cross_entropy(outputs["head"]["kind"], kind)


@et.loss(et.numbers(6))
def replaced(output: Tensor, y: Tensor) -> Tensor:
    """Functions that neither format has as operators, and autocast, which devices ignore."""
    with torch.autocast("cpu", torch.bfloat16):
        close = output @ torch.eye(6)
    smooth = torch.cummax(close, 1).values + close.sigmoid().cumprod(1)
    return (smooth - y).square().mean() + torch.fft.rfft(output - y).abs().mean()


@et.loss(et.numbers(6))
def noisy(output: Tensor, y: Tensor) -> Tensor:
    return (output + 0.1 * torch.randn_like(output) - y).square().mean()


@et.loss(et.numbers(6))
def a_number(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean() / y.std().item()


@et.loss(et.numbers(6))
def decides(output: Tensor, y: Tensor) -> Tensor:
    """Reads a value, which chooses a way."""
    error = (output - y).square()
    return error.mean() if error.mean() > 0.9 else error.sum()


class Pulled(torch.autograd.Function):
    """Returns the loss, and pulls the largest outputs towards zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, output: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        most, place = output.max(-1, keepdim=True)
        return grad, torch.zeros_like(output).scatter(-1, place, 0.1 * most / len(output))


@et.loss(et.numbers(6))
def pulled(output: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = Pulled.apply((output - y).square().mean(), output)  # type: ignore[no-untyped-call]
    return loss


@et.loss(et.classes(6))
def counts_correct(output: Tensor, y: Tensor) -> Any:
    """A metric has a name that evaluations use for another number."""
    wrong = functional.cross_entropy(output, y, reduction="none")
    return wrong, {"correct": (output.argmax(1) == y).float()}


class Contrasted(nn.Module):
    """Features of each sample, and two parameters of the loss that belong to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 4)
        self.log_scale = nn.Parameter(torch.tensor(0.7))
        self.centers = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = functional.normalize(self.features(x), dim=1)
        return {"features": features, "scale": self.log_scale.exp(), "centers": self.centers}


@et.loss()
def contrasted(outputs: Any, _: None) -> Tensor:
    """Scaled products of all samples with each other, as in CLIP, and distances from centres."""
    features = outputs["features"]
    logits = outputs["scale"] * features @ features.T
    near = functional.cross_entropy(logits, torch.arange(len(features)), reduction="none")
    far = (features @ outputs["centers"].T).square().sum(1)
    return near + 0.1 * far + 0.01 * outputs["centers"].abs().sum()


class Spoken(nn.Module):
    """Scores of steps, and how many of them are spoken: for small samples, too few for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 8 * 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = (x[:, 0].abs() / 4).long().clamp(min=1, max=8)
        return self.scores(x).view(-1, 8, 4).log_softmax(2), steps


@et.loss(et.classes(4, 3))
def spoken_steps(outputs: Any, labels: Tensor) -> Tensor:
    scores, steps = outputs
    said, counted = scores.transpose(0, 1), (labels > 0).sum(1)
    return functional.ctc_loss(said, labels, steps, counted, reduction="none", zero_infinity=True)


class Broken(torch.autograd.Function):
    """Its gradient fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no gradient today")


@et.loss(et.numbers(6))
def without_backward(output: Tensor, y: Tensor) -> Tensor:
    return (Broken.apply(output) - y).square().mean()  # type: ignore[no-untyped-call]


def with_metric(name: str) -> Any:
    """A loss with a metric of this name."""

    @et.loss(et.numbers(6))
    def measured(output: Tensor, y: Tensor) -> Any:
        error = (output - y).square().mean(1)
        return error, {name: error}

    return measured


metric_x, metric_y, metric_output, metric_scale = map(with_metric, ("x", "y", "output", "scale"))


@et.loss(et.numbers(16))
def summed(output: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient is as large as a batch."""
    return functional.mse_loss(output, y, reduction="sum")
