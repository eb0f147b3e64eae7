"""Reads the federation's file for `serve` and `simulate`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.federation_file.device_kinds import DeviceKind
from toolkit.coordinator.federation_file.federation_config import (
    PATHS,
    CoordinatorConfig,
    FederationConfig,
)
from toolkit.coordinator.federation_file.hostile_table import HostileTable
from toolkit.coordinator.federation_file.privacy_table import PrivacyTable
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.coordinator.federation_file.small_tables import (
    EvaluationTable,
    NotifyTable,
    ReleaseTable,
)
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.toml_files import KeyPath, Values, read_table

Config = TypeVar("Config", bound=FederationConfig)


def load_config(path: Path) -> CoordinatorConfig:
    """Read the federation's TOML file for `serve`, see `load_settings`."""
    return load_settings(path, CoordinatorConfig)


def load_settings(path: Path, kind: type[Config], values: Values | None = None) -> Config:
    """Read the federation's TOML file; relative paths in it start from its folder.

    `values` replace values of the file, for example `{"training.epochs": 5}`.

    Raises InputError: one sentence with the file, the key, its value and what is allowed.
    """
    config = read_table(path, kind, _known_keys, values)
    places = {key: getattr(config, key) for key in PATHS}
    folder = path.resolve().parent
    return config.model_copy(
        update={key: folder / file for key, file in places.items() if file is not None}
    )


def _known_keys(key_path: KeyPath) -> list[str]:
    table = key_path[0] if len(key_path) > 1 else ""
    known: dict[str, Iterable[str]] = {
        "training": TrainingConfig.__dataclass_fields__,
        "aggregation": AggregationPolicy.__dataclass_fields__,
        "evaluation": EvaluationTable.model_fields,
        "devices": DeviceKind.model_fields,
        "privacy": PrivacyTable.model_fields,
        "release": ReleaseTable.model_fields,
        "notify": NotifyTable.model_fields,
        "simulation": SimulationTable.model_fields,
    }
    if key_path[:2] == ("simulation", "hostile") and len(key_path) > 2:
        return list(HostileTable.model_fields)
    return list(known.get(str(table), CoordinatorConfig.model_fields))
