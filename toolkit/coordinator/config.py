"""The configuration of one federation: the TOML file that `edgetailor serve` is given."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from profiles.errors import InputError, SpecError
from toolkit.families import family_named
from toolkit.policy import AggregationPolicy
from toolkit.spec import parse_spec
from toolkit.training import TrainingConfig

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that is not known, in a table and in a dataclass."""

Positive = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceKind(_Table):
    """A kind of device: `count` devices that all train `submodel`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=40)]
    submodel: str
    count: Positive = 1

    @field_validator("submodel")
    @classmethod
    def _is_spec(cls, text: str) -> str:
        try:
            spec = parse_spec(text)
            family_named(spec.family)
            return str(spec)
        except SpecError as error:
            raise ValueError(str(error)) from None


class CoordinatorConfig(_Table):
    """All of the file; after `load_config` its paths are absolute.

    `deadline_s` is in seconds, `port` 0 means any free one.
    """

    model: str
    weights: Path | None = None
    input_shape: Annotated[tuple[Positive, ...], Field(min_length=1)]
    rounds: Positive
    held_out: Path
    state: Path = Path("state")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8123
    seed: Annotated[int, Field(ge=0)] = 0
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    training: TrainingConfig = TrainingConfig()
    aggregation: AggregationPolicy = AggregationPolicy()
    devices: Annotated[tuple[DeviceKind, ...], Field(min_length=1)]

    @field_validator("training", "aggregation", mode="wrap")
    @classmethod
    def _name_table(
        cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        try:
            return handler(value)
        except InputError as error:
            raise InputError(f"[{info.field_name}] {error}") from None

    @model_validator(mode="after")
    def _unique_kinds(self) -> Self:
        names = [kind.name for kind in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"devices are named twice: {', '.join(twice)}; give each its own name")
        return self

    @property
    def expected_devices(self) -> int:
        """How many devices the fleet has."""
        return sum(kind.count for kind in self.devices)

    def kind(self, name: str) -> DeviceKind:
        """The kind called `name`."""
        return next(kind for kind in self.devices if kind.name == name)


def load_config(path: Path) -> CoordinatorConfig:
    """Read the TOML file at `path`; relative paths in it start from its folder.

    Raises InputError, one sentence that names file, key, what came and what is allowed.
    """
    content = _read(path)
    try:
        config = CoordinatorConfig.model_validate(content)
    except ValidationError as error:
        raise InputError(_sentence(path, _first(error))) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    places = {key: getattr(config, key) for key in ("weights", "held_out", "state")}
    folder = path.resolve().parent
    return config.model_copy(
        update={key: folder / place for key, place in places.items() if place is not None}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no TOML file: it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML file: {error}.") from None


def _first(error: ValidationError) -> ErrorDetails:
    """The mistake to name; a key that is not known explains one that is missing."""
    return min(error.errors(), key=lambda mistake: mistake["type"] not in UNKNOWN)


def _sentence(path: Path, error: ErrorDetails) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    key = key.removeprefix(".")
    if error["type"] in UNKNOWN:
        return f"{path}: there is no key `{key}`; {_known_keys(error['loc'])}."
    if error["type"] == "missing":
        return f"{path}: the key `{key}` is missing; {_known_keys(error['loc'])}."
    problem = error["msg"].removeprefix("Value error, ").rstrip(".")
    if not key:
        return f"{path}: {problem}."
    return f"{path}: `{key}` is {error['input']!r}: {problem}."


def _known_keys(place: tuple[int | str, ...]) -> str:
    if len(place) > 1 and place[0] == "training":
        names = list(TrainingConfig.__dataclass_fields__)
    elif len(place) > 1 and place[0] == "aggregation":
        names = list(AggregationPolicy.__dataclass_fields__)
    elif len(place) > 1 and place[0] == "devices":
        names = list(DeviceKind.model_fields)
    else:
        names = list(CoordinatorConfig.model_fields)
    return f"the keys here are {', '.join(names)}"
