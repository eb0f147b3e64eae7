"""The global model that a federation's file describes, and the samples that it names."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profiles.progress import Report, silent
from toolkit.coordinator.federation_file.federation_config import FederationConfig
from toolkit.coordinator.sample_files import read_samples

if TYPE_CHECKING:
    from toolkit.aggregation.federation import Federation


def federation(config: FederationConfig, report: Report = silent) -> "Federation":
    """The global model that `config` describes, split for every kind of device.

    `report` is called with each stage. Raises ModelError, SpecError, InputError or DataError.
    """
    from toolkit.aggregation.federation import Federation

    report(f"loading the model {config.model}")
    statistics = None
    if config.statistics is not None:
        statistics, _ = own_samples(config, config.statistics, "statistics")
    model = Federation(
        config.model,
        config.input_shape,
        config.training,
        config.weights,
        config.seed,
        config.aggregation,
        statistics=statistics,
        preprocessing=config.data,
        inputs=config.known_inputs(),
    )
    # Split now, so that a spec that the model cannot satisfy ends the server before it starts.
    for spec in _specs(config):
        report(f"splitting {spec}")
        model.submodel(spec)
    if config.device_privacy is not None:
        from toolkit.aggregation.privacy.clipped_changes import refuse_statistics

        for spec in ["full", *_specs(config)]:  # planned kinds may get any submodel
            refuse_statistics(model.submodel(spec))
    if config.mode == "async":
        model.keep_factors(_specs(config))
    return model


def own_samples(
    config: FederationConfig, path: Path, key: str = "held_out"
) -> tuple[np.ndarray, np.ndarray]:
    """Read the samples and labels at `path`, which the federation's file names in `key`.

    Raises InputError or DataError, see `read_samples`.
    """
    return read_samples(
        path, config.input_shape, config.training.labels, key, config.data, config.parts
    )


def _specs(config: FederationConfig) -> list[str]:
    """The submodels that the kinds of devices name, each once."""
    named = [kind.submodel for kind in config.devices if not kind.planned]
    fallbacks = [kind.fallback for kind in config.devices if kind.fallback is not None]
    return list(dict.fromkeys([*named, *fallbacks]))
