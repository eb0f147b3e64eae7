"""The server's factorizations against the straightforward way, interleaved in one run.

FedHM: the 18 factorized layers of ResNet-34 (Table 6) at three ratios, in the first round and in
later ones, against one full SVD for each layer and ratio. TDPFed: CP-ALS of VGG8's convolutions at
compression rate 2 (Table I) against TensorLy's `parafac`, to the same residual. Run
`make bench-families`.
"""

import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import tensorly
import torch
from tensorly.decomposition import parafac
from torch import Tensor

from toolkit.factorization.cp_decomposition import als, compose, cp_rank, leading_vectors
from toolkit.factorization.factorizer import Factorizer
from toolkit.factorization.truncated_svd import unroll

RESNET34 = [(128, 256), *[(256, 256)] * 11, (256, 512), *[(512, 512)] * 5]
"""Input and output channels of layer3's and layer4's 3 x 3 convolutions."""
RATIOS = (1 / 2, 1 / 4, 1 / 8)
ROUNDS = 3
CHANGE = 0.01
"""Change of the weights from round to round, relative to their norm."""

VGG8 = [(32, 3, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (256, 256, 3, 3)]
SWEEPS = 10
MOST_SWEEPS = 100

T = TypeVar("T")


def relative_residual(target: Tensor, factors: list[Tensor]) -> float:
    """||X - [[A]]|| / ||X||."""
    return float((target - compose(factors)).norm() / target.norm())


class Layer(NamedTuple):
    """An unrolled layer, the ranks it is wanted at and its singular values."""

    matrix: Tensor
    ranks: list[int]
    values: Tensor


class Errors(NamedTuple):
    """Squared Frobenius errors by layer: what was reached, and the best."""

    reached: list[float]
    best: list[float]

    def excess(self) -> tuple[float, float]:
        """In total and at worst, in percent of the best error."""
        total = (sum(self.reached) / sum(self.best)) ** 0.5
        worst = max((a / b) ** 0.5 for a, b in zip(self.reached, self.best, strict=True))
        return 100 * (total - 1), 100 * (worst - 1)


def timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh


def moved(layer: Layer) -> Layer:
    """The layer in the next round."""
    noise = torch.randn(layer.matrix.shape)
    matrix = layer.matrix + CHANGE * layer.matrix.norm() / noise.norm() * noise
    return layer._replace(matrix=matrix, values=torch.linalg.svdvals(matrix))


def factorize(factorizer: Factorizer, name: str, layer: Layer) -> None:
    """What a fleet of three ratios takes: devices of one ratio share a bundle, in any way."""
    for rank in layer.ranks:
        factorizer.truncated(name, layer.matrix, rank)


def bench_svd() -> None:
    straight = {"float32": 0.0, "float64": 0.0}
    seconds = {(kind, n): 0.0 for kind in ("flat", "decaying") for n in range(ROUNDS)}
    errors = {(*key, ratio): Errors([], []) for key in seconds for ratio in RATIOS}
    torch.manual_seed(0)
    for inputs, outputs in RESNET34:
        flat = unroll(torch.nn.Conv2d(inputs, outputs, 3, bias=False).weight.detach())
        ranks = [round(ratio * outputs) for ratio in RATIOS]
        single, (u, values, vh) = timed(lambda m=flat: svd(m))
        double, _ = timed(lambda m=flat: svd(m.double()))
        straight["float32"] += len(RATIOS) * single
        straight["float64"] += len(RATIOS) * double
        powers = values[0] * torch.arange(1, len(values) + 1) ** -0.5
        decaying = (u * powers) @ vh
        for kind, layer in (
            ("flat", Layer(flat, ranks, values)),
            ("decaying", Layer(decaying, ranks, powers)),
        ):
            factorizer = Factorizer()
            for number in range(ROUNDS):
                spent, _ = timed(lambda f=factorizer, x=layer: factorize(f, "layer", x))
                seconds[kind, number] += spent
                for ratio, rank in zip(RATIOS, ranks, strict=True):
                    u, v = factorizer.truncated("layer", layer.matrix, rank)
                    reached, best = errors[kind, number, ratio]
                    reached.append(float((layer.matrix - u @ v.T).double().square().sum()))
                    best.append(float(layer.values[rank:].double().square().sum()))
                layer = moved(layer)
    print("\nResNet-34, 18 layers, ratios 1/2 1/4 1/8. A full SVD for each layer and ratio:")
    print(", ".join(f"{name} {spent:.1f} s" for name, spent in straight.items()))
    print("Error beyond the best truncation in %: all layers / the worst one, by ratio")
    print(f"{'spectrum':9}{'round':>6}{'time':>8}{'faster: 32':>12}{'64':>6}", end="")
    print("".join(f"{ratio:>13}" for ratio in ("1/2", "1/4", "1/8")))
    for (kind, number), spent in seconds.items():
        faster = [base / spent for base in straight.values()]
        print(f"{kind:9}{number + 1:6}{spent:6.2f} s{faster[0]:12.0f}{faster[1]:6.0f}", end="")
        for ratio in RATIOS:
            print(
                "{:>13}".format("{:.2f} / {:.2f}".format(*errors[kind, number, ratio].excess())),
                end="",
            )
        print()


def until(target: Tensor, rank: int, residual: float) -> tuple[float, int]:
    """Residual and sweeps at which our ALS is no worse than `residual`."""
    factors = [leading_vectors(target, mode, rank) for mode in range(target.dim())]
    reached, sweeps = 1.0, 0
    while reached > residual and sweeps < MOST_SWEEPS:
        factors = als(target, factors, 1)
        reached, sweeps = relative_residual(target, factors), sweeps + 1
    return reached, sweeps


def bench_cp() -> None:
    tensorly.set_backend("pytorch")
    print(f"\nVGG8 at rate 2: {SWEEPS} sweeps of TensorLy, ours to its residual or less")
    print(f"{'shape':18}{'R':>5}{'TensorLy':>14}{'ours, sweeps':>18}{'ratio':>7}{'residuals':>18}")
    for shape in VGG8:
        rank = cp_rank(shape, 2)
        rows = []
        for seed in range(1 if shape[0] * shape[1] > 128 * 64 else 3):
            target = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            theirs, (_, path) = timed(
                lambda target=target, rank=rank: parafac(
                    target, rank, n_iter_max=SWEEPS, tol=0, return_errors=True, random_state=0
                )
            )
            residual = float(path[-1])
            ours, (reached, sweeps) = timed(
                lambda target=target, rank=rank, goal=residual: until(target.double(), rank, goal)
            )
            rows.append((theirs, ours, sweeps, theirs / ours, residual, reached))
        theirs, ours, sweeps, ratio, residual, reached = map(
            statistics.median, zip(*rows, strict=True)
        )
        print(
            f"{'x'.join(map(str, shape)):18}{rank:5}{theirs:12.2f} s{ours:12.2f} s,{sweeps:3.0f}"
            f"{ratio:7.1f}{residual:10.4f}{reached:8.4f}",
            flush=True,
        )


def main() -> None:
    warnings.filterwarnings("ignore", module="tensorly")
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads; Python "
        f"{platform.python_version()}, torch {torch.__version__},\nnumpy {np.__version__}, "
        f"tensorly {tensorly.__version__}"
    )
    bench_svd()
    bench_cp()


if __name__ == "__main__":
    sys.exit(main())
