"""Factorized layers equal dense layers with the weight U V^T, for any geometry."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from toolkit.factor_layers.low_rank_layers import (
    FactorizedConvolution,
    FactorizedLinear,
    FactorizedRecurrence,
    compose_weight,
    factor_weights,
)
from toolkit.factorization.factorizer import Factorizer
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.weighted_layers import replacement_obstacle

seeds = st.integers(0, 2**32 - 1)
small = st.integers(1, 3)
EXACT = Factorizer(exact=True)


def dense(value: Product | Tensor) -> Tensor:
    return value.dense() if isinstance(value, Product) else value


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Conv1d | nn.Conv2d:
    groups, axes = draw(small), draw(st.sampled_from([1, 2]))
    sizes = st.tuples(*[small] * axes)
    same = draw(st.booleans())
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    return (nn.Conv1d if axes == 1 else nn.Conv2d)(
        groups * draw(small),
        groups * draw(small),
        draw(sizes),
        stride=1 if same else draw(sizes),
        padding="same" if same else draw(st.tuples(*[st.integers(0, 2)] * axes)),
        dilation=draw(sizes),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )


@settings(deadline=None)
@given(convolutions(), small, seeds)
def test_two_convolutions_are_the_one_of_their_product(
    layer: nn.Conv1d | nn.Conv2d, rank: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer.double()
    u, v = factor_weights(EXACT, "", torch.randn_like(layer.weight), rank, layer.groups)
    pair = FactorizedConvolution(layer, v.shape[1]).double()
    state = {"u.weight": u.double(), "v.weight": v.double()}
    pair.load_state_dict(state | ({} if layer.bias is None else {"v.bias": layer.bias}))
    whole = copy.deepcopy(layer)
    whole.weight.data = dense(compose_weight(state["u.weight"], state["v.weight"]))
    x = torch.randn(2, layer.in_channels, *[9] * len(layer.kernel_size), dtype=torch.float64)
    torch.testing.assert_close(pair(x), whole(x), rtol=1e-10, atol=1e-10)


@settings(deadline=None)
@given(convolutions(), seeds)
def test_full_rank_is_the_identity(layer: nn.Conv1d | nn.Conv2d, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn_like(layer.weight)
    came = dense(compose_weight(*factor_weights(EXACT, "", weight, weight.numel(), layer.groups)))
    assert float((came - weight).norm()) <= 1e-5 * float(weight.norm())


@given(st.integers(1, 6), st.integers(1, 6), seeds)
def test_full_rank_of_a_matrix_is_the_identity(n: int, m: int, seed: int) -> None:
    weight = torch.randn(n, m, generator=torch.Generator().manual_seed(seed))
    came = dense(compose_weight(*factor_weights(EXACT, "", weight, n * m)))
    assert float((came - weight).norm()) <= 1e-5 * float(weight.norm())


def test_two_linear_layers_are_the_one_of_their_product(seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(7, 5).double()
    u, v = factor_weights(EXACT, "", layer.weight.detach(), 3)
    pair = FactorizedLinear(layer, 3).double()
    pair.load_state_dict({"u.weight": u, "v.weight": v, "v.bias": layer.bias})
    x = torch.randn(4, 6, 7, dtype=torch.float64)
    expected = nn.functional.linear(x, v.double() @ u.double(), layer.bias)
    torch.testing.assert_close(pair(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_of_products(kind: type[nn.RNNBase], seed: int) -> None:
    torch.manual_seed(seed)
    layer = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True).double()
    ranks = {name: 2 for name, p in layer.named_parameters() if p.dim() == 2}
    factorized = FactorizedRecurrence(layer, ranks).double()
    whole = copy.deepcopy(layer)
    for name in ranks:
        u, v = factor_weights(EXACT, "", getattr(layer, name).detach(), 2)
        factorized.u[name].data, factorized.v[name].data = u.double(), v.double()
        getattr(whole, name).data = v.double() @ u.double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(factorized(x), whole(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("u", "v"),
    [((2, 3), (4, 3)), ((2, 3, 3, 1), (4, 2)), ((2, 3, 3, 2), (4, 2, 1, 3)), ((3, 3), (4, 2))],
)
def test_weights_that_are_no_pair_are_refused(u: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"of the same rank|are not \(r"):
        compose_weight(torch.zeros(u), torch.zeros(v))


def test_attention_keeps_its_projection_dense() -> None:
    """The reason names attention, as users do not know the internal class of the layer."""
    attention = nn.MultiheadAttention(8, 2)
    assert replacement_obstacle(attention.out_proj, used=True, shared=set()) == (
        "attention reads its weights itself"
    )
