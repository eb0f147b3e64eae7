"""Flower's ClientApp: the gateway between Flower and the coordinator of a site.

The gateway gives the coordinator the global model and waits for the coordinator's answer. Model and
answer are files in the state folder of `edgetailor serve`, which runs next to the SuperNode.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import fixedclipping_mod, make_ffn, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from safetensors.numpy import load, save

from profiles.errors import ClientError
from toolkit.coordinator.flower_site import GLOBAL, SITE, SiteTask, give_task, partial_for
from toolkit.flower.masks import use_own_masks
from toolkit.flower.settings import Settings, read_settings
from toolkit.flower.strategy import PARTIAL, TASK

POLL_S = 0.2


def protect(message: Message, context: Context, call_next: Any) -> Message:
    """Apply the mods (Flower's wrappers of a client) that the run's and node's configurations need.

    Raises ClientError if the node asks for noise and the run does not allow it.
    """
    settings, node = read_settings(context.run_config), context.node_config
    mods = []
    if settings.secure:
        mods = [secaggplus_mod] + ([fixedclipping_mod] if settings.clipping_norm else [])
    if "epsilon" in node:
        if not settings.dense or settings.secure or settings.clipping_norm:
            raise ClientError(
                "This site adds noise (`epsilon` in --node-config), which needs a run with `dense "
                "= true` and without `secure` and `clipping-norm`. Remove `epsilon`, or change "
                "the run's configuration.",
                code="site.no-noise",
            )
        norm = float(node["clipping-norm"])
        # Two models, each at most `norm` from the global model, differ by at most 2 * `norm`.
        mods = [LocalDpMod(norm, 2 * norm, float(node["epsilon"]), float(node["delta"]))]
    return make_ffn(call_next, mods)(message, context)


use_own_masks()
app = ClientApp(mods=[protect])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round of a site. `state` in the node's configuration is the site's state folder.

    Raises ClientError if the site does not answer in time.
    """
    site = Path(str(context.node_config["state"])) / SITE
    settings = read_settings(context.run_config)
    if settings.dense:
        return Message(_dense(message, site, settings), reply_to=message)
    given = message.content[TASK]
    task = SiteTask(name=str(given["name"]), round=int(given["round"]))
    files = _answer(site, task, bytes(given["model"]), settings.timeout)
    return Message(RecordDict({PARTIAL: ConfigRecord(dict(files))}), reply_to=message)


def _dense(message: Message, site: Path, settings: Settings) -> RecordDict:
    """Get the site's own model, in the records that Flower's FedAvg or SecAgg+ expects."""
    config = message.content["fitins.config" if settings.secure else "config"]
    (arrays,) = message.content.array_records.values()
    names, round_ = json.loads(config["names"]), int(config["server-round"])
    model = {
        name: array.numpy().astype(np.float32)
        for name, array in zip(names, arrays.values(), strict=True)
    }
    task = SiteTask(name=f"{config['run']}-{round_}", round=round_, dense=True)
    own = load(_answer(site, task, save(model), settings.timeout)[GLOBAL])
    if settings.secure:
        _check_range(own, names, settings.range)
    answer = ArrayRecord({key: Array(own[n]) for key, n in zip(arrays, names, strict=True)})
    if not settings.secure:
        return RecordDict({"arrays": answer, "metrics": MetricRecord({"num-examples": 1})})
    return RecordDict(
        {
            "fitres.parameters": answer,
            "fitres.num_examples": MetricRecord({"num_examples": 1}),
            "fitres.metrics": ConfigRecord(),
            "fitres.status": ConfigRecord({"code": 0, "message": ""}),
        }
    )


def _check_range(own: dict[str, np.ndarray], names: list[str], most: float) -> None:
    """Raise ClientError if SecAgg+ would clip a number."""
    for name in names:
        if (largest := float(np.abs(own[name]).max(initial=0.0))) > most:
            raise ClientError(
                "SecAgg+ sends numbers from {least:g} to {most:g}, but {tensor!r} has a number "
                "whose absolute value is {found:g}. In the run's configuration, set `range` to a "
                "number above {found:g}.",
                code="site.out-of-range",
                tensor=name,
                most=most,
                least=-most,
                found=largest,
            )


def _answer(site: Path, task: SiteTask, model: bytes, timeout: float) -> dict[str, bytes]:
    """Return the site's answer to `task`. Raises ClientError if none comes in time."""
    end = time.monotonic() + timeout
    if partial_for(site, task) is None:
        give_task(site, task, model)
    while (files := partial_for(site, task)) is None:
        if time.monotonic() > end:
            raise ClientError(
                "The site has no aggregate of round {round} after {timeout:g} s. Check that "
                "`edgetailor serve` runs with this state folder, and lower its `deadline_s`.",
                code="site.timeout",
                round=task.round,
                timeout=timeout,
            )
        time.sleep(POLL_S)
    return files
