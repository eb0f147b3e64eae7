"""Checks that the federation's file still has the settings with which the state folder began."""

import json
from dataclasses import asdict
from typing import Any

import msgspec

from profiles.errors import InputError
from toolkit.coordinator.federation_config import BUDGETS, SIMULATED, CoordinatorConfig
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.submodels.hyperparameters import TrainingConfig


def check_judged(config: CoordinatorConfig) -> None:
    """Raise InputError if nobody judges the models, or if devices are asked to judge but cannot."""
    if config.held_out is None and not config.evaluation.share:
        raise InputError(
            "Nobody would judge the models: the federation's file has no `held_out`, and its "
            "devices do not evaluate. Set `held_out` to samples of your own, or let the devices "
            "judge with `share = 0.2` in [evaluation].",
            code="federation.not-judged",
        )
    if config.site and (config.evaluation.share or config.held_out is None):
        raise InputError(
            "A site receives its models from Flower's server, and its devices cannot judge these "
            "models. Set `held_out`, and remove [evaluation].",
            code="option.conflict",
            options=["site", "evaluation"],
        )
    static = config.training.batch_norm == "static"
    if static and config.held_out is None and config.statistics is None:
        raise InputError(
            'batch_norm = "static" computes the statistics of batch norms from samples, but the '
            "federation's file has neither `statistics` nor `held_out`. Set `statistics` to "
            "training samples.",
            code="federation.no-statistics",
        )


def check_same_settings(config: CoordinatorConfig, store: Store) -> None:
    """Raise InputError if the state folder belongs to a federation with other settings."""
    default_training = json.loads(json.dumps(asdict(TrainingConfig())))
    now: dict[str, Any] = {
        "model": config.model,
        "input_shape": list(config.input_shape),
        "inputs": list(config.inputs),
        "seed": config.seed,
        "training": asdict(config.training),
        "data": config.data and json.loads(msgspec.json.encode(config.data)),
        # Samples that were trained under a smaller share would flatter later models.
        "evaluation": {"share": config.evaluation.share} if config.evaluation.share else None,
        "devices": [
            kind.model_dump(exclude={"fallback", *BUDGETS, *SIMULATED}, exclude_none=True)
            for kind in config.devices
        ],
    }
    now = json.loads(json.dumps(now))
    before = json.loads(store.set_once("federation", json.dumps(now)))
    # A federation that began before a setting existed uses its default.
    before["training"] = {**default_training, **before["training"]}
    before.setdefault("inputs", [])
    # Version 0.2.0 kept the budgets of the kinds as well.
    for kind in before["devices"]:
        for key in BUDGETS:
            kind.pop(key, None)
    changed = [key for key in now if now[key] != before.get(key)]
    if changed:
        key, value = _difference(changed[0], before.get(changed[0]), now[changed[0]])
        raise InputError(
            "{state} holds a federation with another `{key}`: set it back to {value}, or set "
            "another `state` folder.",
            code="state.other-federation",
            key=key,
            state=config.state,
            value=value,
        )


def check_same_loss(config: CoordinatorConfig, store: Store, code: str | None) -> None:
    """Raise InputError if the user's own loss has changed since the state folder was made.

    `code` describes what the loss computes now; None for other losses.
    """
    if code is None:
        return
    before = store.set_once("loss", code)
    if other_loss(before, code):
        raise InputError(
            "{state} holds a federation whose loss {loss!r} computed something else: its code has "
            "changed. Undo the change, or set another `state` folder.",
            code="state.other-federation",
            key="training.loss",
            state=config.state,
            loss=config.training.loss,
        )
    store.set_value("loss", code)


def other_loss(before: str, now: str) -> bool:
    """Whether two texts of `loss_code` certainly describe different losses.

    Texts that different versions recorded, for example of torch, cannot be compared. For these the
    result is False.

    Examples:
        >>> other_loss("torch-2.8 a", "torch-2.8 b"), other_loss("torch-2.8 a", "torch-2.9 b")
        (True, False)
    """
    return before != now and before.partition(" ")[0] == now.partition(" ")[0]


def _difference(key: str, before: Any, now: Any) -> tuple[str, str]:
    """The path of the first difference below `key`, and its value before, as JSON."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        parts = [(f"{key}.{name}", before.get(name), now.get(name)) for name in names]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [(f"{key}[{n}]", *two) for n, two in enumerate(zip(before, now, strict=True))]
    else:
        parts = []
    for key_below, old, new in parts:
        if old != new:
            return _difference(key_below, old, new)
    if before is None:
        return key, "its default"
    if key == "devices":
        before = [kind["name"] for kind in before]
    return key, json.dumps(before)
