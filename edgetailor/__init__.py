"""EdgeTailor's public API.

Every name is loaded when it is first used: importing this package imports neither torch nor numpy.

Example:
    >>> import edgetailor as et
    >>> "split" in dir(et)
    True
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exporters.export import ExportedBundle as ExportedBundle
    from exporters.export import compile_graphs as compile_graphs
    from exporters.export import export as export
    from toolkit.aggregation.aggregate import aggregate as aggregate
    from toolkit.aggregation.aggregation_policy import AggregationPolicy as AggregationPolicy
    from toolkit.aggregation.federation import Federation as Federation
    from toolkit.splitting import split as split
    from toolkit.submodels.global_model import GlobalModel as GlobalModel
    from toolkit.submodels.model_loading import load_model as load_model
    from toolkit.submodels.training_config import TrainingConfig as TrainingConfig

HOMES = {
    "AggregationPolicy": "toolkit.aggregation.aggregation_policy",
    "ExportedBundle": "exporters.export",
    "Federation": "toolkit.aggregation.federation",
    "GlobalModel": "toolkit.submodels.global_model",
    "TrainingConfig": "toolkit.submodels.training_config",
    "aggregate": "toolkit.aggregation.aggregate",
    "compile_graphs": "exporters.export",
    "export": "exporters.export",
    "load_model": "toolkit.submodels.model_loading",
    "split": "toolkit.splitting",
}
"""The module of every public name."""

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
