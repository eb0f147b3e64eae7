"""The server side: cutting models, aggregating updates, coordinating rounds.

The names below are loaded when they are first used: torch takes seconds to import, and
`edgetailor --help` does not need it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.aggregation import aggregate
    from toolkit.federation import Federation
    from toolkit.loading import load_model
    from toolkit.policy import AggregationPolicy
    from toolkit.splitting import split
    from toolkit.training import TrainingConfig
    from toolkit.weights import GlobalModel

__all__ = [
    "AggregationPolicy",
    "Federation",
    "GlobalModel",
    "TrainingConfig",
    "aggregate",
    "load_model",
    "split",
]

HOMES = {
    "AggregationPolicy": "policy",
    "Federation": "federation",
    "GlobalModel": "weights",
    "TrainingConfig": "training",
    "aggregate": "aggregation",
    "load_model": "loading",
    "split": "splitting",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
