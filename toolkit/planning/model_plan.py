"""Plans for one model and one device: the public `edgetailor.plan`."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from exporters.cache_folder import cache_folder
from profiles.cost_model.submodel_choice import Budgets
from profiles.documents.device_profile import DeviceProfile, load_device
from profiles.progress import Report, silent
from profiles.units import parse_bytes
from toolkit.planning.candidate_specs import specs as all_specs
from toolkit.planning.plan import Planned, plan_for
from toolkit.planning.submodel_workloads import Workloads
from toolkit.submodels.hyperparameters import TrainingConfig


def plan(
    model: nn.Module,
    sample_shape: tuple[int, ...],
    profile: str | Path | DeviceProfile,
    *,
    memory: str | int | None = None,
    step_s: float | None = None,
    bandwidth: str | int | None = None,
    specs: Sequence[str] | None = None,
    training: TrainingConfig | None = None,
    cache: bool = True,
    progress: Report = silent,
) -> Planned:
    """Choose the strongest submodel of `model` that a device can train within its budgets.

    Use it if you know the device but not the spec. Nothing is trained: the plan predicts from
    the device's profile. To compare sizes without a device, use `inspect`.

    Args:
        model: The global model.
        sample_shape: Shape of one sample, without the batch.
        profile: A device's profile, the path of its file, or the name of a built-in profile.
        memory: Limit of the peak memory of the agent's process: bytes, or text like `"120MB"`. The
            default is a share of the device's memory.
        step_s: Limit of the time of one batch, in seconds.
        bandwidth: Limit of the bytes sent and received in a round, or text like `"20MB"`.
        specs: The submodels to choose from. The default is all families and sizes.
        training: How devices train; the memory of a step depends on it.
        cache: Use the cache of graphs and figures; see `edgetailor export`.
        progress: Called with the name of each stage when it begins.

    Returns:
        The result. Its `plan.chosen` is the chosen candidate, or None if nothing fits. Its
        `plan.rows` has the predictions of the computed candidates, in bytes and seconds. All other
        candidates are in its `exceeding` and `not_needed`.

    Raises:
        InputError: If the profile cannot be read. Also if `memory` is None and the profile does
            not state the device's memory.
        SpecError: If a spec is wrong.
        ModelError: If the model cannot be recorded.

    Examples:
        >>> import edgetailor as et
        >>> model = et.load_model("toolkit.models:mnist_dnn")
        >>> planned = et.plan(
        ...     model, (1, 28, 28), "raspberry-pi-4-2gb", specs=["full", "low-rank:0.25"]
        ... )
        >>> planned.plan.chosen.submodel
        'full'
    """
    device = profile if isinstance(profile, DeviceProfile) else load_device(str(profile))
    config = training or TrainingConfig()
    budgets = Budgets(memory=_bytes(memory), step=step_s, traffic=_bytes(bandwidth))
    workloads = Workloads(model, sample_shape, config, cache=cache_folder() if cache else None)
    if not specs:
        progress("finding the submodels of the model")
    with workloads.recording:
        wanted = specs or list(all_specs(model, sample_shape, config.batch_size, config.loss))
    return plan_for(device, workloads, wanted, budgets, progress=progress)


def _bytes(size: str | int | None) -> float | None:
    """A size in bytes, from text with a unit or a number."""
    return parse_bytes(size) if isinstance(size, str) else size
