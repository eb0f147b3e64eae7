"""The next global model from the noised sum of the devices' clipped changes.

Let S be the sum of the clipped changes of a round's updates. Each device of kind k is asked with
the same probability q. For each element, n is the number of devices whose kinds contain it, and b
is the mean of the values that they receive: the global tensor, or the composed factors. Then

    new = b + (S + deviation N(0, 1)) / max(1, q n)

q n is the expected number of devices in the sum. It does not depend on which devices were asked or
answered, so it reveals nothing about a single device.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from device_agent.formats.manifest import TensorEntry, uploaded
from device_agent.privacy.gaussian_noise import RandomBytes, gaussian
from toolkit.aggregation.running_aggregation import Aggregation, check_finite
from toolkit.aggregation.weighted_mean import Mean
from toolkit.families import recovering_family
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.matrix_product import Product
from toolkit.submodels.submodel import Submodel, shapes_of
from toolkit.submodels.tensor_slices import slice_shapes, slices_by_tensor


def expected_devices(
    model: GlobalModel, kinds: Iterable[tuple[Submodel, float]]
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """The values of each global tensor that devices receive, and the expected number of devices.

    Args:
        model: The global model that devices receive.
        kinds: Each submodel as it is in this round, with the expected number of its devices.

    Returns:
        Two tensors for each global tensor, by its name: the mean of the received values (nan for
        elements that no device receives), and the expected number of devices for each element.
    """
    held = Mean()
    shapes = shapes_of(model.tensors)
    for submodel, expected in kinds:
        values, table = submodel.cut(model), uploaded(submodel.program.tensors)
        received = _recovered(values, table, submodel, shapes)
        held.add(received, expected, slices_by_tensor(table, shapes))
    return {
        name: (mean, torch.as_tensor(held.share(name), dtype=torch.float64))
        for name, mean in held.result().items()
    }


def noised_model(
    aggregation: Aggregation,
    expected: Mapping[str, tuple[Tensor, Tensor]],
    deviation: float,
    random_bytes: RandomBytes,
) -> GlobalModel:
    """The next global model.

    Args:
        aggregation: The sums of changes by `add_clipped`; they may be empty.
        expected: The result of `expected_devices`. It decides which elements get noise.
        deviation: The standard deviation of the noise in the sums.
        random_bytes: The source of randomness for the noise.

    Raises:
        UpdateError: A number became too large for float32.
    """
    model, policy = aggregation.model, aggregation.policy
    tensors = {**model.tensors}
    for name, (received, devices) in sorted(expected.items()):
        old = model.tensors[name]
        total = deviation * torch.from_numpy(gaussian(tuple(old.shape), random_bytes))
        if name in aggregation.mean.sums:
            total += aggregation.mean.sums[name].total
        new = received + total / devices.clamp(min=1.0)
        moved = torch.lerp(old.double(), new, policy.beta).float()
        tensors[name] = check_finite(name, moved.where(devices > 0, old.float())).to(old.dtype)
    aggregation.trained |= expected.keys()
    return aggregation.next_model(tensors, {})


def _recovered(
    values: Mapping[str, Tensor],
    table: tuple[TensorEntry, ...],
    submodel: Submodel,
    shapes: Mapping[str, tuple[int, ...]],
) -> Mapping[str, Tensor | Product]:
    family = recovering_family(submodel.spec)
    sent = {entry.name: values[entry.name].detach().float() for entry in table}
    return family.recover(sent, table, slice_shapes(table, shapes))
