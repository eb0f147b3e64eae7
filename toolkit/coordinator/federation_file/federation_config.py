"""The configuration of one federation: the TOML file of `edgetailor serve` and `simulate`."""

from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import to_builtins
from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from device_agent.formats.preprocessing import Images, Series, misfit
from device_agent.formats.protocol.secure_sums import SecureTerms
from exporters.objectives.loss_text import canonical, takes_numbers
from profiles.errors import InputError
from profiles.text_formatting import counted
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.committee import FEWEST
from toolkit.aggregation.privacy.budget import PrivacyPlan
from toolkit.coordinator.federation_file.device_kinds import ANY, DeviceKind
from toolkit.coordinator.federation_file.model_keys import ModelKeys
from toolkit.coordinator.federation_file.privacy_table import PrivacyTable, with_privacy
from toolkit.coordinator.federation_file.round_keys import RoundKeys
from toolkit.coordinator.federation_file.secure_misfit import secure_misfit
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.coordinator.federation_file.small_tables import (
    EvaluationTable,
    NotifyTable,
    ReleaseTable,
)
from toolkit.coordinator.federation_file.sweep_table import check_sweep
from toolkit.coordinator.federation_file.value_types import Line
from toolkit.data_table import preprocessing_of
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.toml_files import Table, repeated

PATHS = ("weights", "example", "held_out", "statistics", "state", "tls_cert", "tls_key")
"""Keys whose relative paths start from the folder of the file."""


class ServingKeys(Table):
    """The keys about the coordinator's state, its address, and the texts that owners read.

    - `port`: 0 chooses a free port.
    - `token_days`: lifetime of a join token, in days.
    - `phones`: serve the page with which phones join.
    - `public`: show strangers the round and the quality of the model at `/operator/public`.
    - `site`: be a site of a larger fleet. A round begins with a model from Flower's server and ends
      with a partial aggregate for that server.
    - `title`, `purpose`, `contact`: texts that owners of devices read before they join.
    - `tls_cert`, `tls_key`: PEM files. With them the coordinator uses https.
    """

    title: Line = ""
    purpose: Line = ""
    contact: Line = ""
    statistics: Path | None = None
    state: Path = Path("state")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8123
    token_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    phones: bool = True
    public: bool = False
    site: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                "`tls_cert` and `tls_key` belong together: give both files, or neither"
            )
        return self


class FederationConfig(RoundKeys, ModelKeys, ServingKeys):
    """The keys that both `serve` and `simulate` read. `load_settings` makes its paths absolute.

    - `data`: how pictures or CSV files of a device become samples.
    - `privacy`: differential privacy for devices.
    - `sweep`: values that `simulate` tries for other keys; `serve` does not use it.
    """

    data: Annotated[
        Images | Series | None, PlainValidator(preprocessing_of), PlainSerializer(to_builtins)
    ] = None
    training: TrainingConfig = TrainingConfig()
    aggregation: AggregationPolicy = AggregationPolicy()
    evaluation: EvaluationTable = EvaluationTable()
    privacy: PrivacyTable | None = None
    release: ReleaseTable = ReleaseTable()
    notify: NotifyTable = NotifyTable()
    # This key is not stored with the settings, because more values may be tried later.
    sweep: Annotated[dict[str, Any] | None, AfterValidator(check_sweep)] = Field(
        default=None, exclude=True
    )
    devices: Annotated[tuple[DeviceKind, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _privacy_sets_keys(cls, given: Any) -> Any:
        return with_privacy(given)

    @field_validator("training", "aggregation", mode="wrap")
    @classmethod
    def _name_table(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        try:
            if isinstance(value, dict) and isinstance(value.get("loss"), list):
                value = {**value, "loss": canonical(value["loss"])}
            return handler(value)
        except InputError as error:
            values = {**error.values, "table": info.field_name, "problem": str(error)}
            raise InputError("[{table}] {problem}", code=error.code, **values) from None

    @field_validator(*PATHS, check_fields=False)
    @classmethod
    def _can_be_a_path(cls, path: Path | None) -> Path | None:
        if "\0" in str(path):
            raise ValueError(
                "a path must not contain a null byte; give the path of a file or folder"
            )
        return path

    @model_validator(mode="after")
    def _unique_kinds(self) -> Self:
        twice = repeated([kind.name for kind in self.devices])
        if twice:
            raise ValueError(
                f"two kinds of devices have the same name: {twice}; give each its own name"
            )
        return self

    @model_validator(mode="after")
    def _data_fit(self) -> Self:
        if self.data is not None:
            wrong = misfit(
                self.data,
                self.input_shape,
                "float32",
                labels=None,
                regression=takes_numbers(self.training.loss),
            )
            if wrong is not None:
                raise ValueError(f"[data] does not fit: {wrong}")
        return self

    @model_validator(mode="after")
    def _places_suffice(self) -> Self:
        most = self.places
        for key in ("min_devices", "quorum", "min_updates", "buffer_size", "clients_per_round"):
            number = getattr(self, key)
            if most is not None and number is not None and number > most:
                raise ValueError(
                    f"`{key}` is {number}, but only {counted(most, 'device')} can join: lower "
                    f'`{key}`, or set count = "{ANY}" for a kind'
                )
        return self

    @model_validator(mode="after")
    def _sites_are_synchronous(self) -> Self:
        if self.site and self.mode == "async":
            raise ValueError(
                'a site needs mode = "sync", because all updates in its aggregate must be of one '
                "model"
            )
        return self

    @model_validator(mode="after")
    def _rule_has_all_updates(self) -> Self:
        rule = self.aggregation.rule
        if rule != "mean" and (self.site or self.mode == "async"):
            key = "site = true" if self.site else 'mode = "async"'
            raise ValueError(
                f'rule = "{rule}" of [aggregation] needs all updates of one model together, so it '
                f'cannot be used with {key}: set rule = "mean"'
            )
        return self

    @model_validator(mode="after")
    def _privacy_is_kept(self) -> Self:
        private = self.device_privacy
        if private is None:
            return self
        for key, breaks, why in (
            ('mode = "async"', self.mode == "async", "one device may send several updates"),
            ("site = true", self.site, "a site sends sums without noise"),
            (f'rule = "{self.aggregation.rule}"', self.aggregation.rule != "mean",
             "the noise is right only for a sum of updates"),
            ("quorum", self.quorum is not None,
             "one device could then decide whether the update of another device counts"),
            ("min_updates", self.min_updates is not None and self.clients_per_round is not None,
             "a round without enough updates opens again with other devices"),
            (f'selection = "{self.selection}"', self.selection != "uniform",
             "each device must be asked with the same probability"),
            ("share in [evaluation]", self.evaluation.share > 0,
             "counts from devices get no noise"),
        ):  # fmt: skip
            if breaks:
                raise ValueError(
                    f"`{key}` cannot be combined with [privacy], because {why}: remove it"
                )
        if private.noise_multiplier is None and self.last_round is None:
            raise ValueError(
                "[privacy] without a last round needs `noise_multiplier`: set it, or a number of "
                "`rounds`"
            )
        delta, most = private.delta, self.places
        if delta is not None and most is not None and delta > 1 / most:
            raise ValueError(
                f"`delta` of [privacy] is {delta:g}. With {counted(most, 'device')} it must be at "
                f"most {1 / most:g}: otherwise publishing the data of one random device would be "
                "allowed"
            )
        return self

    @model_validator(mode="after")
    def _samples_stay_private(self) -> Self:
        if self.training.is_private and self.evaluation.share > 0:
            raise ValueError(
                "`share` of [evaluation] cannot be combined with `sample_clip` of [training], "
                "because counts from devices get no noise: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _committee_judges_all_updates(self) -> Self:
        if self.evaluation.committee is not None and self.mode == "async":
            raise ValueError(
                '`committee` of [evaluation] needs mode = "sync": in asynchronous rounds, the '
                "devices compare the new model with different earlier models"
            )
        for key, most in (
            ("count", self.places), ("quorum", self.quorum),
            ("clients_per_round", self.clients_per_round),
        ):  # fmt: skip
            if self.evaluation.committee and isinstance(most, int) and most < FEWEST:
                raise ValueError(
                    f"a `committee` of [evaluation] needs the updates of {FEWEST} devices in each "
                    f"round, but `{key}` allows {most}: raise it, or remove `committee`"
                )
        return self

    @model_validator(mode="after")
    def _asking_devices_stay_members(self) -> Self:
        after, forget = self.release.after_rounds, self.forget_after
        if after is not None and forget is not None and forget <= after:
            raise ValueError(
                "`forget_after` must be longer than `after_rounds` of [release]: otherwise devices "
                "that wait for a release lose their places between two requests"
            )
        return self

    @property
    def device_privacy(self) -> PrivacyTable | None:
        """The table [privacy] if it asks for differential privacy; None otherwise."""
        return None if self.privacy is None or self.privacy.clip is None else self.privacy

    def asking_probability(self, members: int) -> float:
        """The probability with which a round asks each of `members`, for differential privacy."""
        members = max(members, self.expected_devices)
        wanted = self.updates_wanted(members)
        return 1.0 if wanted is None else min(1.0, wanted / members)

    def counted_probability(self, members: int) -> float:
        """The value of `asking_probability` that is used to compute epsilon.

        With secure sums the probability is 1, because the coordinator knows whom it asks. Without
        secure sums, a round that would ask nobody draws again, so each device is asked with a
        higher probability.
        """
        asked = self.asking_probability(members)
        if asked == 1 or (self.privacy is not None and self.privacy.secure_aggregation):
            return 1.0
        nobody = (1 - asked) ** max(members, self.expected_devices)
        return min(1.0, asked / (1 - nobody))

    def privacy_plan(self) -> PrivacyPlan | None:
        """The differential privacy of the rounds for devices; None without it.

        Raises InputError if no noise is enough for the budget, or `dp-accounting` is missing.
        """
        private = self.device_privacy
        if private is None:
            return None
        return private.plan(self.counted_probability(0), self.last_round)

    def secure_terms(self, plan: PrivacyPlan | None) -> SecureTerms | None:
        """The terms of secure sums with the noise of `plan`, if any; None without secure sums."""
        if self.privacy is None or not self.privacy.secure_aggregation:
            return None
        return self.privacy.terms(plan)

    @property
    def places(self) -> int | None:
        """How many devices may be members at a time; None if any number may."""
        is_open = any(kind.places is None for kind in self.devices)
        return None if is_open else self._fixed_places

    @property
    def _fixed_places(self) -> int:
        return sum(kind.places or 0 for kind in self.devices)

    @property
    def expected_devices(self) -> int:
        """The first round opens only when this many devices have joined.

        By default this is the sum of all `count` that are numbers, and at least 1.
        """
        return self.min_devices or self._fixed_places or 1

    def kind(self, name: str) -> DeviceKind:
        """The kind called `name`."""
        return next(kind for kind in self.devices if kind.name == name)


class CoordinatorConfig(FederationConfig):
    """The keys that `serve` reads. It checks the table [simulation], but does not use it."""

    held_out: Path | None = None
    simulation: SimulationTable | None = None

    @model_validator(mode="after")
    def _rule_has_samples(self) -> Self:
        if self.aggregation.rule == "fltrust" and self.held_out is None:
            raise ValueError(
                'rule = "fltrust" of [aggregation] compares updates with a training on held-out '
                "samples: set `held_out`, or use another rule"
            )
        return self

    @model_validator(mode="after")
    def _secure_sums_are_possible(self) -> Self:
        secure = self.privacy is not None and self.privacy.secure_aggregation
        if secure and (why := secure_misfit(self)) is not None:
            raise ValueError(f"secure_aggregation of [privacy] cannot be combined with {why}")
        return self
