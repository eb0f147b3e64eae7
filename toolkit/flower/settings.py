"""The keys of a Flower run's configuration that the project's app reads."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from device_agent.formats.manifest import AtLeastOne, Struct
from profiles.errors import InputError

Positive = Annotated[float, Meta(gt=0)]


class Settings(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The keys of `[tool.flwr.app.config]`. An unknown key is refused, because it may be a typo.

    Attributes:
        federation: The federation's file.
        out: The folder for results.
        sites: A round begins only when this many sites are connected. In a dense round exactly this
            number takes part.
        timeout: How long a site may take for a round, in seconds.
        dense: Sites answer with whole models instead of partial aggregates. The models are
            averaged.
        secure: Sum the sites' models by SecAgg+.
        range: The largest absolute value that SecAgg+ can send.
        clipping_norm: The largest L2 norm of a site's change of the model; a larger change is
            scaled down.
        noise_multiplier: Standard deviation of the noise on the sum of the changes, divided by the
            clipping norm.
        delta: The delta for which the spent epsilon is computed.
    """

    federation: str
    out: str
    sites: AtLeastOne
    timeout: Positive
    dense: bool = False
    secure: bool = False
    range: Positive = 8.0
    clipping_norm: Positive | None = None
    noise_multiplier: Annotated[float, Meta(ge=0)] = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5

    def __post_init__(self) -> None:
        """Raise ValueError for settings that contradict each other. msgspec reports it."""
        if self.noise_multiplier and self.clipping_norm is None:
            raise ValueError("`noise-multiplier` needs `clipping-norm`")
        if (self.secure or self.clipping_norm) and not self.dense:
            raise ValueError("`secure` and `clipping-norm` need `dense = true`")
        if self.secure and self.sites < 2:
            raise ValueError("`secure` needs `sites` of at least 2")


def read_settings(config: Mapping[str, object]) -> Settings:
    """Check the run's configuration.

    Args:
        config: Flower's `run_config`.

    Raises:
        InputError: A key is missing, unknown, or has a value that cannot be used.

    Examples:
        >>> read_settings({"federation": "top.toml", "out": "out", "sites": 2, "timeout": 60}).dense
        False
    """
    try:
        return msgspec.convert(dict(config), Settings)
    except msgspec.ValidationError as error:
        raise InputError(
            "The run's configuration cannot be used: {reason}. Correct `[tool.flwr.app.config]` "
            "in the app's pyproject.toml.",
            code="flower.settings",
            reason=str(error),
        ) from None
