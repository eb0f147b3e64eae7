"""The products of low-rank factors in a secure sum, against the layers that hold the factors."""

import numpy as np
import pytest
import torch
from torch import nn

from device_agent.formats.manifest import TensorEntry
from device_agent.privacy.factor_products import summed_table, summed_tensors
from toolkit.factor_layers.low_rank_layers import FactorizedConvolution, FactorizedLinear


@pytest.mark.parametrize(
    ("dense", "samples"),
    [
        (nn.Linear(5, 7, bias=False), (2, 5)),
        (nn.Conv1d(4, 6, 3, bias=False), (2, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), padding=1, bias=False), (2, 4, 5, 5)),
        (nn.Conv2d(6, 9, 3, groups=3, bias=False), (2, 6, 5, 5)),
    ],
    ids=["matrix", "1-D", "2-D", "groups"],
)
def test_the_product_computes_as_both_layers_do(
    dense: nn.Module, samples: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    layer = (
        FactorizedLinear(dense, 2)
        if isinstance(dense, nn.Linear)
        else FactorizedConvolution(dense, 2)  # type: ignore[arg-type]
    ).double()
    arrays = {"b": np.arange(3, dtype=np.float32)}
    arrays |= {side: layer.get_parameter(f"{side}.weight").detach().numpy() for side in "vu"}
    table = [
        TensorEntry(
            name=name,
            role="parameter",
            dtype="float32",
            shape=array.shape,
            stands_for="b" if name == "b" else "layer.weight",
            factor=None if name == "b" else name,
        )
        for name, array in arrays.items()
    ]
    kept, product = summed_tensors(arrays, table)
    about_kept, about = summed_table(table)
    assert about_kept == table[0]
    assert (about.name, about.stands_for, about.factor) == ("layer.weight", "layer.weight", None)
    assert about.shape == product.shape == dense.get_parameter("weight").shape
    np.testing.assert_array_equal(kept, arrays["b"])
    dense.double().get_parameter("weight").data = torch.from_numpy(product)
    x = torch.randn(samples, dtype=torch.float64)
    torch.testing.assert_close(dense(x), layer(x))
