"""Finds settings that secure sums exclude, because the coordinator sees no single update."""

from typing import Any

from profiles.text_formatting import counted
from toolkit.submodels.spec import parse_spec


def secure_misfit(config: Any) -> str | None:
    """Name a setting in `config`, a CoordinatorConfig, that secure sums exclude; else None.

    The text also has the reason and a remedy.
    """
    aggregation, training = config.aggregation, config.training
    private = config.device_privacy is not None  # it sets `weights` and `factors` itself
    for key, breaks, why in (
        ('`mode = "async"`', config.mode == "async",
         'all updates of a sum must be of one model: set mode = "sync"'),
        ("`site = true`", config.site, "the sums of a site go to another server: remove it"),
        (f'rule = "{aggregation.rule}" of [aggregation]', aggregation.rule != "mean",
         "it compares single updates: remove it"),
        (f'weights = "{aggregation.weights}" of [aggregation]',
         not private and aggregation.weights != "samples",
         "weights are in the sum: remove it. most_samples = 1 gives all devices the same weight"),
        ('factors = "act" of [aggregation]', not private and aggregation.factors == "act",
         "it composes the tensors of single updates: remove it"),
        ("`committee` of [evaluation]", config.evaluation.committee is not None,
         "a committee decides by the counts of single devices, which a sum hides: remove it"),
        ("`by_class` of [evaluation]", config.evaluation.by_class,
         "counts of classes are not in the sum: remove it"),
        ("`budget_s`", config.budget_s is not None,
         "an update of few batches does not hide other updates in the sum: remove it"),
        ("masked = true of [training]", training.masked,
         "devices then have different classes: remove it"),
        ('`selection = "data-size"`', config.selection == "data-size",
         "the coordinator does not learn how many samples a device has: use another selection"),
        ("`keep_updates`", config.keep_updates > 0,
         "the coordinator gets no single updates to keep: remove it"),
    ):  # fmt: skip
        if breaks:
            return f"{key}, because {why}"
    return _unfitting_kind(config) or _small_group(config)


def _unfitting_kind(config: Any) -> str | None:
    for kind in config.devices:
        if kind.planned:
            return (
                f"the kind {kind.name!r}, whose devices get planned submodels: nobody knows how "
                "many devices will train the same one. Give it a `submodel`"
            )
        for spec in filter(None, (kind.submodel, kind.fallback)):
            family = [own.family for own in parse_spec(spec).nested()][-1]
            if family == "cp" and config.device_privacy is not None:
                return (
                    f"`clip` and {spec} of the kind {kind.name!r}: noise in factors becomes far "
                    "larger in their product. Use another submodel, or remove `clip`"
                )
    return None


def _small_group(config: Any) -> str | None:
    fewest = config.privacy.smallest_group
    for submodel in dict.fromkeys(kind.submodel for kind in config.devices):
        counts = [kind.places for kind in config.devices if kind.submodel == submodel]
        known = sum(count or 0 for count in counts)
        asked = known * config.asking_probability(0)
        if config.device_privacy is not None and None not in counts and asked < fewest <= known:
            return (
                f"`clients_per_round` = {config.clients_per_round}: a round asks {asked:g} devices "
                f"with {submodel} on average, but `smallest_group` is {fewest}. Ask twice as many, "
                "or lower `smallest_group`"
            )
        if None not in counts and known < fewest:
            return (
                f"a group of {counted(known, 'device')}: no more devices train {submodel}, but "
                f"`smallest_group` is {fewest}. Raise their `count`, give them the submodel of "
                "another kind, or lower `smallest_group`"
            )
    return None
