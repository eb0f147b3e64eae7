"""Compares the settings of the federation's file with the settings that are in effect.

Some settings may change between rounds. Other settings must stay, because they define the model or
how it is judged.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from profiles.errors import InputError
from toolkit.coordinator.database.operator_log import Action
from toolkit.coordinator.database.settings_log import (
    FEDERATION,
    LOSS,
    MODEL,
    TENSORS,
    Change,
    changes_model,
)
from toolkit.coordinator.federation_file.device_kinds import AUTO, BUDGETS, SIMULATED
from toolkit.coordinator.federation_file.federation_config import CoordinatorConfig
from toolkit.coordinator.storage.coordinator_store import Store
from toolkit.submodels.hyperparameters import TrainingConfig

logger = logging.getLogger(__name__)


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


CHANGEABLE = frozenset(
    {
        *("batch_size", "epochs", "steps", "learning_rate", "momentum", "weight_decay"),
        *("round_decay", "milestones", "optimizer", "proximal", "augment"),
    }
)
"""The keys of [training] that may change between rounds, because no tensor's meaning depends on
them."""
SECURE_KEYS = {"secure_aggregation", "smallest_group", "most_change", "most_samples"}
"""Keys of [privacy] that may change when `serve` starts. Devices refuse less privacy than was
promised."""
LIVE = frozenset(
    {
        *("title", "purpose", "contact", "rounds", "early_stopping", "deadline_s", "quorum"),
        *("buffer_size", "min_updates", "forget_after", "token_days"),
        *("clients_per_round", "over_selection", "selection", "budget_s"),
        *("training", "aggregation", "evaluation", "release", "devices"),
    }
)
"""The keys and tables whose changes `edgetailor apply` takes over. Other changes need a restart."""
AT_START = "found in the file when `edgetailor serve` started"
"""The reason in the audit log for a change without `edgetailor apply`."""
Key = tuple[str, ...]


def checked_settings(config: CoordinatorConfig) -> str:
    """The settings that are compared at every start, as JSON."""
    document: dict[str, Any] = {
        "model": config.model,
        "input_shape": list(config.input_shape),
        "inputs": list(config.inputs),
        "seed": config.seed,
        # The updates of an open asynchronous round may be of earlier models.
        "mode": config.mode,
        "training": asdict(config.training),
        "data": config.data and json.loads(msgspec.json.encode(config.data)),
        # With a larger share, devices would judge models on samples that were trained on before.
        # Later models would look too good.
        "evaluation": {"share": config.evaluation.share} if config.evaluation.share else None,
        # One budget covers all rounds.
        "privacy": config.device_privacy
        and config.device_privacy.model_dump(exclude_none=True, exclude=SECURE_KEYS),
        "devices": [
            kind.model_dump(exclude={"fallback", *BUDGETS, *SIMULATED}, exclude_none=True)
            for kind in config.devices
        ],
    }
    return json.dumps(document)


def check_same_settings(config: CoordinatorConfig, store: Store) -> list[Change]:
    """The changes since the state folder was used last.

    A new model is among them only if an operator has applied it.

    Raises InputError if the folder belongs to a federation whose settings cannot change to these.
    """
    now = checked_settings(config)
    before = json.loads(store.set_once(FEDERATION, now))
    # A federation that began before a setting existed uses its default.
    defaults = json.loads(json.dumps(asdict(TrainingConfig())))
    before["training"] = {**defaults, **before["training"]}
    before.setdefault("inputs", [])
    before.setdefault("mode", "sync")
    before.setdefault("privacy", None)
    # Version 0.2.0 kept the budgets of the kinds as well.
    for kind in before["devices"]:
        for key in BUDGETS:
            kind.pop(key, None)
    carried = Change(MODEL, json.dumps(before["model"]), json.dumps(config.model))
    carries = carried in store.settings.scheduled()
    return _changes(_flat(before), _flat(json.loads(now)), config, carries)


def record_changes(
    config: CoordinatorConfig, store: Store, changes: list[Change], loss: str | None = None
) -> None:
    """Let the `changes` found at a start take effect from the round that is open or opens next.

    Updates that have come for this round still count, except updates of an earlier model. Changes
    that an operator has applied are already in the audit log. If the file no longer has such a
    change, the log says that the value is as before. `loss` describes the user's own loss.
    """
    scheduled = store.settings.scheduled()
    if not changes and not scheduled:
        return
    round_ = (store.history.last_round() or 0) + 1
    texts = [change.text() for change in changes if change not in scheduled]
    flat = _flat(config.model_dump(mode="json", exclude={"simulation"}))
    values = {".".join(key): json.dumps(value) for key, value in flat.items()}
    found = {change.key for change in changes}
    for change in scheduled:
        if change.key == TENSORS:
            changes = [*changes, change] if MODEL in found else changes
        elif values.get(change.key, "null") != change.after and change.key not in found:
            texts.append(f"{change.key}: {change.before}, as before")
        elif change.key not in found:  # a change of a key that is not compared at the start
            changes = [*changes, change]
    actions = [Action(f"set {text}", f"round {round_}", "operator", AT_START) for text in texts]
    for text in texts:
        logger.info("From round %d on: %s", round_, text)
    bundles = need_new_bundles(changes)
    store.change_settings(round_, changes, checked_settings(config), actions, bundles, loss)


def changes_while_running(
    now: CoordinatorConfig, new: CoordinatorConfig, carry: bool = False
) -> list[Change]:
    """The changes from the settings `now` to the file `new`, for a running federation.

    With `carry`, `model` may change. Raises InputError if a change is not possible, or if it needs
    a restart.
    """
    if now.model != new.model and not carry:
        raise InputError(
            "The file has another `model`: {new} in place of {model}. Apply it with `edgetailor "
            "apply --carry`, which carries over the tensors that fit by name and shape. Or set "
            "{model} again.",
            code="settings.needs-carry",
            model=now.model,
            new=new.model,
        )
    before, after = (_flat(c.model_dump(mode="json", exclude={"simulation"})) for c in (now, new))
    changes = _changes(before, after, new, carry)
    planned = any(kind.planned for kind in (*now.devices, *new.devices))
    for change in changes:
        table = change.key.partition(".")[0]
        live = table in LIVE or table == MODEL
        if not live or (planned and table in (MODEL, "training", "devices")):
            raise InputError(
                "A new `{key}` takes effect only when `edgetailor serve` starts: stop `serve`, and "
                "start it again with the changed file. Nothing was changed.",
                code="settings.needs-restart",
                key=change.key,
            )
    return changes


def need_new_bundles(changes: Iterable[Change]) -> bool:
    """Whether devices need new bundles because of `changes`."""
    changes = list(changes)
    named = any(c.key.startswith("training.") or c.key.endswith(".submodel") for c in changes)
    return named or changes_model(changes)


def _changes(
    before: dict[Key, Any], now: dict[Key, Any], config: CoordinatorConfig, carry: bool = False
) -> list[Change]:
    """The changes from `before` to `now`. With `carry`, the model may change.

    Raises InputError for a change that is not possible.
    """
    keys = [*before, *(key for key in now if key not in before)]
    changed = [key for key in keys if before.get(key) != now.get(key)]
    for key in changed:
        if not _may_change(key, before, now) and not (carry and key == (MODEL,)):
            _refuse(key, before, config)
        if config.mode == "async" and (key[-1] == "submodel" or key == (MODEL,)):
            raise InputError(
                "In asynchronous rounds, the model and the submodel of a kind cannot change, "
                "because updates of earlier models may still come: undo the change of `{key}`, or "
                "set another `state` folder.",
                code="state.other-federation",
                key=".".join(key),
            )
    return [
        Change(".".join(key), json.dumps(before.get(key)), json.dumps(now.get(key)))
        for key in changed
    ]


def _may_change(key: Key, before: dict[Key, Any], now: dict[Key, Any]) -> bool:
    if key[0] == "training":
        return key[1] in CHANGEABLE
    if key[0] == "devices":
        submodel = ("devices", key[1], "submodel")
        if submodel not in before:
            return True  # a new kind
        removed = submodel not in now
        plans = key == submodel and AUTO in (before[submodel], now.get(submodel))
        return not removed and not plans
    fixed = ("model", "input_shape", "inputs", "seed", "mode", "data", "privacy")
    return key[0] not in fixed and key != ("evaluation", "share")


def _refuse(key: Key, before: dict[Key, Any], config: CoordinatorConfig) -> None:
    kinds = list(dict.fromkeys(path[1] for path in before if path[0] == "devices"))
    removed = key[0] == "devices" and key[1] not in [kind.name for kind in config.devices]
    name, value = ("devices", kinds) if removed else (".".join(key), before.get(key))
    raise InputError(
        "{state} contains a federation with another `{key}`, and this key cannot change: set it "
        "back to {value}, or set another `state` folder.",
        code="state.other-federation",
        key=name,
        state=config.state,
        value="its default" if value is None else json.dumps(value),
    )


def _flat(document: dict[str, Any]) -> dict[Key, Any]:
    """The settings by the path of their key.

    For kinds of devices, the path contains the kind's name.
    """
    flat: dict[Key, Any] = {}
    for key, value in document.items():
        if key == "devices":
            for kind in value:
                flat |= {("devices", kind["name"], k): v for k, v in kind.items() if k != "name"}
        elif isinstance(value, dict) and key != "data":
            flat |= {(key, below): v for below, v in value.items()}
        elif value is not None:
            flat[(key,)] = value
    return flat


def check_same_loss(config: CoordinatorConfig, store: Store, code: str | None) -> None:
    """Raise InputError if the user's own loss has changed since the state folder was made.

    `code` describes the present loss; None for built-in losses.
    """
    if code is None:
        return
    before = store.set_once(LOSS, code)
    if other_loss(before, code):
        raise InputError(
            "The code of the loss {loss!r} has changed since the federation in {state} was "
            "created. Undo the change, or set another `state` folder.",
            code="state.other-federation",
            key="training.loss",
            state=config.state,
            loss=config.training.loss,
        )
    store.set_value(LOSS, code)


def other_loss(before: str, now: str) -> bool:
    """Whether two texts of `loss_code` certainly describe different losses.

    Texts that different versions recorded, for example of torch, cannot be compared. For these the
    result is False.

    Examples:
        >>> other_loss("torch-2.8 a", "torch-2.8 b"), other_loss("torch-2.8 a", "torch-2.9 b")
        (True, False)
    """
    return before != now and before.partition(" ")[0] == now.partition(" ")[0]
