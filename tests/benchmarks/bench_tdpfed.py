"""TDPFed's options on the digits: accuracy of the global model and of the personal models.

The equations in plain PyTorch, for all clients at once: the paper's two-layer network (64-100-10),
20 clients with two labels each, 23 batches of 20 samples a round, compression rate 2.

    python tests/benchmarks/bench_tdpfed.py [ROUNDS] [SEED ...]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

CLIENTS, BATCHES, BATCH, RATE, MOMENTUM = 20, 23, 20, 2.0, 0.9
HELD_OUT, CLASSES, HIDDEN = 359, 10, 100


@dataclass(frozen=True)
class Settings:
    """lambda, s, s', Adam's rate of the factors, and where personal models start a round."""

    penalty: float
    personal_steps: int
    factor_steps: int
    factor_rate: float
    personal_rate: float = 0.03
    restart: bool = False


VII_D = Settings(12, 5, 17, 3e-4)
CASES = {
    "penalty=15, 1 and 5 steps": Settings(15, 1, 5, 3e-4),
    "penalty=12, 1 and 5 steps": Settings(12, 1, 5, 3e-4),
    "5 and 5 steps": Settings(12, 5, 5, 3e-4),
    "1 and 17 steps": Settings(12, 1, 17, 3e-4),
    "VII-D, MNIST": VII_D,
    "VII-D, personal-start=aggregate": replace(VII_D, restart=True),
    "VII-A, MNIST, factor-rate=8e-4": replace(VII_D, factor_rate=8e-4),
    "VII-A, CIFAR-10": Settings(14, 4, 15, 4e-5),
}


def two_labels(labels: np.ndarray, order: np.random.Generator) -> list[np.ndarray]:
    """Give each client two shards of the sorted samples (section VII-A)."""
    shards = np.array_split(np.argsort(labels, kind="stable"), 2 * CLIENTS)
    mixed = order.permutation(2 * CLIENTS)
    return [np.concatenate([shards[i] for i in mixed[k::CLIENTS]]) for k in range(CLIENTS)]


def factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors of `weight` at the compression rate."""
    rank = max(1, int(weight.numel() / (RATE * sum(weight.shape)) + 0.5))
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return u[:, :rank] * s[:rank].sqrt(), v[:rank].T * s[:rank].sqrt()


def composed(a: Sequence[Tensor]) -> list[Tensor]:
    """Weights and biases of the two layers."""
    return [a[0] @ a[1].mT, a[2], a[3] @ a[4].mT, a[5]]


def logits(w: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The output for `x`, and the hidden layer before its ReLU."""
    hidden = x @ w[0].mT + w[1].unsqueeze(-2)
    return hidden.relu() @ w[2].mT + w[3].unsqueeze(-2), hidden


def gradients(theta: Sequence[Tensor], x: Tensor, target: Tensor) -> list[Tensor]:
    """Gradients of the mean cross-entropy."""
    output, hidden = logits(theta, x)
    d = (output.softmax(-1) - target) / BATCH
    back = (d @ theta[2]) * (hidden > 0)
    return [back.mT @ x, back.sum(1), d.mT @ hidden.relu(), d.sum(1)]


def simulate(settings: Settings, seed: int, rounds: int) -> tuple[float, float]:
    """Accuracy of the global model, and mean accuracy of personal models on their own labels."""
    draw = np.random.default_rng([seed, 7])
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    mixed = np.random.default_rng(seed).permutation(len(y))
    held, rest = mixed[:HELD_OUT], mixed[HELD_OUT:]
    parts = [rest[p] for p in two_labels(y[rest], np.random.default_rng(seed))]
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, HIDDEN), torch.nn.Linear(HIDDEN, CLASSES)
    first_layer, second_layer = layers
    state = [
        *factors(first_layer.weight),
        first_layer.bias,
        *factors(second_layer.weight),
        second_layer.bias,
    ]
    state = [value.detach() for value in state]
    theta: list[Tensor] = []
    for _ in range(rounds):
        local = [value.expand(CLIENTS, *value.shape).clone() for value in state]
        if settings.restart or not theta:
            theta = [value.clone() for value in composed(local)]
        velocity = [torch.zeros_like(value) for value in theta]
        first, second = ([torch.zeros_like(value) for value in local] for _ in range(2))
        step = 0
        for _ in range(BATCHES):
            drawn = np.stack([draw.choice(p, BATCH, replace=len(p) < BATCH) for p in parts])
            batch, target = images[drawn], torch.eye(CLASSES)[labels[drawn]]
            centre = composed(local)
            for _ in range(settings.personal_steps):  # eq. 15
                for i, gradient in enumerate(gradients(theta, batch, target)):
                    gradient += settings.penalty * (theta[i] - centre[i])
                    velocity[i] = MOMENTUM * velocity[i] + gradient
                    move = gradient + MOMENTUM * velocity[i]
                    theta[i] = theta[i] - settings.personal_rate * move

            for _ in range(settings.factor_steps):  # eq. 17 and 19
                step += 1
                gap = [a - b for a, b in zip(composed(local), theta, strict=True)]
                slopes = [gap[0] @ local[1], gap[0].mT @ local[0], gap[1]]
                slopes += [gap[2] @ local[4], gap[2].mT @ local[3], gap[3]]
                for i, slope in enumerate(slopes):
                    slope *= settings.penalty
                    first[i] = 0.9 * first[i] + 0.1 * slope
                    second[i] = 0.999 * second[i] + 0.001 * slope.square()
                    scale = (second[i] / (1 - 0.999**step)).sqrt() + 1e-8
                    local[i] = local[i] - settings.factor_rate / (1 - 0.9**step) * first[i] / scale
        state = [value.mean(0) for value in local]  # eq. 20
    chosen = logits(composed(state), images[held])[0].argmax(-1)
    accuracy = float((chosen == labels[held]).float().mean())
    own = logits(theta, images[held])[0].argmax(-1) == labels[held]
    shares = [np.bincount(y[p], minlength=CLASSES)[y[held]] for p in parts]
    counts = np.bincount(y[held], minlength=CLASSES)[y[held]]
    weights = torch.tensor(np.stack(shares) / counts)
    return accuracy, float(((own * weights).sum(1) / weights.sum(1)).mean())


def main(rounds: str = "20", *seeds: str) -> None:
    """Print a line for each case and seed."""
    torch.set_num_threads(1)
    for seed in map(int, seeds or ("0", "1", "2")):
        for name, settings in CASES.items():
            accuracies = simulate(settings, seed, int(rounds))
            print(
                f"seed {seed}  {name:34} global {accuracies[0]:.3f}  personal {accuracies[1]:.3f}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
