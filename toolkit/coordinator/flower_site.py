"""A coordinator as one site of a larger fleet: it receives models and returns aggregates.

Models and aggregates are exchanged in the folder `site` of the state folder. So a gateway, such as
Flower's ClientApp, needs no connection to the coordinator:

- `next/`: `global.safetensors` and `task.json` of the next round, written by the gateway.
- `open/`: these two files of the open round.
- `partial/`: the partial aggregate of the last round, with its `task.json`.

In a dense round, the given model has only floating-point tensors. The site returns its own model
instead of a partial aggregate.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from device_agent.formats.atomic_files import write_folder
from device_agent.formats.manifest import AtLeastOne, Struct, encode
from profiles.errors import InputError
from profiles.json_decoding import MalformedError, decode_json
from toolkit.aggregation.aggregate import Received
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.limits.reference import Figures, RoundLimits
from toolkit.aggregation.limits.update_bounds import Scale
from toolkit.aggregation.limits.update_limits import within_limits
from toolkit.aggregation.partial_aggregates.partial import encode_partial
from toolkit.aggregation.running_aggregation import Aggregation
from toolkit.evaluation_sums import Evaluation
from toolkit.submodels.global_model import from_bytes

SITE = "site"
"""The folder of these files in the state folder."""
TASK = "task.json"
GLOBAL = "global.safetensors"
NEXT, OPEN, PARTIAL = "next", "open", "partial"


class SiteTask(Struct, frozen=True, kw_only=True):
    """The content of `task.json`: the round that a model belongs to.

    `name` differs for every round of every run; `round` counts the rounds of a run from 1. In a
    `dense` round the site answers with its own model.
    """

    name: str
    round: AtLeastOne
    dense: bool = False


def give_task(site: Path, task: SiteTask, model: bytes) -> None:
    """Write the next round's global model to the folder `site`. It replaces an earlier model."""
    write_folder(site / NEXT, {TASK: encode(task), GLOBAL: model}, force=True)


def partial_for(site: Path, task: SiteTask) -> dict[str, bytes] | None:
    """The files of the site's answer to `task`; None if there is no answer yet.

    The answer is a partial aggregate, or in a dense round the site's own model.
    """
    if read_task(site / PARTIAL) != task:
        return None
    files = {file.name: file.read_bytes() for file in (site / PARTIAL).iterdir()}
    del files[TASK]
    return files


def read_task(folder: Path) -> SiteTask | None:
    """The task in `folder`; None if there is none.

    Raises InputError if it cannot be read.
    """
    try:
        return decode_json((folder / TASK).read_bytes(), SiteTask)
    except FileNotFoundError:
        return None
    except MalformedError as error:
        raise InputError(
            "{path} does not describe a round for this site: {reason}. Remove {folder}.",
            code="site.malformed-task",
            path=str(folder / TASK),
            reason=str(error),
            folder=folder,
        ) from None


class SiteModel:
    """The global model of a site, for its coordinator's rounds.

    `load` and `bundle` read the model of the open round from the folder. `fold_checked` aggregates
    like a federation, so that the site can evaluate its updates. At the end of a round the
    coordinator calls `save`, which also writes the round's partial aggregate to the folder.
    """

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._federation, self._folder = federation, folder
        self._round = 0
        self._files: dict[str, bytes] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def ready(self) -> bool:
        """Whether there is a model whose round this site has not completed."""
        return self._has_next() or (
            self._open() is not None and self._open() != read_task(self._folder / PARTIAL)
        )

    def bundle(self, submodel: str, round_: int) -> dict[str, bytes]:
        """The files of the bundle for `submodel`, from the newest model at the start of `round_`.

        `round_` counts the site's own rounds. The learning rate depends on the round of the whole
        fleet.
        """
        if round_ != self._round:
            self._begin()
            self._round = round_
        task = self._open()
        return self._federation.bundle(submodel, round_ if task is None else task.round)

    def _begin(self) -> None:
        """If the next model has come, make it the model of the open round."""
        if self._has_next():
            shutil.rmtree(self._folder / OPEN, ignore_errors=True)
            os.replace(self._folder / NEXT, self._folder / OPEN)
        self._load_open()

    def _open(self) -> SiteTask | None:
        return read_task(self._folder / OPEN)

    def _has_next(self) -> bool:
        task = read_task(self._folder / NEXT)
        return task is not None and task != self._open()

    def _load_open(self) -> None:
        """Load the model of the open round, if there is one."""
        task = self._open()
        if task is None:
            return
        data = (self._folder / OPEN / GLOBAL).read_bytes()
        if task.dense:
            self._federation.adopt(from_bytes(data, "The model from Flower's server").tensors)
        else:
            self._federation.load(data)

    def check(self, update: Received, origin: str) -> None:
        """Raise UpdateError unless `update` fits the model; `origin` names it in the error."""
        self._federation.check(update, origin)

    def fold_checked(self, updates: Iterable[Received], limits: RoundLimits | None = None) -> None:
        """Aggregate `updates`, which `check` has accepted, each within `limits`."""
        model, policy = self._federation.model, self._federation.policy
        aggregation = Aggregation(model, policy)
        for update in within_limits(updates, limits, model, policy):
            aggregation.add_checked(*update)
        if limits is not None:
            aggregation.limit_statistics(limits)
        self._files = encode_partial(aggregation)
        self._federation.take(aggregation)

    def evaluation(self, x: np.ndarray, y: np.ndarray) -> Evaluation:
        """How good the model is, with the site's own updates aggregated."""
        return self._federation.evaluation(x, y)

    def scales(self, update: Received) -> Mapping[str, Scale]:
        """How large the numbers in each tensor of `update` are; `check` has accepted the update."""
        return self._federation.scales(update)

    def figures(self, update: Received) -> Figures:
        """The figures of an update before it is limited; `check` has accepted the update."""
        return self._federation.figures(update)

    def check_weights(self) -> None:
        """Raise UpdateError if a weight of the model is not finite."""
        self._federation.check_weights()

    def check_training(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise UpdateError if a training step of the model gives a number that is not finite."""
        self._federation.check_training(x, y)

    def save(self) -> bytes:
        """Return the model with the site's updates aggregated, and write the answer to the task."""
        task = self._open()
        own = self._federation.save()
        if self._files and task is not None:
            files = {GLOBAL: own} if task.dense else self._files
            write_folder(self._folder / PARTIAL, {**files, TASK: encode(task)}, force=True)
        self._files = {}
        return own

    def load(self, data: bytes) -> None:
        """Restore the model of the open round, or the model in `data` if no round was opened yet.

        The model of a dense round lacks some tensors and the factors that families keep between
        rounds. These come from `data`.
        """
        self._files = {}
        self._federation.load(data)
        self._load_open()
