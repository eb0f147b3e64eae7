"""One global model over the rounds: bundles out, updates in. Knows nothing of transport."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from exporters.bundle_writer import bundle_files
from exporters.embedded_weights import with_constants
from exporters.export import compile_graphs
from exporters.runtime_graph import Graphs
from toolkit.aggregation.aggregate import Received, aggregate
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.model_evaluation import evaluate, take_statistics
from toolkit.splitting import split
from toolkit.submodels import global_model
from toolkit.submodels.model_loading import load_global
from toolkit.submodels.one_step_submodel import scale_learning_rates
from toolkit.submodels.submodel import Submodel
from toolkit.submodels.training_config import TrainingConfig


class Federation:
    """A global model and the submodels that its devices train.

    Graphs are lowered once for each submodel; every round only cuts new weights for them.
    """

    def __init__(
        self,
        model_reference: str,
        input_shape: tuple[int, ...],
        training: TrainingConfig,
        weights_file: str | Path | None = None,
        seed: int = 0,
        policy: AggregationPolicy | None = None,
    ) -> None:
        """Build the model with `seed`. Raises ModelError or InputError as `load_model` does."""
        self.module, self.model = load_global(model_reference, weights_file, seed)
        self.input_shape = input_shape
        self.training = training
        self.policy = policy or AggregationPolicy()
        self._submodels: dict[str, Submodel] = {}
        self._graphs: dict[str, Graphs] = {}
        self._bundles: dict[tuple[str, int], dict[str, bytes]] = {}

    def submodel(self, spec: str) -> Submodel:
        """The submodel of `spec`, split once. Raises SpecError where the model cannot give it."""
        if spec not in self._submodels:
            self._submodels[spec] = split(self.module, spec, self.input_shape, self.training)
        return self._submodels[spec]

    def bundle(self, spec: str, round_: int = 1) -> dict[str, bytes]:
        """Files of the bundle for `spec` in round `round_` (from 1): name to content."""
        if (spec, round_) not in self._bundles:
            submodel = self.submodel(spec)
            if spec not in self._graphs:
                self._graphs[spec] = compile_graphs(submodel.program)
            program = scale_learning_rates(
                submodel.program, self.training.round_decay ** (round_ - 1)
            )
            values = submodel.cut(self.model)
            graphs = with_constants(program, self._graphs[spec], values)
            self._bundles[spec, round_] = bundle_files(
                program, graphs, values, self.model.fingerprint()
            )
        return self._bundles[spec, round_]

    def fold(self, updates: Iterable[Received]) -> None:
        """Make the next global model of `updates`. Raises UpdateError and changes nothing."""
        new = aggregate(self.model, updates, self.policy)
        # The last round's subspaces are where this round's factorizations start.
        self._replace(replace(new, factorizer=self.model.factorizer))

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float | None, float]:
        """Accuracy and mean loss of the global model on samples `x`, labels `y`.

        A regression has no accuracy.

        With static batch norm the model takes its statistics from `x` first. Raises ModelError for
        samples that the model does not take, InputError for labels that it has no class for.
        """
        self.model.load_into(self.module)
        if self.training.batch_norm == "static":
            take_statistics(self.module, x)
            self._replace(replace(self.model, tensors=global_model.from_model(self.module).tensors))
        found = evaluate(self.module, x, y, "The held-out data", self.training.loss)
        return found.accuracy, found.loss

    def save(self) -> bytes:
        """The global model, kept factors included, as a safetensors file."""
        return self.model.save()

    def load(self, data: bytes) -> None:
        """Take up a saved global model. Raises InputError where it is not of this model."""
        loaded = global_model.from_bytes(data, "The saved global model")
        global_model.check_fits(loaded, self.module, "The saved global model")
        self._replace(loaded)

    def _replace(self, model: global_model.GlobalModel) -> None:
        self.model = model
        self._bundles.clear()
