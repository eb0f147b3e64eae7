"""The server side: cutting models, aggregating updates, coordinating rounds."""

from toolkit.aggregation import aggregate
from toolkit.federation import Federation
from toolkit.loading import load_model
from toolkit.splitting import split
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel

__all__ = ["Federation", "GlobalModel", "TrainingConfig", "aggregate", "load_model", "split"]
