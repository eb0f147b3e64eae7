"""The federation's file as `edgetailor simulate` reads it."""

from itertools import chain, repeat
from pathlib import Path
from typing import Self

from pydantic import model_validator

from device_agent.data.data_functions import is_reference
from profiles.errors import InputError
from profiles.text_formatting import counted
from toolkit.coordinator.federation_file.device_kinds import AUTO, DeviceKind
from toolkit.coordinator.federation_file.federation_config import FederationConfig
from toolkit.coordinator.federation_file.load_config import load_settings
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.simulation.simulated_time import simulated_device
from toolkit.toml_files import Values


class SimulationConfig(FederationConfig):
    """The content of the file for `simulate`. Keys for coordinators are checked but not used."""

    held_out: Path | None = None
    simulation: SimulationTable

    @model_validator(mode="after")
    def _submodels_are_known(self) -> Self:
        for kind in self.devices:
            if kind.planned:
                raise ValueError(
                    f'the kind "{kind.name}" has submodel = "{AUTO}", which needs a real device; '
                    "give a simulated kind a submodel"
                )
        return self

    @model_validator(mode="after")
    def _kinds_hold_all_clients(self) -> Self:
        fixed = sum(kind.places or 0 for kind in self.devices)
        opened = sum(kind.places is None for kind in self.devices)
        clients = self.simulation.clients
        if opened and clients is None:
            raise ValueError('a kind has count = "any": set `clients` in [simulation]')
        if clients is not None and (clients < fixed + opened if opened else clients != fixed):
            more = f' and {counted(opened, "kind")} with count = "any"' if opened else ""
            raise ValueError(
                f"`clients` in [simulation] is {clients}, but the kinds have "
                f"{counted(fixed, 'place')}{more}: change `clients` or a `count`"
            )
        return self

    @model_validator(mode="after")
    def _some_clients_are_honest(self) -> Self:
        hostile, clients = self.simulation.hostile, len(self.kinds())
        if hostile is not None and hostile.clients(clients) >= clients:
            raise ValueError(
                f"{hostile.clients(clients)} of {clients} clients are hostile: at least one must "
                "be honest; lower `hostile.count` in [simulation]"
            )
        return self

    @model_validator(mode="after")
    def _privacy_has_clients(self) -> Self:
        if self.privacy is not None and self.privacy.secure_aggregation:
            raise ValueError(
                "`simulate` does not support secure_aggregation of [privacy], which hardly changes "
                "the model: remove it"
            )
        if self.device_privacy is not None and self.simulation.baseline is not None:
            raise ValueError(
                "[privacy] cannot be combined with a `baseline`, which averages no updates: remove "
                "one of them"
            )
        return self

    @model_validator(mode="after")
    def _clients_are_counted_once(self) -> Self:
        both = "participation" in self.simulation.model_fields_set
        if self.clients_per_round is not None and both:
            raise ValueError(
                "`clients_per_round` and `participation` in [simulation] both say how many clients "
                "a round has: remove `participation`"
            )
        return self

    @model_validator(mode="after")
    def _all_kinds_have_a_profile_or_none(self) -> Self:
        without = [kind.name for kind in self.devices if kind.profile is None]
        if without and len(without) < len(self.devices):
            raise ValueError(
                f'the kind "{without[0]}" has no `profile`, so simulated time cannot be computed: '
                "give every kind a `profile`, or remove all profiles"
            )
        return self

    @model_validator(mode="after")
    def _absences_have_times(self) -> Self:
        if self.simulation.away and self.devices[0].profile is None:
            raise ValueError(
                "`away` in [simulation] needs simulated time: give every kind of devices a "
                "`profile`, or remove `away`"
            )
        return self

    @model_validator(mode="after")
    def _asynchronous_clients_have_times(self) -> Self:
        if self.mode == "sync":
            return self
        if self.devices[0].profile is None:
            raise ValueError(
                'mode = "async" needs simulated time: give every kind of devices a `profile`'
            )
        table = self.simulation
        if table.baseline is not None or table.capacities != "fixed":
            key = "capacities" if table.baseline is None else "baseline"
            raise ValueError(f'mode = "async" cannot be combined with `{key}`: remove it')
        return self

    def kinds(self) -> list[DeviceKind]:
        """The kind of each client. Clients of the same kind follow one another.

        Kinds with `count = "any"` share the clients that are left, as evenly as possible.
        """
        fixed = sum(kind.places or 0 for kind in self.devices)
        opened = [kind.name for kind in self.devices if kind.places is None]
        rest = (self.simulation.clients or fixed) - fixed
        counts = {
            name: rest // len(opened) + (number < rest % len(opened))
            for number, name in enumerate(opened)
        }
        return list(
            chain.from_iterable(
                repeat(kind, kind.places or counts[kind.name]) for kind in self.devices
            )
        )

    def specs(self) -> list[str]:
        """The submodel of each client."""
        return [kind.submodel for kind in self.kinds()]


def load_simulation(
    path: Path,
    seed: int | None = None,
    rounds: int | None = None,
    values: Values | None = None,
) -> SimulationConfig:
    """Read the federation's TOML file for `simulate`; relative paths start from its folder.

    `values` replace values of the file, for example `{"training.epochs": 5}`. If `seed` is given,
    it replaces both seeds of the file. `rounds` replaces the number of rounds.

    Raises InputError if a key is wrong; the message has the file, the key, its value and what is
    allowed. Also raises InputError if a profile cannot be read, or lacks figures that simulated
    time needs.
    """
    config = load_settings(path, SimulationConfig, values)
    if rounds is not None:
        config = config.model_copy(update={"rounds": rounds})
    if config.last_round is None:
        raise InputError(
            '{file}: rounds = "{rounds}" has no last round, and a simulation needs one. Give '
            "`--rounds 50`.",
            code="simulation.endless",
            file=str(path),
            rounds=config.rounds,
        )
    table = config.simulation
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
        table = table.model_copy(update={"seed": seed})
    folder = path.resolve().parent
    data = table.data if is_reference(table.data) else str(folder / table.data)
    devices = tuple(_located(kind, folder) for kind in config.devices)
    for kind in devices:
        if kind.profile is not None:
            simulated_device(kind)  # raise errors now, before the model is loaded
    table = table.model_copy(update={"data": data})
    return config.model_copy(update={"simulation": table, "devices": devices})


def _located(kind: DeviceKind, folder: Path) -> DeviceKind:
    """`kind` with the absolute path of its profile, if that is a file in `folder`."""
    if kind.profile is None or not (folder / kind.profile).is_file():
        return kind
    return kind.model_copy(update={"profile": str(folder / kind.profile)})
