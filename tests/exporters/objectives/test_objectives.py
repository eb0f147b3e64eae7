"""Built-in losses compared with torch's and with plain formulas, and the text of losses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import Tensor
from torch.nn import functional

from device_agent.formats.label_rule import IGNORED, LabelRule
from device_agent.formats.manifest import Part
from exporters.objectives.loss_text import canonical
from exporters.objectives.objective import objective
from exporters.recording.model_output import OutputForm
from refusals import refused

N = 9
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def classes(*shape: int, ignored: bool = False) -> Tensor:
    y = torch.randint(3, (N, *shape))
    return torch.where(torch.rand(y.shape) < 0.25, IGNORED, y) if ignored else y


def numbers(*shape: int) -> Tensor:
    return 2 * torch.randn(N, *shape, dtype=torch.float64)


def dice(z: Tensor, y: Tensor) -> Tensor:
    terms = []
    for p, own in zip(z.softmax(1), y, strict=True):
        for c in range(3):
            counted = own != IGNORED
            g, q = (own == c)[counted].double(), p[c][counted]
            terms.append(1 - (2 * (q * g).sum() + 1) / (q.sum() + g.sum() + 1))
    return torch.stack(terms).mean()


def contrastive(z: Tensor, y: Tensor) -> Tensor:
    z, terms = functional.normalize(z), []
    for i in range(N):
        others = [a for a in range(N) if a != i]
        same = [p for p in others if y[p] == y[i]]
        total = torch.logsumexp(torch.stack([z[i] @ z[a] / 0.5 for a in others]), 0)
        if same:
            terms.append(torch.stack([total - z[i] @ z[p] / 0.5 for p in same]).mean())
    return torch.stack(terms).mean()


Case = tuple[tuple[int, ...], Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "cross-entropy,smoothing=0.1": (
        (3,),
        classes,
        lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.1),
    ),
    "cross-entropy,weights=1/2/0.5": (
        (3, 2, 2),
        lambda: classes(2, 2, ignored=True),
        lambda z, y: functional.cross_entropy(z, y, WEIGHTS),
    ),
    "cross-entropy,smoothing=0.2,weights=1/2/0.5": (
        (3, 4, 1),
        lambda: classes(4, 1, ignored=True),
        lambda z, y: functional.cross_entropy(z, y, WEIGHTS, label_smoothing=0.2),
    ),
    "binary-cross-entropy": (
        (5,),
        lambda: torch.randint(2, (N, 5)),
        lambda z, y: functional.binary_cross_entropy_with_logits(z, y.double()),
    ),
    "huber,delta=0.7": (
        (2, 3),
        lambda: numbers(2, 3),
        lambda z, y: functional.huber_loss(z, y, delta=0.7),
    ),
    "mae": ((4,), lambda: numbers(4), functional.l1_loss),
    "cosine": (
        (4,),
        lambda: numbers(4),
        lambda z, y: 1 - functional.cosine_similarity(z, y).mean(),
    ),
    "dice": ((3, 2, 4), lambda: classes(2, 4, ignored=True), dice),
    "contrastive,temperature=0.5": ((4,), classes, contrastive),
}


@pytest.mark.parametrize("loss", CASES)
def test_values_and_gradients(loss: str, seed: int) -> None:
    torch.manual_seed(seed)
    shape, labels, oracle = CASES[loss]
    y, output = labels(), numbers(*shape)
    goal = objective(loss, shape)
    packed = y.reshape(N, 1).float() if goal.labels.parts else y
    found = []
    for measure, target in ((goal.loss, packed), (oracle, y)):
        leaf = output.clone().requires_grad_()
        value = measure(leaf, target)
        found.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_each_answer_of_multi_label_counts(seed: int) -> None:
    torch.manual_seed(seed)
    goal, z, y = objective("binary-cross-entropy", (5,)), numbers(5), torch.randint(2, (N, 5))
    assert goal.labels == LabelRule(1, (5,), independent=True)
    assert goal.correct is not None
    share = accuracy_score(y.reshape(-1).numpy(), (z > 0).reshape(-1).numpy())
    assert float(goal.correct(z, y)) == pytest.approx(share * 5 * N)


def test_a_weighted_sum_of_outputs(seed: int) -> None:
    torch.manual_seed(seed)
    form = OutputForm((Part(name="kind", shape=(3,)), Part(name="age", shape=())))
    goal = objective("kind=cross-entropy + age=mae,weight=0.3", form)
    z, age, y, years = numbers(3), numbers(), classes(), numbers()
    packed, labels = torch.cat([z, age[:, None]], 1), torch.stack([y.double(), years], 1)
    kind, far = functional.cross_entropy(z, y), functional.l1_loss(age, years)
    torch.testing.assert_close(goal.loss(packed, labels), kind + 0.3 * far)
    came = {name: float(value) for name, value in goal.measured(packed, labels).items()}
    right = float((z.argmax(1) == y).double().mean())
    expected = {"kind_loss": float(kind), "kind_accuracy": right, "age_loss": float(far)}
    assert came == pytest.approx({"loss": float(kind + 0.3 * far), **expected})
    parts = [(part.name, part.dtype, part.limit) for part in goal.labels.parts]
    assert parts == [("kind", "int64", 3), ("age", "float32", None)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("huber, delta=1", "huber"),
        ("huber,delta=2.50", "huber,delta=2.5"),
        ("cross-entropy,weights=1/2,smoothing=0.1", "cross-entropy,smoothing=0.1,weights=1/2"),
        ("a = mse,weight=1e-2+b=mae", "a=mse,weight=0.01 + b=mae"),
        (" my.losses:focal ", "my.losses:focal"),
    ],
)
def test_a_loss_has_one_text(given: str, text: str) -> None:
    assert canonical(given) == text
    assert canonical(text) == text


@pytest.mark.parametrize(
    "loss",
    [
        *("cross-entrpy", "", "huber,delta=0", "huber,delta=nan", "huber,width=1", "mse,delta=1"),
        *("cross-entropy,smoothing=1", "cross-entropy,weights=-1/2", "mse,"),
        *("huber,delta=1,delta=2", "a=mse,weight=1,weight=2", "a=mse,weight"),
        *("a=mse + mse", "mse + a=mse", "a=mse + a=mae", "a=m:f", "a=mse,weight=0", "=mse"),
    ],
)
def test_what_is_no_loss_is_refused(loss: str) -> None:
    with refused("option.invalid-value", option="loss", value=loss):
        canonical(loss)


def test_a_list_of_tables_is_checked() -> None:
    assert canonical([{"output": "a", "loss": "mse", "weight": np.float64(0.5)}]) == (
        "a=mse,weight=0.5"
    )
    for table in ({"output": "a"}, {"output": "a", "loss": "mse", "wieght": 1}):
        with refused("option.invalid-value", option="loss"):
            canonical([table])
