"""Rounds in which sites answer with whole models, so that Flower's privacy methods can be used.

The next global model is the plain mean of the sites' models, computed by Flower's FedAvg. All sites
have the same weight, because no clipped change may weigh more than another.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as legacy
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import (
    GaussianPrivacyEvent,
    Grid,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from toolkit.aggregation.federation import Federation
from toolkit.flower.masks import use_own_masks
from toolkit.flower.settings import Settings

THRESHOLD = 2 / 3
"""The share of the sites that must stay to the end of a secure round. It is above a half, so that
two separate groups of sites cannot both remove masks."""


class DenseRounds:
    """Runs dense rounds, in which sites answer with whole models, with Flower's strategies.

    Only floating-point tensors are exchanged: an integer, such as batch norm's counter, would
    dominate the norm of a change.

    Args:
        federation: The global model.
        settings: The run's configuration.
        run: The name of this run.
        rounds: How many rounds to run.
        keep: Called after each round, when the federation has the new model. It gets the round's
            number (0 for the initial model) and columns for the history. It returns accuracy and
            loss.
    """

    def __init__(
        self,
        federation: Federation,
        settings: Settings,
        run: str,
        rounds: int,
        keep: Callable[[int, dict[str, float]], MetricRecord],
    ) -> None:
        self._federation, self._settings = federation, settings
        self._rounds, self._keep = rounds, keep
        tensors = federation.model.tensors
        self._first = {n: v.numpy() for n, v in tensors.items() if v.is_floating_point()}
        names = json.dumps(list(self._first))
        self._task = {"run": run, "names": names}
        self._merged = 0
        self._accountant = _accountant(settings) if settings.noise_multiplier else None

    def start(self, grid: Grid, context: Context) -> None:
        """Run all rounds."""
        if self._settings.secure:
            self._start_secure(grid, context)
        else:
            self._start_open(grid)

    def _start_open(self, grid: Grid) -> None:
        settings = self._settings
        strategy = FedAvg(
            fraction_train=1e-9,  # as few sites as `min_train_nodes` allows
            fraction_evaluate=0.0,
            min_train_nodes=settings.sites,
            min_available_nodes=settings.sites,
            train_metrics_aggr_fn=self._count,
        )
        if settings.clipping_norm:
            strategy = DifferentialPrivacyServerSideFixedClipping(
                strategy,
                settings.noise_multiplier,
                settings.clipping_norm,
                settings.sites,
                accountant=self._accountant,
            )
        strategy.start(
            grid,
            ArrayRecord({name: Array(value) for name, value in self._first.items()}),
            self._rounds,
            timeout=settings.timeout + 10.0,
            train_config=ConfigRecord(self._task),
            evaluate_fn=lambda round_, arrays: self._adopt(round_, arrays.to_numpy_ndarrays()),
        )

    def _start_secure(self, grid: Grid, context: Context) -> None:
        """Run all rounds with Flower's earlier interface, because SecAgg+ has no other."""
        use_own_masks()
        settings = self._settings
        strategy: Any = legacy.FedAvg(
            fraction_fit=0.0,  # as few sites as `min_fit_clients` allows
            fraction_evaluate=0.0,
            min_fit_clients=settings.sites,
            min_available_clients=settings.sites,
            initial_parameters=ndarrays_to_parameters(list(self._first.values())),
            on_fit_config_fn=lambda round_: {**self._task, "server-round": round_},
            fit_metrics_aggregation_fn=self._count_secure,
            evaluate_fn=lambda round_, arrays, _: (0.0, dict(self._adopt(round_, arrays))),
        )
        if settings.clipping_norm:
            strategy = legacy.DifferentialPrivacyClientSideFixedClipping(
                strategy, settings.noise_multiplier, settings.clipping_norm, settings.sites
            )
        workflow = SecAggPlusWorkflow(
            num_shares=1.0,
            # With clipping no site may be missing, because the noise is for all of them.
            reconstruction_threshold=1.0 if settings.clipping_norm else THRESHOLD,
            max_weight=1.0,
            clipping_range=settings.range,
            timeout=settings.timeout + 10.0,
        )
        whole = LegacyContext(context, ServerConfig(self._rounds), strategy)
        DefaultWorkflow(fit_workflow=workflow)(grid, whole)

    def _count(self, replies: Sequence[object], _: str = "") -> MetricRecord:
        """Record the number of sites in a mean."""
        self._merged = len(replies)
        return MetricRecord({"sites": self._merged})

    def _count_secure(self, replies: Sequence[object]) -> dict[str, int]:
        if self._accountant is not None:
            sites, noise = self._settings.sites, self._settings.noise_multiplier
            self._accountant.compose(GaussianPrivacyEvent(noise, sites, sites))
        return dict(self._count(replies))

    def _adopt(self, round_: int, arrays: Sequence[np.ndarray]) -> MetricRecord:
        values = zip(self._first, arrays, strict=True)
        self._federation.adopt({name: torch.tensor(value) for name, value in values})
        columns: dict[str, float] = {"sites": self._merged}
        if self._accountant is not None:
            columns["epsilon"] = self._accountant.get_epsilon(self._settings.delta)
        self._merged = 0
        return self._keep(round_, columns)


def _accountant(settings: Settings) -> RdpAccountant:
    """Create an accountant of the spent privacy, for rounds in which all sites take part."""
    config = PrivacyConfig(
        target_delta=settings.delta,
        population_size=settings.sites,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )
    return RdpAccountant(config)
