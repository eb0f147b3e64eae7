"""How an operator's error is measured: against its result, or against what rounding explains."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from exporters.verification.graph_values import cone_of
from exporters.verification.operators import TOLERANCE, Comparison


def error_of_mean(x: Tensor, factor: float) -> float:
    """The measured error of `factor` times the mean of the rows of `x`."""
    module = make_fx(lambda x: x.mean(1))(x)
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    (mean,) = (node for node in order if "mean" in node.name)
    cone = cone_of(mean, lambda _: False, order)
    comparison = Comparison(module, torch.Generator().manual_seed(0))
    comparison.add(cone, {cone.leaves[0]: x}, (x.double().mean(1) * factor).float())
    assert comparison.worst is not None
    return comparison.worst.error / TOLERANCE


@pytest.mark.parametrize("share", [0.3, 0.9, 1.5, 10.0])
def test_the_error_of_a_sum_that_cancels_is_compared_with_rounding(share: float, seed: int) -> None:
    """A tenth of the tolerance or ten times as much: the margin is that of rounding."""
    torch.manual_seed(seed)
    x = torch.randn(48, 32)
    centred = x - x.mean(1, keepdim=True) + 1e-5 * torch.randn(48, 1)
    assert error_of_mean(centred, 1 + share * TOLERANCE) < 0.1
    error = error_of_mean(x.abs(), 1 + share * TOLERANCE)
    assert error == pytest.approx(share, rel=0.2) if share > 1 else error <= 1.2 * share


@pytest.mark.parametrize(("off", "is_right"), [(0.0, True), (1e-3, False)])
def test_a_sum_that_cancels_equals_what_the_runtime_computed_of_it(
    off: float, is_right: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(48, 32)
    centred = x - x.mean(1, keepdim=True) + 1e-8 * torch.randn(48, 1)
    known = centred.flip(1).mean(1) + off  # a runtime adds in an order of its own
    module = make_fx(lambda x, known: x.mean(1) == known)(centred, known)
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    (equal,) = (node for node in order if "eq" in node.name)
    leaves = dict(zip(module.graph.find_nodes(op="placeholder"), (centred, known), strict=True))
    comparison = Comparison(module, torch.Generator().manual_seed(0))
    cone = cone_of(equal, lambda _: False, order)
    assert comparison.add(cone, leaves, torch.full((48,), True)) is is_right
