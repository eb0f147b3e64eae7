"""The configuration of one federation: the TOML file of `edgetailor serve` and `simulate`."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from msgspec import to_builtins
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictInt,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from device_agent.data.data_functions import is_reference
from device_agent.formats.evaluation_counts import EvaluationRequest
from device_agent.formats.input_range import InputRange
from device_agent.formats.manifest import Part
from device_agent.formats.packing import packed_size
from device_agent.formats.preprocessing import Images, Series, misfit
from exporters.objectives.loss_text import canonical, takes_numbers
from exporters.recording.inputs.sample_range import Inputs, parse_inputs, range_between, read_range
from profiles.cost_model.submodel_choice import Budgets
from profiles.errors import InputError
from profiles.text_formatting import counted
from profiles.units import parse_bytes, parse_duration
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.coordinator.notifications import EventName
from toolkit.coordinator.simulation_table import SimulationTable
from toolkit.data_table import preprocessing_of
from toolkit.submodels.hyperparameters import TrainingConfig
from toolkit.toml_files import KeyPath, Table, Tier, Values, checked_spec, read_table, repeated

Positive = Annotated[int, Field(ge=1)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_STALENESS, MOST_STALENESS = 10, 100
"""The default of `max_staleness` and the largest: the models of so many rounds are kept."""
MOST_KEPT_UPDATES = 3
"""The highest `keep_updates`: older rounds have no records of their updates."""
AUTO = "auto"
"""The value of `submodel` if each device gets the strongest submodel that fits it."""
ANY = "any"
"""The value of `count` if any number of devices may join."""
ENDLESS = "endless"
"""The value of `rounds` if there is no last round."""
IMPROVED = "improved"
"""The value of `when` if only a better model is released."""
SELECTIONS = ("uniform", "data-size", "oldest")
"""The values of `selection` that are not functions of the user."""


def _bytes(given: object) -> int:
    try:
        return parse_bytes(str(given))  # refuses a bare number: its unit would be a guess
    except InputError as error:
        raise ValueError(str(error)) from None


def _seconds(given: object) -> float:
    try:
        return parse_duration(str(given))  # refuses a bare number, too
    except InputError as error:
        raise ValueError(str(error)) from None


Size = Annotated[int, Field(ge=1), BeforeValidator(_bytes)]
"""Bytes, written like "256MB"."""
Span = Annotated[float, Field(gt=0), BeforeValidator(_seconds)]
"""Seconds, written like "7d"."""


def _whole_or(*words: str) -> PlainValidator:
    """Accept a whole number from 1, or one of `words`."""
    last = f'"{words[-1]}"'
    wanted = ", ".join(["a whole number from 1", *(f'"{word}"' for word in words[:-1])])

    def check(given: object) -> object:
        whole = isinstance(given, int) and not isinstance(given, bool) and given >= 1
        if whole or given in words:
            return given
        raise ValueError(f"it must be {wanted} or {last}")

    return PlainValidator(check)


def _is_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be one line of printable characters")
    return text


def _is_web_address(text: str) -> str:
    try:
        known = parse_url(text)
    except LocationParseError:
        known = parse_url("")
    if known.scheme not in ("http", "https") or not known.host or not text.isprintable():
        raise ValueError("it must start with https:// or http://, followed by a host")
    return text


def _is_selection(text: str) -> str:
    if text not in SELECTIONS and not is_reference(text):
        names = ", ".join(f'"{name}"' for name in SELECTIONS)
        raise ValueError(f'it must be one of {names}, or a function "module:callable"')
    return text


def _is_number_or_share(given: object) -> int | float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ValueError("it must be a whole number from 1, or a share of the members like 0.1")
    if not (given >= 1 if isinstance(given, int) else 0 < given <= 1):
        raise ValueError(
            "it must be a whole number from 1, or a share of the members above 0 and up to 1.0"
        )
    return given


Line = Annotated[str, Field(max_length=500), AfterValidator(_is_one_line)]
"""One line of text for the owners of devices."""
BUDGETS = ("memory", "step_time", "bandwidth")
"""The budgets of a kind of devices. They may be changed, and hold for devices that join later."""
SIMULATED = ("profile", "slowdown", "download_mbps", "upload_mbps")
"""Keys of a kind of devices that only `simulate` uses."""


class DeviceKind(Tier):
    """A kind of device: `count` devices that train `submodel`, or with AUTO a planned one.

    A kind with the count ANY is open: any number of devices may join. A device that reports that it
    cannot train gets the submodel `fallback` from the next round on.

    A planned submodel keeps these budgets: `memory` limits the agent's process, in bytes;
    `step_time` limits a training step on one batch, in seconds; `bandwidth` limits the traffic of
    one round, in bytes. With any submodel, `memory` also decides whether the devices predict with
    the whole graph or in stages.

    Only `simulate` uses the other keys. A simulated device has the speed of the device in
    `profile`, a file or a built-in name, divided by `slowdown`. Its network has `download_mbps` and
    `upload_mbps`, in 10^6 bits per second. Without these it has the profile's speeds.
    """

    count: Annotated[int | Literal["any"], _whole_or(ANY)] = 1
    fallback: str | None = None
    memory: Size | None = None
    step_time: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    bandwidth: Size | None = None
    profile: str | None = None
    slowdown: Speed | None = None
    download_mbps: Speed | None = None
    upload_mbps: Speed | None = None

    @field_validator("submodel")
    @classmethod
    def _is_spec(cls, text: str) -> str:
        return text if text == AUTO else checked_spec(text)

    @field_validator("fallback")
    @classmethod
    def _is_spec_too(cls, text: str | None) -> str | None:
        return None if text is None else checked_spec(text)

    @model_validator(mode="after")
    def _budgets_plan(self) -> Self:
        if not self.planned and (self.step_time or self.bandwidth):
            raise ValueError(
                f'step_time and bandwidth need a planned submodel; set submodel = "{AUTO}"'
            )
        return self

    @model_validator(mode="after")
    def _speeds_have_a_profile(self) -> Self:
        for key in SIMULATED:
            if self.profile is None and getattr(self, key) is not None:
                raise ValueError(f"`{key}` needs a `profile`; set `profile`, too")
        return self

    @property
    def places(self) -> int | None:
        """How many devices of this kind may be members at a time; None if any number may."""
        return self.count if isinstance(self.count, int) else None

    @property
    def planned(self) -> bool:
        """Whether a plan chooses the submodel of each device."""
        return self.submodel == AUTO

    @property
    def budgets(self) -> Budgets:
        """The budgets of a device of this kind."""
        return Budgets(memory=self.memory, step=self.step_time, traffic=self.bandwidth)


class EvaluationTable(Table):
    """The table [evaluation]: devices judge the models (federated evaluation).

    Each device keeps the `share` of its samples apart, never trains on them, and sends counts of
    its evaluations. The share 0 is off. With `by_class` devices whose owners agree also send the
    counts of each class.
    """

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    by_class: bool = False

    @property
    def request(self) -> EvaluationRequest | None:
        """What devices are asked for; None if they do not evaluate."""
        return EvaluationRequest(share=self.share, by_class=self.by_class) if self.share else None


class ReleaseTable(Table):
    """The table [release]: releases that the coordinator makes by itself, and who waits for them.

    - `every`: the coordinator releases the global model whenever this many rounds have passed.
    - `when`: the coordinator releases the best model instead, and only if that is better than all
      released models.
    - `after_rounds`: devices stay after the last round and ask for releases at this interval, in
      seconds. Without it, their agents end after the last round.
    """

    every: Positive | None = None
    when: Literal["improved"] | None = None
    after_rounds: Span | None = None

    @property
    def interval(self) -> int | None:
        """The fewest rounds from one release to the next; None if the coordinator makes none."""
        return 1 if self.every is None and self.when is not None else self.every


class NotifyTable(Table):
    """The table [notify]: whom `serve` tells what happens in the federation.

    - `url`: each event is sent to it by a POST request, as one JSON object.
    - `command`: this program is run for each event, with the same object on its standard input.
    - `events`: the names of the events; by default all.
    """

    url: Annotated[str, AfterValidator(_is_web_address)] | None = None
    command: tuple[str, ...] = ()
    events: tuple[EventName, ...] | None = None


PATHS = ("weights", "example", "held_out", "statistics", "state", "tls_cert", "tls_key")
"""Keys whose relative paths start from the folder of the file."""


class FederationConfig(Table):
    """The keys that both `serve` and `simulate` read. `load_settings` makes its paths absolute.

    - `inputs`: the inputs of a model with several, like "words:20:int64". `input_shape` follows.
    - `input_range`: the smallest and the largest number of a sample; whole numbers if both are.
    - `example`: a file with a few real samples, which show the range of each number.
    - `rounds`: ENDLESS if there is no last round.
    - `early_stopping`: the rounds end when the models have not improved for this many rounds.
    - `deadline_s`: seconds that a round may last.
    - `budget_s`: seconds that a device may compute in a round.
    - `keep`: which rounds' models stay in the state folder.
    - `keep_updates`: how many of the last rounds keep the tensors of their updates.
    - `port`: 0 chooses a free port.
    - `token_days`: lifetime of a join token, in days.
    - `phones`: serve the page with which phones join.
    - `site`: be a site of a larger fleet. A round begins with a model from Flower's server and ends
      with a partial aggregate for it.
    - `title`, `purpose`, `contact`: texts that owners of devices read before they join.
    - `data`: how pictures or CSV files of a device become samples.
    - `tls_cert`, `tls_key`: PEM files. With them the coordinator uses https.
    - `min_devices`: the first round opens when this many have joined.
    - `quorum`: a round closes early when this many updates have come.
    - `min_updates`: a round never closes with fewer updates.
    - `mode`: in asynchronous rounds, updates count in the round in which they come, with less
      weight the more rounds have closed since their model.
    - `buffer_size`: an asynchronous round closes when this many updates have come.
    - `max_staleness`: updates of a model that is older than this many rounds are refused.
    - `clients_per_round`: a round closes with this number of updates, or this share of the members.
    - `over_selection`: how many times as many devices are asked.
    - `selection`: the policy that selects them.
    - `forget_after`: a device that was not seen for these seconds loses its membership.
    """

    title: Line = ""
    purpose: Line = ""
    contact: Line = ""
    model: str
    weights: Path | None = None
    input_shape: Annotated[tuple[Positive, ...], Field(min_length=1)]
    inputs: tuple[str, ...] = ()
    input_range: tuple[StrictInt, StrictInt] | tuple[float, float] | None = None
    example: Path | None = None
    rounds: Annotated[int | Literal["endless"], _whole_or(ENDLESS)]
    early_stopping: Positive | None = None
    statistics: Path | None = None
    state: Path = Path("state")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8123
    seed: Annotated[int, Field(ge=0)] = 0
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    budget_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    min_devices: Positive | None = None
    quorum: Positive | None = None
    min_updates: Positive | None = None
    mode: Literal["sync", "async"] = "sync"
    buffer_size: Positive | None = None
    max_staleness: Annotated[int, Field(ge=0, le=MOST_STALENESS)] | None = None
    clients_per_round: Annotated[int | float | None, PlainValidator(_is_number_or_share)] = None
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.3
    selection: Annotated[str, AfterValidator(_is_selection)] = "uniform"
    forget_after: Span | None = None
    keep: Annotated[int | Literal["all", "best"], _whole_or("all", "best")] = 10
    keep_updates: Annotated[int, Field(ge=0, le=MOST_KEPT_UPDATES)] = 0
    token_days: Annotated[float, Field(gt=0, le=36500)] = 30.0
    phones: bool = True
    site: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    data: Annotated[
        Images | Series | None, PlainValidator(preprocessing_of), PlainSerializer(to_builtins)
    ] = None
    training: TrainingConfig = TrainingConfig()
    aggregation: AggregationPolicy = AggregationPolicy()
    evaluation: EvaluationTable = EvaluationTable()
    release: ReleaseTable = ReleaseTable()
    notify: NotifyTable = NotifyTable()
    devices: Annotated[tuple[DeviceKind, ...], Field(min_length=1)]

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
            raise ValueError("a path holds no null byte; give the path of a file or folder")
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
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                "`tls_cert` and `tls_key` belong together: give both files, or neither"
            )
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
    def _quorum_is_enough(self) -> Self:
        if self.quorum is not None and self.quorum < (self.min_updates or 0):
            raise ValueError(
                f"`quorum` is {self.quorum}, but a round needs `min_updates` = "
                f"{self.min_updates} updates to close: raise `quorum`, or lower `min_updates`"
            )
        return self

    @model_validator(mode="after")
    def _mode_has_its_keys(self) -> Self:
        if self.mode == "sync":
            for key in ("buffer_size", "max_staleness"):
                if getattr(self, key) is not None:
                    raise ValueError(f'`{key}` needs mode = "async": set `mode`, or remove `{key}`')
            return self
        if self.buffer_size is None:
            raise ValueError('mode = "async" needs `buffer_size`: the updates that make a round')
        if self.quorum is not None:
            raise ValueError('with mode = "async", `buffer_size` is the quorum: remove `quorum`')
        if self.buffer_size < (self.min_updates or 0):
            raise ValueError(
                f"`buffer_size` is {self.buffer_size}, but a round needs `min_updates` = "
                f"{self.min_updates} updates: raise `buffer_size`, or lower `min_updates`"
            )
        if self.site:
            raise ValueError(
                'a site needs mode = "sync": the updates of its aggregate are of one model'
            )
        if self.clients_per_round is not None:
            raise ValueError(
                '`clients_per_round` needs mode = "sync". In asynchronous rounds all devices '
                "train; in `simulate`, `participation` says how many clients train at a time"
            )
        return self

    @model_validator(mode="after")
    def _budget_ends_in_time(self) -> Self:
        if self.budget_s is not None and self.budget_s >= self.deadline_s:
            raise ValueError(
                f"`budget_s` is {self.budget_s:g}, but a round lasts `deadline_s` = "
                f"{self.deadline_s:g} seconds at most: lower `budget_s`, or raise `deadline_s`"
            )
        return self

    @model_validator(mode="after")
    def _selection_is_whole(self) -> Self:
        number = self.clients_per_round
        if number is None:
            for key in ("selection", "over_selection"):
                if key in self.model_fields_set:
                    raise ValueError(f"`{key}` needs `clients_per_round`; set that, too")
        elif self.quorum is not None:
            raise ValueError(
                "`quorum` and `clients_per_round` both say how many updates close a round: remove "
                "`quorum`"
            )
        elif isinstance(number, int) and number < (self.min_updates or 0):
            raise ValueError(
                f"`clients_per_round` is {number}, but a round needs `min_updates` = "
                f"{self.min_updates} updates to close: raise it, or lower `min_updates`"
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

    @model_validator(mode="before")
    @classmethod
    def _inputs_have_a_shape(cls, given: Any) -> Any:
        texts = given.get("inputs") if isinstance(given, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return given
        if "input_shape" in given:
            raise ValueError("`inputs` and `input_shape` both give the shape: remove one of them")
        try:
            return {**given, "input_shape": [packed_size(parse_inputs(texts))]}
        except InputError as error:
            raise ValueError(f"`inputs`: {error}") from None

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if self.input_range is None:
            return self
        if self.example is not None or self.inputs:
            raise ValueError(
                "`input_range` does not go with `example` or `inputs`: remove one of them"
            )
        try:
            range_between(*self.input_range)
        except InputError as error:
            raise ValueError(f"`input_range`: {error}") from None
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """The inputs that are packed into a sample; empty if a sample is one array."""
        return parse_inputs(self.inputs)

    def known_inputs(self) -> Inputs:
        """What the file says about the samples: the range of their numbers, and their inputs.

        Raises DataError if `example` cannot be used.
        """
        known: InputRange = ()
        if self.input_range is not None:
            known = range_between(*self.input_range)
        elif self.example is not None:
            known = read_range(self.example, self.input_shape, self.parts)
        return Inputs(known, self.parts)

    @property
    def places(self) -> int | None:
        """How many devices may be members at a time; None if any number may."""
        is_open = any(kind.places is None for kind in self.devices)
        return None if is_open else self._fixed_places

    @property
    def _fixed_places(self) -> int:
        return sum(kind.places or 0 for kind in self.devices)

    def updates_wanted(self, members: int) -> int | None:
        """How many updates close a round of a federation with `members` devices.

        None if a round asks all devices, and waits for all of them or for `quorum`.

        Examples:
            >>> FederationConfig.model_construct(clients_per_round=0.1).updates_wanted(250)
            25
        """
        number = self.clients_per_round
        if number is None:
            return None
        wanted = number if isinstance(number, int) else max(1, round(number * members))
        return max(wanted, self.min_updates or 1)

    def devices_asked(self, wanted: int) -> int:
        """How many devices a round asks that needs `wanted` updates: `over_selection` times more.

        Examples:
            >>> FederationConfig.model_construct(over_selection=1.3).devices_asked(200)
            260
        """
        return math.ceil(round(self.over_selection * wanted, 6))

    @property
    def closing_updates(self) -> int | None:
        """How many updates close a round early; None if it waits for all of its devices."""
        return self.buffer_size if self.mode == "async" else self.quorum

    @property
    def oldest(self) -> int:
        """How old the models of updates in asynchronous rounds may be, in rounds."""
        return MAX_STALENESS if self.max_staleness is None else self.max_staleness

    @property
    def kept_models(self) -> int | Literal["all", "best"]:
        """`keep`, but at least the models that updates of the last and the open round need."""
        if self.mode == "sync" or self.keep == "all":
            return self.keep
        return max(self.oldest + 2, 1 if self.keep == "best" else self.keep)

    @property
    def last_round(self) -> int | None:
        """The number of the last round; None if there is none."""
        return self.rounds if isinstance(self.rounds, int) else None

    @property
    def expected_devices(self) -> int:
        """How many devices have to join before the first round opens.

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


Config = TypeVar("Config", bound=FederationConfig)


def load_config(path: Path) -> CoordinatorConfig:
    """Read the federation's TOML file for `serve`, see `load_settings`."""
    return load_settings(path, CoordinatorConfig)


def load_settings(path: Path, kind: type[Config], values: Values | None = None) -> Config:
    """Read the federation's TOML file; relative paths in it start from its folder.

    `values` replace those of the file, for example `{"training.epochs": 5}`.

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
        "release": ReleaseTable.model_fields,
        "notify": NotifyTable.model_fields,
        "simulation": SimulationTable.model_fields,
    }
    return list(known.get(str(table), CoordinatorConfig.model_fields))
