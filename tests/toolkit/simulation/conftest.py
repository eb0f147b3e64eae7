"""One split of each model and spec for all simulations of a process: splits take most of them."""

from collections.abc import Iterator

import pytest
from torch import nn

from toolkit.aggregation import federation
from toolkit.splitting import split
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.submodel import Submodel

MADE: dict[tuple[str, ...], Submodel] = {}


def split_once(
    model: nn.Module, spec: str, input_shape: tuple[int, ...], training: TrainingConfig
) -> Submodel:
    key = (str(type(model)), *map(repr, (model, spec, input_shape, training)))
    if key not in MADE:
        MADE[key] = split(model, spec, input_shape, training)
    return MADE[key]


@pytest.fixture(autouse=True)
def splits_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(federation, "split", split_once)
        yield
