"""Finds settings that secure sums exclude, because the coordinator sees no single update."""

from typing import Any

from profiles.text_formatting import counted
from toolkit.submodels.spec import parse_spec

LINEAR = frozenset({"full", "slice", "width", "depth", "cp", "pfedme"})
"""Families of which the mean of updates is enough. The product of mean factors of `low-rank` is not
the mean of the products."""


def secure_misfit(config: Any) -> str | None:
    """Name a setting in `config`, a CoordinatorConfig, that secure sums exclude; else None.

    The text also has the reason and a remedy.
    """
    aggregation, training = config.aggregation, config.training
    for key, breaks, why in (
        ('`mode = "async"`', config.mode == "async",
         'a sum has updates of one model only: set mode = "sync"'),
        ("`site = true`", config.site, "the sums of a site go to another server: remove it"),
        (f'rule = "{aggregation.rule}" of [aggregation]', aggregation.rule != "mean",
         "it compares single updates: remove it"),
        (f'weights = "{aggregation.weights}" of [aggregation]', aggregation.weights != "samples",
         "weights are in the sum: remove it. most_samples = 1 gives all devices the same weight"),
        ('factors = "act" of [aggregation]', aggregation.factors == "act",
         "it composes the tensors of single updates: remove it"),
        ("`by_class` of [evaluation]", config.evaluation.by_class,
         "counts of classes are not in the sum: remove it"),
        ("`budget_s`", config.budget_s is not None,
         "an update of few batches hides no other update in the sum: remove it"),
        ("masked = true of [training]", training.masked,
         "devices then have different classes: remove it"),
        ('`selection = "data-size"`', config.selection == "data-size",
         "nobody knows the samples of a device: use another selection"),
        ("`keep_updates`", config.keep_updates > 0, "there are no updates to keep: remove it"),
    ):  # fmt: skip
        if breaks:
            return f"{key}, because {why}"
    return _unfitting_kind(config) or _small_group(config)


def _unfitting_kind(config: Any) -> str | None:
    for kind in config.devices:
        if kind.planned:
            return (
                f"the kind {kind.name!r}, whose submodels are planned: they may be of any family. "
                "Give it a `submodel`"
            )
        for spec in filter(None, (kind.submodel, kind.fallback)):
            family = [own.family for own in parse_spec(spec).nested()][-1]
            if family not in LINEAR:
                return (
                    f"{spec} of the kind {kind.name!r}: the product of the mean factors is not the "
                    f"mean of the products. Use one of {', '.join(sorted(LINEAR))}"
                )
    return None


def _small_group(config: Any) -> str | None:
    assert config.secure_terms is not None
    fewest = config.secure_terms.fewest
    for submodel in dict.fromkeys(kind.submodel for kind in config.devices):
        counts = [kind.places for kind in config.devices if kind.submodel == submodel]
        known = sum(count or 0 for count in counts)
        if None not in counts and known < fewest:
            return (
                f"a group of {counted(known, 'device')}: at most so many train {submodel}, but "
                f"`smallest_group` is {fewest}. Raise their `count`, give them the submodel of "
                "another kind, or lower `smallest_group`"
            )
    return None
