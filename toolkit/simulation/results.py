"""The folder of a simulation: its settings, a line for each round, and the state for a restart.

A round is finished when its line is in `history.jsonl`. The next start deletes files of a round
without a line. So a killed simulation continues after its last finished round. The state also has
the model of the best round.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from device_agent.formats.atomic_files import write_file
from device_agent.formats.manifest import encode
from device_agent.formats.protocol.fleet import (
    FederatedEvaluation,
    HeldOutFigures,
    Limited,
    SpentPrivacy,
)
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.aggregation.aggregation_policy import AggregationPolicy
from toolkit.aggregation.limits.reference import Reference
from toolkit.coordinator.federation_file.federation_config import FederationConfig
from toolkit.coordinator.federation_file.simulation_table import SimulationTable
from toolkit.coordinator.federation_file.small_tables import EvaluationTable
from toolkit.coordinator.settings_check import other_loss
from toolkit.metric_logs import EVENTS, RUN_ID

SETTINGS, HISTORY, CURVES = "config.json", "history.jsonl", "curves.png"
MODEL, BEST, STATE = "global.safetensors", "best.safetensors", "state"
UNUSED = (
    "state", "host", "port", "tls_cert", "tls_key", "phones", "site", "min_devices",
    "forget_after", "keep", "keep_updates", "release", "token_days",
)  # fmt: skip
"""Settings that only a coordinator uses. Some depend on the folder of the federation's file."""
NEWER = {
    key: FederationConfig.model_fields[key].default
    for key in ("clients_per_round", "over_selection", "selection", "budget_s")
}
"""The defaults of settings that simulations of earlier versions lack."""
NEWER_OF_CLIENTS = {
    key: SimulationTable.model_fields[key].default for key in ("away", "day_s", "hostile")
}
"""The defaults of settings in the table [simulation] that earlier versions lack."""
NEWER_OF_AGGREGATION = {**asdict(AggregationPolicy()), "bounds": False, "judge": False}
"""The defaults of settings in the table [aggregation] that earlier versions lack."""
LOSS_CODE = "loss_code"
"""The setting that describes the user's own loss."""
CHANGEABLE = ("rounds", "early_stopping", *UNUSED)
"""Settings that may differ when a simulation continues."""
T = TypeVar("T")
Told = TypeVar("Told", Limited, str)


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `history.jsonl`.

    Attributes:
        round: Number of the round, from 1.
        accuracy: Accuracy of the new global model on held-out samples; None for a regression.
        loss: Mean loss of the new global model on these samples. A loss that is not finite is null
            in the file, and is read as NaN.
        held_out: Further figures on these samples, such as figures of each class, or None.
        devices: How the clients of this round judge the model that they received, which is the
            model of the previous round; None without `[evaluation]`.
        local_accuracy: Accuracy of the clients' own models after training, on samples that the
            clients held out; None if they held out no samples.
        clients: Number of clients whose updates are in the model.
        diverged: Number of clients whose training diverged; their updates are left out.
        bytes_down: Bytes of the tensors that all clients of the round received.
        bytes_up: Bytes of the tensors that they sent.
        seconds: Time of the round on this machine.
        failed: Number of clients that failed.
        late: Number of clients that were late in simulated time.
        not_needed: Number of clients whose updates came after the round had reached its goal.
        away: Number of clients that were asked, but were away during the whole round.
        simulated_s: Time that the round would take on the devices; None if they have no profiles.
        memory: The most memory that a client of the round needs, in bytes: the upper bound of the
            predicted peak of its agent. None if devices have no profiles.
        mean_staleness: Mean staleness of the updates of an asynchronous round. The staleness is
            the number of versions that were made after the version that an update was trained
            from. None in synchronous rounds.
        max_staleness: The largest staleness.
        hostile: The numbers of the hostile clients that sent an update, even if it is not in the
            model; None if no client of the federation is hostile.
        limited: What the limits changed in an update, by the client's number; None without limits.
        left_out: Why the judge left out an update, by the client's number; None without a judge.
        paused: The clients that the judge pauses after this round; None without a judge. They take
            part in no later round.
        privacy: The privacy budget that the rounds so far have spent; None without [privacy].
        backdoor: The success of the attack `backdoor`. Held-out samples of other classes get the
            trigger. This is the share of them that the model assigns to the attackers' class.
    """

    round: int
    accuracy: float | None
    loss: float
    clients: int
    diverged: int
    bytes_down: int
    bytes_up: int
    seconds: float
    local_accuracy: float | None = None
    held_out: HeldOutFigures | None = None
    devices: FederatedEvaluation | None = None
    failed: int = 0
    late: int = 0
    not_needed: int = 0
    away: int = 0
    simulated_s: float | None = None
    memory: int | None = None
    mean_staleness: float | None = None
    max_staleness: int | None = None
    hostile: list[int] | None = None
    backdoor: float | None = None
    limited: dict[str, Limited] | None = None
    left_out: dict[str, str] | None = None
    paused: list[int] | None = None
    privacy: SpentPrivacy | None = None

    @property
    def took_part(self) -> int:
        """The number of clients that received the model, even if their updates were not used."""
        left_out = len(self.left_out or ())
        return self.clients + left_out + self.diverged + self.failed + self.late + self.not_needed

    @property
    def quality(self) -> float:
        """The accuracy, or the negative loss of a regression. If this is NaN, minus infinity."""
        quality = -self.loss if self.accuracy is None else self.accuracy
        return quality if quality == quality else -math.inf


def by_client(told: Mapping[int, Told] | None) -> dict[str, Told] | None:
    """The reports about updates, by the client's number as text; None if nothing is known."""
    return None if told is None else {str(client): told[client] for client in sorted(told)}


class RunFolder:
    """The folder `root` of one simulation.

    Attributes:
        history: The finished rounds.
        kept_models: How many models stay. In asynchronous rounds clients need earlier models.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kept_models = 1
        self.history: list[RoundResult] = []
        self._newest: dict[str, int] = {}
        self._written: list[str] = []

    def read(self, settings: Mapping[str, object], force: bool) -> None:
        """Read the finished rounds of the simulation with `settings`. Changes no file.

        Args:
            settings: The settings of this simulation, in JSON's types.
            force: Whether `begin` will replace the content of the folder.

        Raises:
            InputError: The folder has other files, or a simulation with other settings.
        """
        if self._is_unused():
            return
        if not (self.root / SETTINGS).is_file():
            raise InputError(
                "{path} exists, but is not the folder of a simulation. Give another --out.",
                code="simulation.other-folder",
                path=str(self.root),
            )
        if not force:
            self._check_same(settings)
            self.history = [self._result(line) for line in self._whole_lines().splitlines()]

    def check_loss(self, code: str, force: bool) -> None:
        """Raise InputError if the user's own loss has changed since earlier rounds.

        `code` describes the present loss. With `force`, `begin` will replace the earlier rounds.
        """
        before = None if force or self._is_unused() else self.settings().get(LOSS_CODE)
        if before is not None and other_loss(before, code):
            raise InputError(
                "The code of the loss has changed since the simulation in {path} was made. Give "
                "another --out, or --force to replace this simulation.",
                code="simulation.other-settings",
                path=str(self.root),
                key="training.loss",
            )

    def begin(self, settings: Mapping[str, object], force: bool) -> None:
        """Create the folder, or delete files of an unfinished round from it."""
        if force:
            # Keep the settings until they are replaced: if the start is killed here, they show
            # that the folder is of a simulation.
            for name in (HISTORY, CURVES, MODEL, BEST, RUN_ID):
                (self.root / name).unlink(missing_ok=True)
            for name in (STATE, EVENTS):
                shutil.rmtree(self.root / name, ignore_errors=True)
        write_file(self.root / SETTINGS, json.dumps(settings, indent=1).encode() + b"\n")
        (self.root / STATE).mkdir(exist_ok=True)
        whole = len(self._whole_lines())
        with (self.root / HISTORY).open("ab") as file:
            file.truncate(whole)
        self._find_state()

    def settings(self) -> dict[str, Any]:
        """Read the settings. Raises InputError if they are not the settings of a simulation."""
        content = self._decoded(SETTINGS, (self.root / SETTINGS).read_bytes(), dict[str, Any])
        table = content.get("simulation")
        if not isinstance(table, dict):
            raise self._damaged(SETTINGS, "it has no object `simulation`")
        policy = {**NEWER_OF_AGGREGATION, **content.get("aggregation", {})}
        return {**content, "aggregation": policy, "simulation": {**NEWER_OF_CLIENTS, **table}}

    def model(self) -> bytes | None:
        """The global model after the last finished round; None before the first."""
        return self.model_of(len(self.history)) if self.history else None

    def model_of(self, round_: int) -> bytes:
        """The global model after `round_`, one of the last `kept_models` rounds."""
        return self._file("model", round_).read_bytes()

    def keep_first_model(self, model: bytes) -> None:
        """Keep `model` as the model of round 0, unless a round is finished."""
        if not self.history:
            write(self._file("model", 0), model)

    def best_model(self) -> bytes | None:
        """The global model of the best round; None before the first round.

        Also None if an earlier version of EdgeTailor simulated that round.
        """
        best = max(self.history, key=lambda result: result.quality, default=None)
        if best is None or self._newest.get("best") != best.round:
            return None
        return self._file("best", best.round).read_bytes()

    def reference(self) -> Reference:
        """The medians of updates of finished rounds, for the limits of the next round."""
        newest = self._newest.get("reference")
        if newest is None:
            return Reference()
        path = self._file("reference", newest)
        return self._decoded(f"{STATE}/{path.name}", path.read_bytes(), Reference)

    def finish_round(
        self, result: RoundResult, model: bytes, reference: Reference | None = None
    ) -> None:
        """Write the global model of a round, then its line.

        If no earlier round is as good, the model is also written as the best model. `reference` is
        for the limits of the next round.
        """
        if reference is not None:
            write(self._file("reference", result.round), encode(reference))
            self._written.append("reference")
        owners = ["model"]
        if all(result.quality > earlier.quality for earlier in self.history):
            owners.append("best")
        for owner in owners:
            write(self._file(owner, result.round), model)
        self._written += owners
        append(self.root / HISTORY, msgspec.json.encode(result) + b"\n")
        self.history.append(result)
        for owner in self._written:
            self._replace(owner, result.round)
        self._written.clear()

    def personal(self, client: int) -> dict[str, np.ndarray]:
        """The personal tensors of `client`; empty before its first round."""
        newest = self._newest.get(owner := f"personal-{client}")
        if newest is None:
            return {}
        file = self._file(owner, newest)
        try:
            return load_file(file)
        except SafetensorError as error:
            raise self._damaged(f"{STATE}/{file.name}", error) from None

    def keep_personal(self, client: int, round_: int, tensors: dict[str, np.ndarray]) -> None:
        """Write the personal tensors of `client` after `round_`, if it has any."""
        if tensors:
            arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
            owner = f"personal-{client}"
            save_file(arrays, self._file(owner, round_))
            self._written.append(owner)

    def own_model(self, client: int) -> bytes | None:
        """The model of `client`, which trains alone; None before its first round."""
        newest = self._newest.get(owner := f"own-{client}")
        return None if newest is None else self._file(owner, newest).read_bytes()

    def keep_own_model(self, client: int, round_: int, model: bytes) -> None:
        """Write the model of `client`, which trains alone, after `round_`."""
        owner = f"own-{client}"
        write(self._file(owner, round_), model)
        self._written.append(owner)

    def _file(self, owner: str, round_: int) -> Path:
        """The path of the state of `owner`, such as "model" or "own-7", after `round_`."""
        return self.root / STATE / f"{owner}-{round_}"

    def _replace(self, owner: str, round_: int) -> None:
        """Remember the newest file of `owner`, and delete the file before it."""
        if owner == "model":
            self._file(owner, round_ - self.kept_models).unlink(missing_ok=True)
        elif owner in self._newest:
            self._file(owner, self._newest[owner]).unlink()
        self._newest[owner] = round_

    def _find_state(self) -> None:
        """Find the newest file of each owner, and delete files of unfinished rounds."""
        names = [path.name.rpartition("-") for path in (self.root / STATE).glob("*-*")]
        rounds = [(int(text), owner) for owner, _, text in names if text.isdecimal()]
        for round_, owner in sorted(rounds):
            if round_ > len(self.history):
                self._file(owner, round_).unlink()
            else:
                self._replace(owner, round_)

    def _is_unused(self) -> bool:
        """Whether there is no folder, or it has at most a settings file that is not complete."""
        if not self.root.is_dir():
            return not self.root.exists()
        return all(path.name.startswith(f".{SETTINGS}.") for path in self.root.iterdir())

    def _check_same(self, settings: Mapping[str, object]) -> None:
        # Simulations of earlier versions lack these settings.
        evaluation = EvaluationTable().model_dump()
        before = {"evaluation": evaluation, "mode": "sync", **NEWER, **self.settings()}
        for key in settings:
            if key not in CHANGEABLE and before.get(key) != settings[key]:
                raise InputError(
                    "{path} contains a simulation with another `{key}`. Give another --out, or "
                    "--force to replace it.",
                    code="simulation.other-settings",
                    path=str(self.root),
                    key=key,
                )

    def _whole_lines(self) -> bytes:
        """The history without an incomplete last line."""
        file = self.root / HISTORY
        data = file.read_bytes() if file.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def _result(self, line: bytes) -> RoundResult:
        fields = self._decoded(HISTORY, line, dict[str, Any])
        if "loss" in fields and fields["loss"] is None:  # JSON has no NaN
            fields["loss"] = math.nan
        try:
            return msgspec.convert(fields, RoundResult)
        except msgspec.ValidationError as error:
            raise self._damaged(HISTORY, error) from None

    def _decoded(self, name: str, data: bytes, kind: type[T]) -> T:
        try:
            return decode_json(data, kind)
        except MalformedError as error:
            raise self._damaged(name, error) from None

    def _damaged(self, name: str, reason: object) -> InputError:
        return InputError(
            "{path} is damaged: {reason}. Use --force to start from the beginning.",
            code="simulation.damaged-folder",
            path=str(self.root / name),
            reason=reason,
        )


def read_run(root: Path) -> tuple[dict[str, Any], list[RoundResult]]:
    """Read the settings and the finished rounds of the simulation in the folder `root`.

    Raises InputError if there is no simulation, or none of its rounds is finished.
    """
    folder = RunFolder(root)
    if not (root / SETTINGS).is_file():
        raise InputError(
            "{path} is not the folder of a simulation: it has no {settings}. Give a folder that "
            "`edgetailor simulate` wrote.",
            code="simulation.no-results",
            path=str(root),
            settings=SETTINGS,
        )
    settings = folder.settings()
    folder.read(settings, force=False)
    if not folder.history:
        raise InputError(
            "{path} has no finished round. Run `edgetailor simulate` again to continue.",
            code="simulation.no-rounds",
            path=str(root),
        )
    return settings, folder.history


def write(path: Path, data: bytes) -> None:
    """Write a file of a round. Nothing reads the file before history.jsonl has the round's line."""
    path.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Add `data` to a file."""
    with path.open("ab") as file:
        file.write(data)
