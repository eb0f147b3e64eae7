"""The tables [[devices]] of the federation's file: the kinds of devices."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from profiles.cost_model.submodel_choice import Budgets
from toolkit.coordinator.federation_file.value_types import Size, Speed, whole_or
from toolkit.toml_files import Tier, checked_spec

AUTO = "auto"
"""The value of `submodel` if each device gets the strongest submodel that fits it."""
ANY = "any"
"""The value of `count` if any number of devices may join."""
BUDGETS = ("memory", "step_time", "bandwidth")
"""The budgets of a kind of devices. A changed budget applies to devices that join later."""
SIMULATED = ("profile", "slowdown", "download_mbps", "upload_mbps")
"""Keys of a kind of devices that only `simulate` uses."""


class DeviceKind(Tier):
    """A kind of device: `count` devices that train `submodel`, or with AUTO a planned submodel.

    A kind with the count ANY is open: any number of devices may join. A device that reports that it
    cannot train gets the submodel `fallback` from the next round on.

    A planned submodel keeps these budgets: `memory` limits the agent's process, in bytes;
    `step_time` limits a training step on one batch, in seconds; `bandwidth` limits the traffic of
    one round, in bytes. With any submodel, `memory` also decides whether the devices predict with
    the whole graph or in stages.

    Only `simulate` uses the other keys. A simulated device has the speed of the device in `profile`
    (a file or a built-in name), divided by `slowdown`. Its network has `download_mbps` and
    `upload_mbps`, in 10^6 bits per second. Without these keys it has the profile's speeds.
    """

    count: Annotated[int | Literal["any"], whole_or(ANY)] = 1
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
