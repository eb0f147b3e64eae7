"""Runs rounds of one global model: makes bundles for devices, and aggregates their updates.

The caller sends the bundles and receives the updates.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from device_agent.formats.preprocessing import Preprocessing
from device_agent.privacy.gaussian_noise import RandomBytes, gaussian, secure_bytes
from exporters.bundle_writer import bundle_files
from exporters.embedded_weights import with_constants
from exporters.export import compile_graphs, with_forms
from exporters.graph_cache import default_cache
from exporters.objectives.loss_text import is_own
from exporters.objectives.objective import objective
from exporters.programs.program import with_preprocessing
from exporters.programs.program_identity import loss_code
from exporters.recording.capture import capture
from exporters.recording.inputs.sample_range import NO_INPUTS, Inputs
from exporters.runtime_graph import Graphs
from profiles.errors import InputError, UpdateError
from toolkit.aggregation.aggregate import Received, Strategy, aggregate, aggregate_checked
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.influence import Gradient, TensorInfluences, influence
from toolkit.aggregation.limits.reference import Figures, Reference, RoundLimits
from toolkit.aggregation.limits.update_bounds import Scale
from toolkit.aggregation.limits.update_limits import figures, within_limits
from toolkit.aggregation.limits.update_scales import scales
from toolkit.aggregation.privacy.budget import RoundNoise
from toolkit.aggregation.privacy.clipped_changes import add_changes, add_clipped
from toolkit.aggregation.privacy.noised_model import expected_devices, noised_model
from toolkit.aggregation.rules.rule_aggregation import (
    RuleAggregation,
    limit_statistics,
    new_aggregation,
)
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.aggregation.stale_updates import StaleUpdates, add_stale, staleness_weight
from toolkit.aggregation.update_validation import check_update, is_variance
from toolkit.evaluation_sums import Evaluation
from toolkit.families import recovering_family
from toolkit.model_evaluation import (
    evaluate,
    loss_gradient,
    take_statistics,
    trained_change,
    training_problem,
)
from toolkit.splitting import split
from toolkit.submodels import global_model
from toolkit.submodels.carried_weights import carry
from toolkit.submodels.global_model import GlobalModel
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.submodels.model_loading import load_global
from toolkit.submodels.one_step_submodel import scale_learning_rates
from toolkit.submodels.rolling_window import in_round
from toolkit.submodels.spec import parse_spec
from toolkit.submodels.submodel import Submodel

logger = logging.getLogger(__name__)


class Federation:
    """A global model and the submodels that its devices train.

    Use it in your own server program that runs several rounds. For a single round, `split`,
    `export` and `aggregate` are enough. For rounds over HTTP, use `edgetailor serve`.

    The graphs of a submodel are compiled once. In later rounds, only its weights are cut again.

    Args:
        model_reference: `package.module:function` that returns the model.
        input_shape: The shape of one sample, without the batch.
        training: How devices train.
        weights_file: The model's first weights. Default: the weights that the model is built with.
        seed: The seed that the model is built with.
        policy: The weights of updates and how far the model moves in a round.
        strategy: A function that replaces the weighted mean; see `aggregate`.
        statistics: Training samples (n, *input_shape) for the statistics of static batch norms.
            Without `statistics`, the samples of `evaluate` are used. Then the model looks better
            than it is.
        preprocessing: How the files of devices become samples; None if they have arrays.
        inputs: What you know about the samples: the range of their numbers, and the inputs that are
            packed into one sample.

    Attributes:
        held_out: Samples and labels on which no device trains, for `rule = "fltrust"`. None at
            first.

    Raises:
        ModelError: If the model cannot be loaded.
        InputError: If the weights file cannot be used, or `statistics` are given and batch norm is
            not static.

    Examples:
        >>> from toolkit.submodels.hyperparameters import TrainingConfig
        >>> federation = Federation("toolkit.models:digits_cnn", (1, 8, 8), TrainingConfig())
        >>> str(federation.submodel("width:0.5").spec)
        'width:0.5'
    """

    def __init__(
        self,
        model_reference: str,
        input_shape: tuple[int, ...],
        training: TrainingConfig,
        weights_file: str | Path | None = None,
        seed: int = 0,
        policy: AggregationPolicy | None = None,
        strategy: Strategy | None = None,
        statistics: np.ndarray | None = None,
        preprocessing: Preprocessing | None = None,
        inputs: Inputs = NO_INPUTS,
    ) -> None:
        _check_statistics(training, statistics)
        self._first = partial(load_global, model_reference, weights_file, seed, inputs)
        self.module, self.model = self._first()
        self.input_shape = input_shape
        self.training = training
        self.policy = policy or AggregationPolicy()
        self.strategy = strategy
        self.statistics = statistics
        self.preprocessing = preprocessing
        self.held_out: tuple[np.ndarray, np.ndarray] | None = None
        self._submodels: dict[str, Submodel] = {}
        self._graphs: dict[str, Graphs] = {}
        self.model.lend_to(self.module)  # one copy in memory

    def submodel(self, spec: str) -> Submodel:
        """The submodel of `spec`. The model is split only at the first call.

        Raises:
            SpecError: The model cannot be split in this way.
            InputError: The preprocessing does not fit this model.
        """
        if spec not in self._submodels:
            submodel = split(self.module, spec, self.input_shape, self.training)
            program = with_preprocessing(submodel.program, self.preprocessing)
            self._submodels[spec] = replace(submodel, program=program)
        return self._submodels[spec]

    def bundle(self, spec: str, round_: int = 1) -> dict[str, bytes]:
        """The files of the bundle for `spec` in round `round_` (from 1): contents by file name."""
        submodel = in_round(self.submodel(spec), round_)
        if spec not in self._graphs:
            program = submodel.program
            compiled = compile_graphs(program)
            self._graphs[spec] = with_forms(program, compiled, default_cache())
        program = scale_learning_rates(submodel.program, self.training.rate_factor(round_))
        values = submodel.cut(self.model)
        graphs = with_constants(program, self._graphs[spec], values)
        return bundle_files(program, graphs, values, self.model.fingerprint())

    def loss_code(self) -> str | None:
        """A description of the user's own loss, made by `loss_code`; None for built-in losses."""
        if not is_own(self.training.loss):
            return None
        captured = capture(self.module, self.input_shape, own_loss=True)
        return loss_code(objective(self.training.loss, captured.outputs))

    def fold(self, updates: Iterable[Received]) -> None:
        """Aggregate `updates` into the next global model.

        Raises UpdateError for an update that does not fit; the model then stays unchanged.
        """
        trusted = self._trusted()
        self._follow(aggregate(self.model, updates, self.policy, self.strategy, trusted=trusted))

    def fold_checked(self, updates: Iterable[Received], limits: RoundLimits | None = None) -> None:
        """Do the same as `fold`, but without the checks: `check` has accepted `updates`.

        If `limits` are given, each update is limited before it is aggregated.
        """
        policy, trusted = self.policy, self._trusted()
        self._follow(
            aggregate_checked(
                self.model, updates, policy, self.strategy, limits=limits, trusted=trusted
            )
        )

    def fold_stale(
        self,
        updates: Iterable[Received],
        stale: Iterable[StaleUpdates],
        limits: RoundLimits | None = None,
    ) -> None:
        """Aggregate checked `updates` of this model, and checked updates of earlier versions of it.

        `stale` has one entry for each earlier version. The older the version, the less its updates
        count; see `stale_updates.py`. Call `keep_factors` before you make the first bundles. If
        `limits` are given, each update is limited first.

        Raises:
            UpdateError: There is no update; the model then stays unchanged.
            InputError: The federation has a `strategy`, which cannot take earlier versions.
        """
        if self.strategy is not None:
            raise InputError(
                "A `strategy` needs updates of one version of the model, but updates of several "
                "versions came. Remove `strategy`, or use synchronous rounds.",
                code="option.conflict",
                options=["strategy", "stale"],
            )
        aggregation = Aggregation(self.model, self.policy)
        for record, arrays in within_limits(updates, limits, self.model, self.policy):
            aggregation.add_checked(record, arrays)
            del arrays  # otherwise two updates are in memory while the next one is read
        for version in stale:
            share = staleness_weight(version.staleness)
            own = within_limits(version.updates, limits, version.model, self.policy, share)
            add_stale(aggregation, version._replace(updates=own))
        limit_statistics(aggregation, limits)
        self.take_stale(aggregation)

    def fold_versions(
        self,
        updates: Iterable[Received],
        stale: Iterable[tuple[int, bytes, Iterable[Received]]],
        limits: RoundLimits | None = None,
    ) -> None:
        """Do the same as `fold_stale`. An entry of `stale` is (staleness, saved model, updates).

        Raises UpdateError if there is no update; the model then stays unchanged.
        """
        versions = (StaleUpdates(tau, self.saved(data), group) for tau, data, group in stale)
        self.fold_stale(updates, versions, limits)

    def keep_factors(self, specs: Iterable[str]) -> None:
        """Keep factors for each submodel in `specs` whose family averages factors.

        Without this call, a family computes new factors in each round until its first update
        arrives. In that case, the factors of two versions cannot be compared.
        """
        kept = {**self.model.kept}
        for spec in map(parse_spec, specs):
            family = recovering_family(spec)
            if family.averages_factors and spec.head not in kept:
                table = self.submodel(str(spec)).program.tensors
                factors = [entry for entry in table if entry.factor is not None]
                kept[spec.head] = family.received(spec.head, factors, self.model)
        self._follow(replace(self.model, kept=kept))

    def new_aggregation(self) -> Aggregation | RuleAggregation:
        """Make an aggregation for updates of this model, by the federation's policy; see `take`."""
        return new_aggregation(self.model, self.policy, self._trusted())

    def _trusted(self) -> Mapping[str, Tensor] | None:
        """The change that the rule compares updates with, if it needs one."""
        if self.policy.rule != "fltrust" or self.held_out is None:
            return None
        return self.trusted_change(*self.held_out)

    def take(self, aggregation: Aggregation | RuleAggregation) -> None:
        """Use the result of `aggregation`, which has this model and policy, as the next model.

        Raises UpdateError if `aggregation` has no update; the model then stays unchanged.
        """
        self._follow(aggregation.result())

    def take_stale(self, aggregation: Aggregation) -> None:
        """Do the same as `take`. Factors that no update contains are also fitted to the new model.

        In asynchronous rounds, a slow device may train factors while the other devices make many
        versions. Its factors are then compared with the factors of the newest version.

        Raises UpdateError if there is no update; the model then stays unchanged.
        """
        self.take(aggregation)
        idle = self.model.kept.keys() - aggregation.factors.keys()
        fitted = {key: self._refitted(key, self.model) for key in sorted(idle)}
        self._follow(replace(self.model, kept={**self.model.kept, **fitted}))

    def fold_noised(
        self,
        updates: Iterable[Received],
        devices: Mapping[str, float],
        round_: int,
        noise: RoundNoise,
    ) -> float | None:
        """Aggregate the clipped changes of checked updates, with noise of a secure generator.

        If `noise` also covers the share of changes that are within the clip, returns this share
        with noise. See `take_noised` for the other arguments and errors.
        """
        aggregation, votes = Aggregation(self.model, self.policy), 0.0
        for update in updates:
            votes += noise.vote(add_clipped(aggregation, update, noise.clip))
            del update  # otherwise two updates are in memory while the next one is read
        self.take_noised(aggregation, devices, round_, noise.deviation, secure_bytes)
        return noise.share_within(votes, float(gaussian((), secure_bytes)))

    def fold_changes(
        self, changes: Iterable[Received], devices: Mapping[str, float], round_: int
    ) -> None:
        """Aggregate sums of changes to which the devices have added the noise.

        Each of `changes` has the record of a group of devices, and the sum of the group's changes
        in place of tensors. Low-rank factors are composed. See `take_noised` for the other
        arguments and errors.
        """
        aggregation = Aggregation(self.model, self.policy)
        for group in changes:
            add_changes(aggregation, group)
        self.take_noised(aggregation, devices, round_, 0.0, secure_bytes)

    def take_noised(
        self,
        aggregation: Aggregation,
        devices: Mapping[str, float],
        round_: int,
        deviation: float,
        random_bytes: RandomBytes,
    ) -> None:
        """Use the noised sum of clipped changes as the next model, see `noised_model.py`.

        Args:
            aggregation: The sums that `add_clipped` made of updates of this model; they may be
                empty.
            devices: How many devices of each submodel are expected in the sums.
            round_: The round in which the devices trained, from 1.
            deviation: The standard deviation of the noise in the sums.
            random_bytes: The source of randomness for the noise.

        Raises:
            UpdateError: A number became too large; the model then stays unchanged.
        """
        kinds = ((in_round(self.submodel(spec), round_), n) for spec, n in devices.items())
        expected = expected_devices(self.model, kinds)
        new = noised_model(aggregation, expected, deviation, random_bytes)
        kept = {key: self._refitted(key, new) for key in new.kept}
        self._follow(replace(new, kept=kept))

    def _refitted(self, key: str, model: GlobalModel) -> dict[str, Tensor]:
        """The factors that `model` keeps under `key`, fitted to its tensors."""
        factors = model.kept[key]
        table = [e for e in self.submodel(key).program.tensors if e.name in factors]
        return recovering_family(parse_spec(key)).refit(factors, table, model.tensors)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace tensors of the model by `tensors`, which were averaged elsewhere.

        Factors that the model keeps between rounds are fitted to the new tensors. Privacy noise can
        make variances negative; such variances become 0.

        Args:
            tensors: The new tensors by global name. They are converted to the model's types.

        Raises:
            InputError: The model does not have one of the tensors, or a tensor has another shape.
        """
        own = self.model.tensors
        new = {n: value.to(own[n].dtype) if n in own else value for n, value in tensors.items()}
        for name, value in new.items():
            if is_variance(name):
                new[name] = value.clamp(min=0)
        whole = replace(self.model, tensors={**own, **new})
        fitted = global_model.fitted(whole, self.module, "The averaged model")
        kept = {key: self._refitted(key, fitted) for key in fitted.kept}
        self._follow(replace(fitted, kept=kept))

    def _follow(self, new: GlobalModel) -> None:
        # This round's factorizations start from the last round's subspaces: few iterations suffice.
        self.model = replace(new, factorizer=self.model.factorizer)

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float | None, float]:
        """Evaluate the global model; see `evaluation`.

        Returns:
            The accuracy (None for a regression) and the mean loss.
        """
        evaluation = self.evaluation(x, y)
        return evaluation.accuracy, evaluation.loss

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        """Evaluate the global model, as a whole and for each class.

        If batch norm is static, its statistics are computed first. They come from the samples
        `statistics`, or from `x` if the federation was created without `statistics`.

        Args:
            x: Samples, (samples, *input_shape).
            y: Their labels, (samples,), or (samples, ...) as the model's output needs them.

        Returns:
            Accuracy, loss and errors, and figures of each class.

        Raises:
            ModelError: If the model cannot process these samples.
            InputError: If the labels do not fit its output.
        """
        self.model.lend_to(self.module)
        if self.training.batch_norm == "static":
            self._take_statistics(x if self.statistics is None else self.statistics)
        return evaluate(self.module, x, y, "The held-out data", self.training.loss)

    def check_weights(self) -> None:
        """Raise UpdateError if a weight of the global model is not finite.

        If there are no samples, use this method instead of `evaluate`. If batch norm is static, its
        statistics are computed from `statistics` first.
        """
        if self.statistics is not None:
            self.model.lend_to(self.module)
            self._take_statistics(self.statistics)
        for name, tensor in self.model.tensors.items():
            if not tensor.isfinite().all():
                raise UpdateError(
                    "The global model has a number in {tensor!r} that is not finite. If this "
                    "happens with many updates, lower learning_rate in [training] and start again "
                    "with another `state` folder.",
                    code="update.diverging-model",
                    tensor=name,
                )

    def _take_statistics(self, x: np.ndarray) -> None:
        """Compute the statistics of static batch norms from `x`, with the weights in the module."""
        take_statistics(self.module, x)
        self.model = replace(self.model, tensors=global_model.from_model(self.module).tensors)

    def check(self, update: Received, origin: str) -> None:
        """Raise UpdateError unless `update` fits the model; `origin` names it in the error.

        This method may be called while another thread aggregates, because tensors keep their
        shapes.
        """
        check_update(*update, self.model.tensors, origin)

    def scales(self, update: Received) -> Mapping[str, Scale]:
        """How large the numbers in each tensor of `update` are; `check` has accepted the update."""
        return scales(update, self.model)

    def figures(self, update: Received) -> Figures:
        """The figures of a checked update before it is limited, for the limits of a first round."""
        return figures(update, self.model, self.policy)

    def gradient(self, x: np.ndarray, y: np.ndarray) -> Gradient:
        """The gradient of the global model's loss on samples; see `loss_gradient`."""
        self.model.lend_to(self.module)
        training = self.training
        return loss_gradient(self.module, x, y, training.loss, training.batch_size)

    def disagreeing(self, updates: Iterable[Received]) -> list[int]:
        """The numbers of those checked `updates` that point against most others; at most 40%.

        Use it to find suspects if there are no held-out samples. Some of the suspects are honest,
        for example updates of devices with few classes.
        """
        aggregation = RuleAggregation(self.model, replace(self.policy, rule="krum"))
        for record, arrays in updates:
            aggregation.add_checked(record, arrays)
            del arrays  # otherwise two updates are in memory while the next one is read
        return aggregation.disagreeing()

    def trusted_change(self, x: np.ndarray, y: np.ndarray) -> Mapping[str, Tensor]:
        """How training on samples changes the global model's parameters; see `trained_change`."""
        self.model.lend_to(self.module)
        own = self.training
        return trained_change(
            self.module, x, y, own.loss, own.batch_size, own.learning_rate, own.momentum
        )

    def influence(
        self, update: Received, gradient: Gradient, reference: Reference | None
    ) -> TensorInfluences:
        """The effect of a checked update on the loss, within limits; see `influence.py`."""
        return influence(update, gradient, self.model, self.policy, reference)

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UpdateError if a training step on samples gives a number that is not finite.

        The samples are given as for `evaluate`. A model may predict well and still fail to train:
        predictions use running statistics, but training uses the statistics of its batch.
        """
        self.model.lend_to(self.module)
        few = slice(self.training.batch_size)
        problem = training_problem(self.module, x[few], y[few], self.training.loss)
        self.model.lend_to(self.module)  # the step has changed running statistics
        if problem is not None:
            raise UpdateError(
                "With this update a training step of the global model gives a number that is not "
                "finite: {problem}.",
                code="update.untrainable-model",
                problem=problem,
            )

    def save(self) -> bytes:
        """The global model as a safetensors file, with the factors that it keeps between rounds."""
        return self.model.save()

    def load(self, data: bytes) -> None:
        """Restore a saved global model. Raises InputError if it belongs to another model."""
        self.model = self.saved(data)

    def saved(self, data: bytes) -> GlobalModel:
        """Read a saved global model. Raises InputError if it belongs to another model."""
        origin = "The saved global model"
        return global_model.fitted(global_model.from_bytes(data, origin), self.module, origin)

    def carried(self, data: bytes) -> tuple[bytes, str]:
        """A state of this model; the weights come from `data`, the saved state of another model.

        See `carry` for the rules. Also returns one line that says what was carried over. This model
        does not change.

        Raises InputError if no tensor fits.
        """
        _, initial = self._first()
        old = global_model.from_bytes(data, "The saved global model")
        model, about = carry(old, initial)
        return model.save(), about.text()

    def keeps_personal(self, spec: str) -> bool:
        """Whether devices that train `spec` keep tensors of their own from round to round."""
        return any(entry.role == "personal" for entry in self.submodel(spec).program.tensors)


def _check_statistics(training: TrainingConfig, statistics: np.ndarray | None) -> None:
    """Raise InputError if `statistics` cannot be used; warn if static batch norm lacks them."""
    if training.batch_norm == "static" and statistics is None:
        logger.warning(
            "Static batch norm takes its statistics from the held-out samples, so the held-out "
            "accuracy and loss look better than they are. Set `statistics` to training samples."
        )
    if training.batch_norm != "static" and statistics is not None:
        raise InputError(
            '`statistics` is only for batch_norm = "static", but batch_norm is "{batch_norm}". '
            "Remove `statistics`, or set batch_norm to static.",
            code="option.conflict",
            options=["statistics", "batch_norm"],
            batch_norm=training.batch_norm,
        )
