"""How large the numbers of an update are, for the bounds of `update_bounds.py`."""

import math

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry
from toolkit.aggregation.limits.update_bounds import Scale
from toolkit.aggregation.recover import Received, as_tensors
from toolkit.aggregation.update_validation import is_statistic, is_variance
from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import slice_shapes


def scales(update: Received, model: GlobalModel) -> dict[str, Scale]:
    """Return how large the numbers in each tensor of `update` are.

    The update was trained from `model`, and `check_update` has accepted it.
    """
    record, arrays = update
    spec, table = parse_spec(record.submodel), record.tensors
    family, tensors = recovering_family(spec), as_tensors(arrays)
    shapes = slice_shapes(table, shapes_of(model.tensors))
    by_name = {}
    for name, value in family.recover(tensors, table, shapes).items():
        dense = value.dense() if isinstance(value, Product) else value
        by_name[name] = _scale_of(name, dense, model)
    if family.averages_factors:
        for entry in table:
            if entry.factor is not None:
                received = _received(spec.head, entry, model)
                key = f"{spec.head}|{entry.name}"
                by_name[key] = Scale(_largest(tensors[entry.name]), received, loose=True)
    return by_name


def _scale_of(name: str, value: Tensor, model: GlobalModel) -> Scale:
    """The scale of an update's part of the global tensor `name`."""
    received = _largest(model.tensors[name])
    if is_variance(name):
        return Scale(math.sqrt(_largest(value)), math.sqrt(received), loose=True)
    if is_statistic(name):
        # A mean may move by the standard deviation, even if the mean was small.
        variance = model.tensors.get(name.removesuffix("running_mean") + "running_var")
        spread = 0.0 if variance is None else math.sqrt(_largest(variance))
        return Scale(_largest(value), max(received, spread), loose=True)
    return Scale(_largest(value), received)


def _received(key: str, entry: TensorEntry, model: GlobalModel) -> float:
    """The largest number in the received factor, or in its tensor if the model keeps no factors."""
    kept = model.kept.get(key, {}).get(entry.name)
    return _largest(model.tensors[entry.stands_for or ""] if kept is None else kept)


def _largest(value: Tensor) -> float:
    """The largest absolute number; inf if any number is not finite."""
    if not value.numel():
        return 0.0
    least, most = (float(bound) for bound in torch.aminmax(value.detach()))
    largest = max(abs(least), abs(most))
    return largest if math.isfinite(largest) else math.inf
