"""Finds the labels that a loss takes, as far as this is known without the model."""

from device_agent.formats.label_rule import LabelRule
from device_agent.formats.manifest import Part
from exporters.objectives.loss_text import BuiltIn, Own, parse


def labels_of(loss: str) -> LabelRule:
    """The rule for the labels of a loss. Fields that depend on the model are left open.

    If a sum of losses takes several arrays of labels, `parts` lists their names and types, and the
    rule's shape is None. A user's own loss is imported, because it declares the shapes.

    Raises:
        InputError: There is no such loss.
        ModelError: The user's own loss cannot be imported.

    Examples:
        >>> labels_of("huber").dtype, [part.name for part in labels_of("a=mse + b=mae").parts]
        ('float32', ['a', 'b'])
    """
    parsed = parse(loss)
    if isinstance(parsed, Own):
        from exporters.objectives.own_loss import load_loss  # it needs torch
        from exporters.objectives.own_loss_labels import ATTRIBUTE, rule_of_parts

        return rule_of_parts(getattr(load_loss(loss), ATTRIBUTE))
    if isinstance(parsed, BuiltIn):
        return _of(parsed)
    if len(parsed) == 1:
        return _of(parsed[0].loss)
    parts = [
        Part(name=head.output, shape=(), dtype="float32" if head.loss.numbers else "int64")
        for head in parsed
    ]
    return LabelRule(None, None, "float32", parts=tuple(parts))


def _of(loss: BuiltIn) -> LabelRule:
    if loss.name == "contrastive":
        part = Part(name="", shape=(), dtype="int64")
        return LabelRule(None, (1,), "float32", parts=(part,))
    dtype = "float32" if loss.numbers else "int64"
    return LabelRule(None, None, dtype, loss.name == "ctc")  # type: ignore[arg-type]
