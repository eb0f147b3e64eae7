"""The fit that `export` reports, against numpy."""

import numpy as np
import pytest
import torch

from edgetailor import split
from models_for_tests import INPUT_SHAPE, smooth_cnn
from toolkit.exporting.approximation import fit
from toolkit.submodels.global_model import GlobalModel, from_model


def dense_of(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return v @ u if u.ndim == 2 else np.einsum("rmi,nrj->nmij", u[..., 0], v[:, :, 0])


def test_fit_of_low_rank_factors(seed: int) -> None:
    torch.manual_seed(seed)
    weights = from_model(smooth_cnn())
    submodel = split(smooth_cnn(), "low-rank:0.25", INPUT_SHAPE)
    values = {name: value.numpy() for name, value in submodel.cut(weights).items()}
    lost, norms = {}, {}
    for layer in ("strided", "residual.conv", "hidden"):
        dense = weights.tensors[f"{layer}.weight"].numpy()
        composed = dense_of(values[f"{layer}.u.weight"], values[f"{layer}.v.weight"])
        lost[layer], norms[layer] = np.linalg.norm(dense - composed), np.linalg.norm(dense)
    approximation = fit(submodel, submodel.cut(weights), weights)
    assert approximation is not None
    parts = {layer: 1 - lost[layer] / norms[layer] for layer in lost}
    worst = min(parts, key=parts.__getitem__)
    whole = 1 - np.linalg.norm(list(lost.values())) / np.linalg.norm(list(norms.values()))
    assert approximation.all == pytest.approx(whole, abs=1e-5)
    assert approximation.least == pytest.approx(parts[worst], abs=1e-5)
    assert approximation.tensor == f"{worst}.weight"
    assert str(
        approximation
    ) == f"fit of the factors {whole:.2f}, least {parts[worst]:.2f} for " + repr(f"{worst}.weight")


def test_weights_that_the_factors_hold_all_of(seed: int) -> None:
    torch.manual_seed(seed)
    model = smooth_cnn()
    zeros = GlobalModel({n: torch.zeros_like(v) for n, v in model.state_dict().items()})
    approximation = fit(submodel := split(model, "cp:2.0", INPUT_SHAPE), submodel.cut(zeros), zeros)
    assert approximation is not None
    assert (approximation.all, approximation.least) == (1, 1)


def test_nothing_is_said_where_nothing_is_factorized() -> None:
    model = smooth_cnn()
    submodel = split(model, "slice:residual", INPUT_SHAPE)
    assert fit(submodel, submodel.cut(from_model(model)), from_model(model)) is None
