"""Rules for operators without weights. They keep channels in their axis, or need all of them."""

from toolkit.channels.channel_units import Axes, Axis, fixed_axis
from toolkit.channels.operator_call import Rule, Step, Value, fixed_axes

SAME = (
    *("hardswish", "hardswish_", "log_sigmoid", "dropout", "feature_dropout", "alpha_dropout"),
    *("contiguous", "clone", "detach", "alias", "to", "_to_copy", "type_as", "lift_fresh_copy"),
    *("zeros_like", "ones_like", "full_like"),
)
REDUCTIONS = ("mean", "amax", "amin", "var", "std", "linalg_vector_norm", "logsumexp")
ALONG = ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum")


def pointwise(step: Step) -> Value:
    """Elementwise operators with broadcasting: all operands have the same channels."""
    return unite_broadcast(step, *step.inputs())


def unite_broadcast(step: Step, *operands: Axes) -> Axes:
    """Unite the axes of operands that are broadcast; return the axes of the result."""
    rank = max(map(len, operands), default=0)
    return tuple(
        unite_axes(step, [axes[dim] for axes in operands if -dim <= len(axes)])
        for dim in range(-rank, 0)
    )


def same_axes(step: Step) -> Value:
    """The result has the axes of the first tensor that is read. Without tensors, it has no axes."""
    return next(iter(step.inputs()), ())


def unite_axes(step: Step, axes: list[Axis]) -> Axis:
    """Unite one axis of several operands; axes of size 1 are broadcast."""
    size = max(map(len, axes))
    first, *others = [axis for axis in axes if len(axis) == size]
    for other in others:
        step.units.join(first, other)
    return first


def reduction(step: Step) -> Value:
    """A mean, extremum or variance over some axes, computed over the channels that are kept."""
    (x,) = step.inputs()
    over = step.argument("dim") if step.takes("dim") else None
    reduced = {dim % len(x) for dim in over or range(len(x))}
    if step.takes("keepdim") and step.argument("keepdim"):
        return tuple(fixed_axis(1) if dim in reduced else axis for dim, axis in enumerate(x))
    return tuple(axis for dim, axis in enumerate(x) if dim not in reduced)


def total(step: Step) -> Value:
    """A sum over some axes.

    These axes are kept whole, because later operators may rely on their size.
    """
    (x,) = step.inputs()
    over = step.argument("dim") if step.takes("dim") else None
    for dim in over or range(len(x)):
        step.require_all(x[dim], "it sums over all of them")
    return reduction(step)


def displaced(step: Step) -> Value:
    """`roll` and `flip`: elements move along some axes."""
    (x,) = step.inputs()
    for dim in step.argument("dims") or range(len(x)):
        step.require_all(x[dim], "it changes their order")
    return x


def needs_whole_axis(step: Step) -> Value:
    """Softmax and the like: each element depends on the whole of one axis."""
    (x,) = step.inputs()
    step.require_all(x[step.argument("dim")], "it combines all of them")
    return x


def spatial(step: Step) -> Value:
    """Pooling and interpolation: the last axes change size."""
    (x,) = step.inputs()
    last = int(step.name[-2])
    for axis in x[-last:]:
        step.require_all(axis, "it moves a window along them")

    def resized(recorded: Axes) -> Axes:
        return (*x[:-last], *recorded[-last:])

    results = fixed_axes(step.node.meta["val"])
    return [*map(resized, results)] if isinstance(results, list) else resized(results or ())


def size(step: Step) -> Value:
    """The size of one axis, which must be kept whole, because the graph computes with the size."""
    step.require_all(step.axes("self")[step.argument("dim")], "it computes with their number")
    return None


def select(step: Step) -> Value:
    """One index of an axis, which must be kept whole."""
    (x,) = step.inputs()
    dim = step.argument("dim") % len(x)
    step.require_all(x[dim], "it selects one of them")
    return (*x[:dim], *x[dim + 1 :])


RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME, same_axes),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG, needs_whole_axis),
    "copy_": pointwise,  # writes a new value into a buffer that the model keeps
    "sym_size": size,
    "sum": total,
    **dict.fromkeys(("roll", "flip"), displaced),
    "select": select,
}
