"""Recovers an update of any submodel to tensors of the global model.

A user's own aggregation starts here: `recover` turns factors, slices and narrowed layers into
full-shape tensors and says which elements the device trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device_agent.formats.update import UpdateRecord
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.submodel_strength import strength, trainable
from toolkit.aggregation.update_validation import check_update
from toolkit.families import recovering_family
from toolkit.submodels.class_rows import own_rows
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import shapes_of
from toolkit.submodels.tensor_slices import slice_shapes, slices_by_tensor

Received = tuple[UpdateRecord, Mapping[str, np.ndarray]]
"""An update as `read_update` returns it: its record, and its arrays by their bundle names."""


@dataclass(frozen=True)
class RecoveredUpdate:
    """One update in the shapes of the global model.

    Attributes:
        record: The update's own description: submodel, samples, losses.
        tensors: The update's values, float32 in the full shape of the global tensor, by global
            name. Elements that the update does not contain have the global model's value.
        weights: For each of `tensors`, a tensor of the same shape with the weight of every element:
            the update's weight under the policy, or 0 for elements that the update does not
            contain. Read-only: all elements may share memory.
    """

    record: UpdateRecord
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def recover(
    update: Received,
    model: GlobalModel,
    policy: AggregationPolicy = AggregationPolicy(),  # noqa: B008  frozen
) -> RecoveredUpdate:
    """Recover an update of any family to full-shape tensors with a weight for every element.

    Use it for an aggregation of your own that needs single updates. For the mean, use `aggregate`.

    Factors are composed; slices and narrowed layers are put at their positions in the full shape.

    Args:
        update: The record and the arrays, as `read_update` returns them.
        model: The global model that the update was trained from.
        policy: Gives the update its weight. By default the weight is the number of samples.

    Returns:
        The tensors that the update contains, completely or in part, and their weights.

    Raises:
        UpdateError: If the update does not fit the model.

    Examples:
        >>> import numpy as np, torch
        >>> from device_agent.formats.manifest import FileEntry, TensorEntry
        >>> model = GlobalModel({"w": torch.zeros(3)})
        >>> first = TensorEntry(
        ...     name="w", role="parameter", dtype="float32", shape=(2,), stands_for="w",
        ...     part=(((0, 2),),),
        ... )
        >>> record = UpdateRecord(
        ...     bundle="", base="", submodel="width:0.5", samples=8, steps=1, loss_first=1.0,
        ...     loss_last=0.5, tensors=(first,), file=FileEntry(size=0, sha256=""),
        ... )
        >>> recovered = recover((record, {"w": np.ones(2, np.float32)}), model)
        >>> recovered.tensors["w"].tolist(), recovered.weights["w"].tolist()
        ([1.0, 1.0, 0.0], [8.0, 8.0, 0.0])
    """
    check_update(*update, model.tensors)
    return recover_checked(update, model, policy)


def recover_checked(
    update: Received, model: GlobalModel, policy: AggregationPolicy
) -> RecoveredUpdate:
    """Do the same as `recover`, but without the checks: `check_update` has accepted `update`."""
    record, arrays = update
    shapes = shapes_of(model.tensors)
    table, left = own_rows(record.tensors, as_tensors(arrays), record.classes, shapes)
    family = recovering_family(parse_spec(record.submodel))
    held = family.recover(left, table, slice_shapes(table, shapes))
    weight = torch.tensor(weight_of(record, model, policy))
    where = slices_by_tensor(table, shapes)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, value in held.items():
        dense = value.dense() if isinstance(value, Product) else value
        if name not in where:
            tensors[name] = dense.clone() if dense is value else dense
            weights[name] = weight.expand(shapes[name])
            continue
        tensors[name] = model.tensors[name].float().clone()
        tensors[name][where[name].index] = dense
        weights[name] = torch.zeros(shapes[name])
        weights[name][where[name].index] = weight
    return RecoveredUpdate(record, tensors, weights)


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the arrays of an update as tensors. A tensor uses the memory of its array."""
    return {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}


def weight_of(record: UpdateRecord, model: GlobalModel, policy: AggregationPolicy) -> float:
    """The weight of an update under `policy`."""
    gamma = 1.0
    if policy.weights == "softmax":
        gamma = strength(record.submodel, record.tensors, trainable(model.tensors))
    return policy.weight(record.samples, gamma)
