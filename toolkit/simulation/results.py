"""The folder of a simulation: its settings, a line for each round, and what a restart needs.

A round is finished once its line is in `history.jsonl`. Files of a round that has no line yet are
deleted by the next start, so that a killed simulation continues after its last finished round.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

from device_agent.formats.atomic_files import write_file
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json

SETTINGS, HISTORY, CURVES, MODEL = (
    *("config.json", "history.jsonl", "curves.png"),
    "global.safetensors",
)
STATE = "state"
CHANGEABLE = ("rounds",)
"""Settings that may differ when a simulation continues."""
T = TypeVar("T")


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `history.jsonl`.

    Attributes:
        round: Number of the round, from 1.
        accuracy: Of the new global model on held-out samples; None for a regression.
        loss: Its mean loss on them.
        clients: Number of clients whose updates the model has.
        diverged: Number of clients whose training diverged; their updates are left out.
        bytes_down: Tensors that all clients of the round received, in bytes.
        bytes_up: Tensors that they sent, in bytes.
        seconds: Time of the round.
    """

    round: int
    accuracy: float | None
    loss: float
    clients: int
    diverged: int
    bytes_down: int
    bytes_up: int
    seconds: float


class RunFolder:
    """The folder `root` of one simulation.

    Attributes:
        history: The finished rounds.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.history: list[RoundResult] = []

    def read(self, settings: Mapping[str, object], force: bool) -> None:
        """Read what the folder holds of the simulation with `settings`, and change nothing.

        Args:
            settings: Of this simulation, in JSON's types.
            force: Whether `begin` is to replace what the folder holds.

        Raises:
            InputError: The folder holds something else, or a simulation with other settings.
        """
        if not self.root.exists():
            return
        if not (self.root / SETTINGS).is_file():
            raise InputError(
                f"{self.root} exists and is not the folder of a simulation. Give another --out.",
                code="simulation.other-folder",
                path=str(self.root),
            )
        if not force:
            self._check_same(settings)
            lines = self._whole_lines().splitlines()
            self.history = [self._decoded(HISTORY, line, RoundResult) for line in lines]

    def begin(self, settings: Mapping[str, object], force: bool) -> None:
        """Make the folder, or delete what an unfinished round left in it."""
        if force:
            shutil.rmtree(self.root, ignore_errors=True)
        write_file(self.root / SETTINGS, json.dumps(settings, indent=1).encode() + b"\n")
        (self.root / STATE).mkdir(exist_ok=True)
        whole = len(self._whole_lines())
        with (self.root / HISTORY).open("ab") as file:
            file.truncate(whole)
        self._delete_other_rounds()

    def model(self) -> bytes | None:
        """The global model after the last finished round; None before the first."""
        return self._model_of(len(self.history)).read_bytes() if self.history else None

    def finish_round(self, result: RoundResult, model: bytes) -> None:
        """Keep the global model of a round, then its line."""
        write(self._model_of(result.round), model)
        append(self.root / HISTORY, msgspec.json.encode(result) + b"\n")
        self.history.append(result)
        self._delete_other_rounds()

    def personal(self, client: int) -> dict[str, np.ndarray]:
        """The personal tensors of `client`; empty before its first round."""
        found = list((self.root / STATE).glob(f"personal-{client}-*"))
        return load_file(found[0]) if found else {}

    def keep_personal(self, client: int, round_: int, tensors: dict[str, np.ndarray]) -> None:
        """Keep the personal tensors that `client` has after `round_`, if it has any."""
        if tensors:
            arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
            save_file(arrays, self.root / STATE / f"personal-{client}-{round_}")

    def _model_of(self, round_: int) -> Path:
        return self.root / STATE / f"model-{round_}"

    def _delete_other_rounds(self) -> None:
        """Delete files of unfinished rounds, and those that a later round replaced."""
        finished, newest = len(self.history), dict[str, tuple[int, Path]]()
        for path in (self.root / STATE).iterdir():
            owner, _, round_ = path.name.rpartition("-")
            known = newest.get(owner)
            if int(round_) > finished or (known and known[0] > int(round_)):
                path.unlink()
                continue
            if known:
                known[1].unlink()
            newest[owner] = int(round_), path

    def _check_same(self, settings: Mapping[str, object]) -> None:
        before = self._decoded(SETTINGS, (self.root / SETTINGS).read_bytes(), dict[str, object])
        for key in settings:
            if key not in CHANGEABLE and before.get(key) != settings[key]:
                raise InputError(
                    f"{self.root} holds a simulation with another `{key}`. Give another --out, or "
                    "--force to replace it.",
                    code="simulation.other-settings",
                    path=str(self.root),
                    key=key,
                )

    def _whole_lines(self) -> bytes:
        """The history without a line that was being written."""
        file = self.root / HISTORY
        data = file.read_bytes() if file.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def _decoded(self, name: str, data: bytes, kind: type[T]) -> T:
        try:
            return decode_json(data, kind)
        except MalformedError as error:
            raise InputError(
                f"{self.root / name} is damaged: {error}. Give --force to start again.",
                code="simulation.damaged-folder",
                path=str(self.root / name),
            ) from None


def write(path: Path, data: bytes) -> None:
    """Write a file that nothing reads before the round has its line."""
    path.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Add `data` to a file."""
    with path.open("ab") as file:
        file.write(data)
