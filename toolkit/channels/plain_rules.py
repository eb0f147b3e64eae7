"""Rules of the operators without weights that leave channels where they are, or refuse them."""

from toolkit.channels.channel_units import Axes, Axis, fixed
from toolkit.channels.operator_call import Rule, Step, Value, untouched

SAME = (
    *("hardswish", "hardswish_", "log_sigmoid", "dropout", "feature_dropout", "alpha_dropout"),
    *("contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "lift_fresh_copy"),
    *("zeros_like", "ones_like", "full_like"),
)
REDUCTIONS = ("mean", "amax", "amin", "var", "std")
ALONG = ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum")


def pointwise(step: Step) -> Value:
    """Element by element, broadcasting: all operands have the same channels."""
    inputs = step.inputs()
    rank = max(map(len, inputs), default=0)
    return tuple(
        merged_axes(step, [a[place] for a in inputs if -place <= len(a)])
        for place in range(-rank, 0)
    )


def same(step: Step) -> Value:
    """The first operand's axes, whatever the others are."""
    return step.inputs()[0]


def merged_axes(step: Step, axes: list[Axis]) -> Axis:
    """One axis of several operands; those of size 1 are broadcast."""
    size = max(map(len, axes))
    first, *others = [axis for axis in axes if len(axis) == size]
    for other in others:
        step.units.join(first, other)
    return first


def reduction(step: Step) -> Value:
    """A mean or extremum over some axes, over those of their channels that are kept."""
    (x,) = step.inputs()
    over = step.argument("dim") if step.takes("dim") else None
    reduced = {place % len(x) for place in over or range(len(x))}
    if step.takes("keepdim") and step.argument("keepdim"):
        return tuple(fixed(1) if place in reduced else axis for place, axis in enumerate(x))
    return tuple(axis for place, axis in enumerate(x) if place not in reduced)


def along(step: Step) -> Value:
    """Every element depends on all of one axis."""
    (x,) = step.inputs()
    step.need(x[step.argument("dim")], "it takes all of them together")
    return x


def spatial(step: Step) -> Value:
    """Pooling and interpolation: the last axes change size."""
    (x,) = step.inputs()
    last = int(step.name[-2])
    for axis in x[-last:]:
        step.need(axis, "it slides over them")

    def resized(recorded: Axes) -> Axes:
        return (*x[:-last], *recorded[-last:])

    results = untouched(step.node.meta["val"])
    return [*map(resized, results)] if isinstance(results, list) else resized(results or ())


def size(step: Step) -> Value:
    """The size of one axis, as a number that the graph computes with."""
    step.need(step.axes("self")[step.argument("dim")], "it computes with their number")
    return None


def take(step: Step) -> Value:
    """`slice` and `select`: some indices of one axis, which stays as it is."""
    (x,) = step.inputs()
    place = step.argument("dim") % len(x)
    sizes = step.sizes()
    if len(sizes) < len(x):
        step.need(x[place], "it picks one of them")
        return (*x[:place], *x[place + 1 :])
    if sizes[place] == len(x[place]):
        return x
    step.need(x[place], "it picks some of them")
    return (*x[:place], fixed(sizes[place]), *x[place + 1 :])


RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME, same),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG, along),
    "sym_size": size,
    "slice": take,
    "select": take,
}
