"""Complex numbers as pairs of real tensors, so that models with Fourier transforms can be exported.

While a model is recorded, a Fourier transform is a product with constant matrices, and its result
is a `Pair`. A pair takes part in functions of torch and in arithmetic like a complex tensor.
"""

import cmath
import itertools
import operator
from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exporters.programs import source_lines
from exporters.recording.replacements.complex_numbers.complex_elements import ELEMENTWISE, size
from profiles.errors import ModelError

BOTH = (
    *("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"),
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "ravel"),
    *(
        "expand",
        "broadcast_to",
        "repeat",
        "tile",
        "repeat_interleave",
        "narrow",
        "select",
        "unfold",
    ),
    *("view_as", "reshape_as", "expand_as", "diagonal", "diag_embed", "tril", "triu", "trace"),
    *("roll", "flip", "fft_fftshift", "fft_ifftshift", "detach", "neg", "negative", "mean", "sum"),
    *("split", "chunk", "tensor_split", "unbind", "index_select", "gather", "take_along_dim"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
    *("__getitem__", "diff", "cumsum"),
)
"""Functions of torch that treat the real and the imaginary part alike."""
MULTILINEAR = (
    *("mul", "multiply", "__rmul__", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv"),
    *("dot", "inner", "outer", "ger", "kron", "tensordot", "einsum"),
)
"""Functions whose result is linear in each operand."""
WITH_BIAS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
"""Functions whose result is linear in the input and in the weight, with a bias."""


class Pair:
    """A complex tensor as its real and its imaginary part."""

    def __init__(self, real: Tensor, imag: Tensor) -> None:
        self.real, self.imag = real, imag

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute a function of torch that has pairs among its arguments."""
        return compute(getattr(func, "__name__", str(func)), func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """A property or a method of tensors."""
        if name in ("shape", "device", "ndim", "layout", "requires_grad"):
            return getattr(self.real, name)
        if name in ("T", "mT", "H", "mH"):
            sign = -1 if "H" in name else 1
            return Pair(getattr(self.real, name), sign * getattr(self.imag, name))
        method = getattr(Tensor, name)  # an AttributeError names Tensor's missing attribute
        if not callable(method):
            raise unsupported(name)
        return lambda *args, **kwargs: compute(name, method, (self, *args), kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """The complex type."""
        return self.real.dtype.to_complex()

    def size(self, *axis: int) -> Any:
        """The shape, or one size."""
        return self.real.size(*axis)

    def dim(self) -> int:
        """The number of axes."""
        return self.real.dim()

    def __len__(self) -> int:
        """The size of the first axis."""
        return len(self.real)

    def is_complex(self) -> bool:
        """True."""
        return True

    def __getitem__(self, index: Any) -> "Pair":
        """Both parts at `index`."""
        return Pair(self.real[index], self.imag[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write both parts of `value` at `index`."""
        value = paired(value)
        self.real[index], self.imag[index] = value.real, value.imag

    def __add__(self, other: Any) -> "Pair":
        """The sum with a pair, a tensor or a number."""
        other = paired(other)
        return Pair(self.real + other.real, self.imag + other.imag)

    def __sub__(self, other: Any) -> "Pair":
        """The difference."""
        other = paired(other)
        return Pair(self.real - other.real, self.imag - other.imag)

    def __rsub__(self, other: Any) -> "Pair":
        """The difference."""
        return paired(other) - self

    def __neg__(self) -> "Pair":
        """The negative."""
        return Pair(-self.real, -self.imag)

    def __mul__(self, other: Any) -> "Pair":
        """The product."""
        return product(operator.mul, self, other)

    def __matmul__(self, other: Any) -> "Pair":
        """The matrix product."""
        return product(operator.matmul, self, other)

    def __truediv__(self, other: Any) -> "Pair":
        """The quotient by a pair, a tensor or a number."""
        other = as_pairs(other)
        if isinstance(other, Pair | complex):
            return self * (1 / other)
        return Pair(self.real / other, self.imag / other)

    def __rtruediv__(self, other: Any) -> "Pair":
        """The quotient of a tensor or a number by a pair."""
        return product(operator.mul, self.reciprocal(), other)

    def __pow__(self, exponent: Any) -> "Pair":
        """The power."""
        return power(self, exponent)

    def __rpow__(self, base: Any) -> "Pair":
        """The power of a tensor or a number."""
        return power(base, self)

    def __abs__(self) -> Tensor:
        """The magnitude."""
        return magnitude(self)

    __radd__, __rmul__ = __add__, __mul__


def paired(value: Any) -> Pair:
    """`value` as a pair; the imaginary part of a real tensor or number is zero."""
    value = as_pairs(value)
    if isinstance(value, complex):
        return Pair(value.real, value.imag)  # type: ignore[arg-type]  # numbers broadcast
    return value if isinstance(value, Pair) else Pair(value, 0 * value)


def as_pairs(value: Any) -> Any:
    """`value` with pairs in place of complex tensors."""
    if isinstance(value, Tensor) and value.dtype.is_complex:
        return Pair(value.real, value.imag)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(map(as_pairs, value))
    return value


def product(multiply: Callable[[Any, Any], Any], a: Any, b: Any) -> Pair:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i for a bilinear `multiply`."""
    a, b = as_pairs(a), as_pairs(b)
    if not isinstance(b, Pair | complex):
        return Pair(multiply(a.real, b), multiply(a.imag, b))
    if not isinstance(a, Pair | complex):
        return Pair(multiply(a, b.real), multiply(a, b.imag))
    real = multiply(a.real, b.real) - multiply(a.imag, b.imag)
    return Pair(real, multiply(a.real, b.imag) + multiply(a.imag, b.real))


def compute(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func`, the function of torch named `name`, for these arguments."""
    if name in SPECIAL:
        return SPECIAL[name](*args, **kwargs)
    if name in ELEMENTWISE:
        z, *rest = args or kwargs.values()
        if isinstance(z, Pair) and not rest:
            return Pair(*ELEMENTWISE[name](z.real, z.imag))
    if name in BOTH:
        first, second = (
            func(
                *(taken(value, part) for value in args),
                **{key: taken(value, part) for key, value in kwargs.items()},
            )
            for part in ("real", "imag")
        )
        if isinstance(first, tuple | list):
            return tuple(map(Pair, first, second))
        return Pair(first, second)
    if name in MULTILINEAR:
        return multilinear(partial(func, **kwargs), args)
    if name in WITH_BIAS:
        return with_bias(func, name, *args, **kwargs)
    if name in IN_PLACE and isinstance(args[0], Pair):
        return in_place(args[0], compute(name[:-1], getattr(Tensor, name[:-1]), args, kwargs))
    raise unsupported(name)


def multilinear(func: Callable[..., Any], operands: Iterable[Any]) -> Pair:
    """Compute `func`, which is linear in each operand, as the sum over all choices of parts."""
    given = [
        each
        for operand in operands
        for each in (
            operand if isinstance(operand, tuple | list) and pairs_in(operand) else [operand]
        )
    ]
    several = [n for n, each in enumerate(given) if isinstance(each, Pair | complex)]
    parts: list[Any] = [None, None]
    for choice in itertools.product((0, 1), repeat=len(several)):
        chosen = list(given)
        for n, which in zip(several, choice, strict=True):
            chosen[n] = given[n].imag if which else given[n].real
        value, turns = func(*chosen), sum(choice)  # i^turns
        value = -value if turns % 4 in (2, 3) else value
        parts[turns % 2] = value if parts[turns % 2] is None else parts[turns % 2] + value
    return Pair(*parts)


def with_bias(
    func: Any, name: str, input: Any, weight: Any, bias: Any = None, *given: Any, **more: Any
) -> Pair:
    """Compute a linear layer or a convolution, with its bias if it has one."""
    result = multilinear(lambda x, w: func(x, w, None, *given, **more), (input, weight))
    if bias is None:
        return result
    axes = 0 if name == "linear" else int(name[-2])
    total: Pair = result + paired(bias).reshape(-1, *[1] * axes)
    return total


def in_place(z: Pair, result: Pair) -> Pair:
    """Write `result` into `z`."""
    z.real.copy_(result.real)
    z.imag.copy_(result.imag)
    return z


def pairs_in(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a pair."""
    return any(isinstance(value, Pair) for value in values)


def taken(value: Any, part: str) -> Any:
    """`value` with the real or the imaginary part in place of each pair."""
    if isinstance(value, Pair | complex):
        return getattr(value, part)
    if isinstance(value, tuple | list) and pairs_in(value):
        return [getattr(paired(each), part) for each in value]
    return value


def knows(name: str) -> bool:
    """Whether a function of torch with this `name` has a form here."""
    return any(
        name in names for names in (SPECIAL, ELEMENTWISE, BOTH, MULTILINEAR, WITH_BIAS, IN_PLACE)
    )


def unsupported(name: str) -> ModelError:
    """The error for a function of complex numbers that is not known here."""
    return ModelError(
        "The model computes with complex numbers ({operator}){place}, which cannot be exported. "
        "Compute the real and the imaginary part as two tensors.",
        code="model.complex-numbers",
        operator=name,
        place=source_lines.called_place(),
    )


def magnitude(z: Pair) -> Tensor:
    """|z|."""
    return size(z.real, z.imag)


def view_as_real(z: Pair) -> Tensor:
    """Both parts along a new last axis."""
    return torch.stack([z.real, z.imag], -1)


def added(a: Any, b: Any, alpha: float = 1) -> Pair:
    """`torch.add` of pairs."""
    total: Pair = paired(a) + b * alpha
    return total


def subtracted(a: Any, b: Any, alpha: float = 1) -> Pair:
    """`torch.sub` of pairs."""
    difference: Pair = paired(a) - b * alpha
    return difference


def divided(a: Any, b: Any) -> Pair:
    """`torch.div` of pairs."""
    quotient: Pair = paired(a) / b
    return quotient


def power(z: Any, exponent: Any) -> Pair:
    """z^n: by squares for a whole number n, else e^(n ln z)."""
    if not isinstance(exponent, int | float) or exponent != int(exponent):
        base = cmath.log(z) if isinstance(z, int | float | complex) else paired(z).log()
        result: Pair = (paired(exponent) * base).exp()
        return result
    n = abs(int(exponent))
    result = Pair(torch.ones_like(z.real), torch.zeros_like(z.imag))
    factor = z if exponent >= 0 else z.reciprocal()
    while n:
        result = result * factor if n % 2 else result
        factor, n = factor * factor, n // 2
    return result


def chosen(condition: Tensor, a: Any, b: Any) -> Pair:
    """`torch.where` of pairs."""
    a, b = paired(a), paired(b)
    return Pair(torch.where(condition, a.real, b.real), torch.where(condition, a.imag, b.imag))


def filled(z: Pair, mask: Tensor, value: Any) -> Pair:
    """`torch.masked_fill` of a pair."""
    value = paired(value)
    return Pair(z.real.masked_fill(mask, value.real), z.imag.masked_fill(mask, value.imag))


def norm(z: Pair, *given: Any, **more: Any) -> Tensor:
    """The norm of vectors or of all numbers."""
    options = dict(zip(("ord", "dim", "keepdim"), given, strict=False)) | more
    order = options.pop("ord", options.pop("p", None))
    if order not in (None, 2, "fro"):
        raise unsupported("norm")
    found: Tensor = torch.linalg.vector_norm(magnitude(z), **options)
    return found


def variance(z: Pair, *given: Any, **more: Any) -> Tensor:
    """`torch.var`: the mean square distance from the mean."""
    return z.real.var(*given, **more) + z.imag.var(*given, **more)


def multiplied(z: Pair, dim: int, keepdim: bool = False) -> Pair:
    """`torch.prod` along an axis."""
    total: Pair = reduce(operator.mul, z.unbind(dim))
    if keepdim:
        total = total.unsqueeze(dim)
    return total


def mixed(a: Any, b: Any, weight: Any) -> Pair:
    """`torch.lerp` of pairs."""
    between: Pair = paired(a) + (paired(b) - a) * weight
    return between


def created(name: str) -> Callable[..., Pair]:
    """A replacement of `torch.zeros`, `Tensor.new_zeros` or similar, for complex results."""
    make = getattr(torch, name, None) or getattr(Tensor, name)

    def create(*given: Any, dtype: torch.dtype | None = None, **more: Any) -> Pair:
        kind = dtype.to_real() if dtype is not None and dtype.is_complex else dtype
        real = make(*(taken(value, "real") for value in given), dtype=kind, **more)
        if not any(isinstance(value, complex) for value in given):
            return Pair(real, torch.zeros_like(real))
        return Pair(real, make(*(taken(value, "imag") for value in given), dtype=kind, **more))

    return create


def padded(z: Pair, pad: Any, mode: str = "constant", value: Any = None) -> Pair:
    """`torch.nn.functional.pad` of a pair."""
    if mode != "constant":
        return Pair(*(functional.pad(part, pad, mode) for part in (z.real, z.imag)))
    filled = complex(value or 0)
    return Pair(
        functional.pad(z.real, pad, value=filled.real),
        functional.pad(z.imag, pad, value=filled.imag),
    )


def converted(z: Any, *to: Any, **more: Any) -> Any:
    """`Tensor.to` and similar: the real part for a real type, a pair for a complex type."""
    for kind in (*to, *more.values()):
        kind = kind.dtype if isinstance(kind, Tensor) else kind
        if isinstance(kind, torch.dtype) and not kind.is_complex:
            return z.real.to(kind)
    return paired(z)


def to_type(kind: torch.dtype) -> Callable[..., Any]:
    """A method such as `Tensor.float`, which converts a pair to the type `kind`."""
    return lambda z: converted(z, kind)


def same(parts: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """For each name in `parts`, a function that returns the part of a pair with this name."""
    return {part: operator.attrgetter(part) for part in parts}


CREATING = (
    *("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
)
"""Functions that make tensors."""
SPECIAL: dict[str, Callable[..., Any]] = {
    **same(("real", "imag")),
    "abs": magnitude,
    "absolute": magnitude,
    "angle": lambda z: torch.atan2(z.imag, z.real),
    "view_as_real": view_as_real,
    "square": lambda z: z * z,
    "is_complex": lambda z: True,
    "numel": lambda z: z.real.numel(),
    **dict.fromkeys(("add", "__radd__"), added),
    **dict.fromkeys(("sub", "subtract"), subtracted),
    **dict.fromkeys(("rsub", "__rsub__"), lambda a, b, alpha=1: subtracted(b, a, alpha)),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), divided),
    **dict.fromkeys(("__rtruediv__", "__rdiv__"), lambda a, b: divided(b, a)),
    **dict.fromkeys(("pow", "__pow__"), power),
    "__rpow__": lambda a, b: power(b, a),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), norm),
    "var": variance,
    "std": lambda z, *given, **more: variance(z, *given, **more).sqrt(),
    "prod": multiplied,
    "vdot": lambda a, b: multilinear(torch.dot, (a.conj(), b)),
    "linalg_multi_dot": lambda tensors: reduce(operator.matmul, tensors),
    **dict.fromkeys(("addmm", "baddbmm"), lambda c, a, b: paired(c) + a @ b),
    "addcmul": lambda c, a, b, value=1: paired(c) + a * b * value,
    "where": chosen,
    "masked_fill": filled,
    "lerp": mixed,
    "pad": padded,
    **{name: created(name) for name in CREATING},
    **dict.fromkeys(("to", "type"), converted),
    **{name: to_type(getattr(torch, name)) for name in ("float", "double", "cfloat", "cdouble")},
}
"""Functions of torch with a form of their own."""
IN_PLACE = ("add_", "sub_", "mul_", "div_", "neg_", "masked_fill_")
"""In-place methods, which write the result of the function without the underscore."""
