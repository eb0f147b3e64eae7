"""EdgeTailor's public API.

Every name is loaded when it is first used: `import edgetailor` loads neither torch nor numpy.

Examples:
    >>> import edgetailor as et
    >>> "split" in dir(et)
    True
"""

import importlib
from typing import TYPE_CHECKING, Any

from device_agent import __version__ as __version__

if TYPE_CHECKING:
    from device_agent.formats.update import UpdateRecord as UpdateRecord
    from device_agent.formats.update import read_update as read_update
    from device_agent.inference.predictor import Predictor as Predictor
    from device_agent.profiling.profiler import profile_bundle as profile
    from device_agent.training.standalone_training import train as train
    from exporters.export import ExportedBundle as ExportedBundle
    from exporters.objectives.own_loss_labels import classes as classes
    from exporters.objectives.own_loss_labels import loss as loss
    from exporters.objectives.own_loss_labels import numbers as numbers
    from exporters.recording.inputs.input_ranges import set_input_range as set_input_range
    from exporters.recording.inputs.joined_inputs import join_inputs as join_inputs
    from exporters.recording.inputs.packed_inputs import pack_inputs as pack_inputs
    from profiles.documents.device_profile import DeviceProfile as DeviceProfile
    from profiles.documents.device_profile import load_device as load_device
    from profiles.errors import EdgeTailorError as EdgeTailorError
    from toolkit.aggregation.aggregate import aggregate as aggregate
    from toolkit.aggregation.aggregation_policy import AggregationPolicy as AggregationPolicy
    from toolkit.aggregation.federation import Federation as Federation
    from toolkit.aggregation.partial_aggregates.partial import read_partial as read_partial
    from toolkit.aggregation.partial_aggregates.partial import write_partial as write_partial
    from toolkit.aggregation.recover import recover as recover
    from toolkit.aggregation.running_aggregation import Aggregation as Aggregation
    from toolkit.deployment.deploy import Deployed as Deployed
    from toolkit.deployment.deploy import deploy as deploy
    from toolkit.exporting.submodel_export import export as export
    from toolkit.inspection import inspect as inspect
    from toolkit.model_evaluation import evaluate as evaluate
    from toolkit.planning.model_plan import plan as plan
    from toolkit.simulation.simulate import simulate as simulate
    from toolkit.splitting import split as split
    from toolkit.submodels.global_model import GlobalModel as GlobalModel
    from toolkit.submodels.hyperparameters import TrainingConfig as TrainingConfig
    from toolkit.submodels.model_loading import load_model as load_model
    from toolkit.submodels.submodel import Submodel as Submodel

HOMES = {
    "Aggregation": "toolkit.aggregation.running_aggregation",
    "AggregationPolicy": "toolkit.aggregation.aggregation_policy",
    "Deployed": "toolkit.deployment.deploy",
    "DeviceProfile": "profiles.documents.device_profile",
    "EdgeTailorError": "profiles.errors",
    "ExportedBundle": "exporters.export",
    "Federation": "toolkit.aggregation.federation",
    "GlobalModel": "toolkit.submodels.global_model",
    "Predictor": "device_agent.inference.predictor",
    "Submodel": "toolkit.submodels.submodel",
    "TrainingConfig": "toolkit.submodels.hyperparameters",
    "UpdateRecord": "device_agent.formats.update",
    "aggregate": "toolkit.aggregation.aggregate",
    "classes": "exporters.objectives.own_loss_labels",
    "deploy": "toolkit.deployment.deploy",
    "evaluate": "toolkit.model_evaluation",
    "export": "toolkit.exporting.submodel_export",
    "inspect": "toolkit.inspection",
    "join_inputs": "exporters.recording.inputs.joined_inputs",
    "load_device": "profiles.documents.device_profile",
    "load_model": "toolkit.submodels.model_loading",
    "loss": "exporters.objectives.own_loss_labels",
    "numbers": "exporters.objectives.own_loss_labels",
    "pack_inputs": "exporters.recording.inputs.packed_inputs",
    "plan": "toolkit.planning.model_plan",
    "profile": "device_agent.profiling.profiler:profile_bundle",
    "read_partial": "toolkit.aggregation.partial_aggregates.partial",
    "read_update": "device_agent.formats.update",
    "recover": "toolkit.aggregation.recover",
    "set_input_range": "exporters.recording.inputs.input_ranges",
    "simulate": "toolkit.simulation.simulate",
    "split": "toolkit.splitting",
    "train": "device_agent.training.standalone_training",
    "write_partial": "toolkit.aggregation.partial_aggregates.partial",
}
"""The module of each public name. If the object has another name there, this follows a colon."""

__all__ = [
    "Aggregation",
    "AggregationPolicy",
    "Deployed",
    "DeviceProfile",
    "EdgeTailorError",
    "ExportedBundle",
    "Federation",
    "GlobalModel",
    "Predictor",
    "Submodel",
    "TrainingConfig",
    "UpdateRecord",
    "aggregate",
    "classes",
    "deploy",
    "evaluate",
    "export",
    "inspect",
    "join_inputs",
    "load_device",
    "load_model",
    "loss",
    "numbers",
    "pack_inputs",
    "plan",
    "profile",
    "read_partial",
    "read_update",
    "recover",
    "set_input_range",
    "simulate",
    "split",
    "train",
    "write_partial",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return __all__
