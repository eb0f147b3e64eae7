"""Complex numbers as pairs of real tensors, so that models with Fourier transforms can be exported.

While a model is recorded, a Fourier transform is a product with constant matrices, and its result
is a `Pair`. A pair takes part in functions of torch and in arithmetic like a complex tensor.
"""

import operator
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exporters.programs import source_lines
from profiles.errors import ModelError

BOTH = (
    *("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"),
    *("transpose", "permute", "movedim", "swapaxes", "t", "expand", "repeat", "narrow", "select"),
    *("roll", "flip", "fft_fftshift", "fft_ifftshift", "detach", "neg", "negative", "mean", "sum"),
    *("split", "chunk", "unbind", "cat", "stack", "index_select", "gather", "zeros_like"),
    *("__getitem__", "diff", "cumsum"),
)
"""Functions of torch that treat the real and the imaginary part alike."""
BILINEAR = ("mul", "multiply", "matmul", "mm", "bmm", "einsum", "outer", "__matmul__")
"""Functions whose result is linear in each of two operands."""


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
        if name in ("shape", "device", "ndim"):
            return getattr(self.real, name)
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
        if isinstance(other, Pair):
            return self * reciprocal(other)
        if isinstance(other, complex):
            return self * (1 / other)
        return Pair(self.real / other, self.imag / other)

    def __rtruediv__(self, other: Any) -> "Pair":
        """The quotient of a tensor or a number by a pair."""
        return product(operator.mul, reciprocal(self), other)

    def __pow__(self, exponent: Any) -> "Pair":
        """The power with a whole number."""
        return power(self, exponent)

    def __abs__(self) -> Tensor:
        """The magnitude."""
        return magnitude(self)

    __radd__, __rmul__ = __add__, __mul__


def paired(value: Any) -> Pair:
    """`value` as a pair; the imaginary part of a real tensor or number is zero."""
    if isinstance(value, complex):
        return Pair(value.real, value.imag)  # type: ignore[arg-type]  # numbers broadcast
    return value if isinstance(value, Pair) else Pair(value, 0 * value)


def product(multiply: Callable[[Any, Any], Any], a: Any, b: Any) -> Pair:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i for a bilinear `multiply`."""
    if not isinstance(b, Pair | complex):
        return Pair(multiply(a.real, b), multiply(a.imag, b))
    if not isinstance(a, Pair | complex):
        return Pair(multiply(a, b.real), multiply(a, b.imag))
    real = multiply(a.real, b.real) - multiply(a.imag, b.imag)
    return Pair(real, multiply(a.real, b.imag) + multiply(a.imag, b.real))


def compute(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func`, the function of torch named `name`, returns for these arguments."""
    if name in SPECIAL:
        return SPECIAL[name](*args, **kwargs)
    if name in BOTH:
        first, second = (
            func(*taken(args, part), **{key: taken(value, part) for key, value in kwargs.items()})
            for part in ("real", "imag")
        )
        if isinstance(first, tuple | list):
            return tuple(map(Pair, first, second))
        return Pair(first, second)
    if name in BILINEAR:
        equation, operands = (args[:1], args[1:]) if name == "einsum" else ((), args)
        if len(operands) == 2:
            return product(partial(func, *equation), *operands)
    raise unsupported(name)


def taken(value: Any, part: str) -> Any:
    """Replace each pair in `value` by its real or its imaginary part."""
    if isinstance(value, Pair):
        return getattr(value, part)
    if isinstance(value, tuple | list):
        return type(value)(taken(each, part) for each in value)
    return value


def unsupported(name: str) -> ModelError:
    """The error for a function of complex numbers that is not known here."""
    frames = ((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())
    return ModelError(
        "The model computes with complex numbers ({operator}){place}, which cannot be exported. "
        "Compute the real and the imaginary part as two tensors.",
        code="model.complex-numbers",
        operator=name,
        place=source_lines.parenthesized(source_lines.innermost(frames)),
    )


def magnitude(z: Pair) -> Tensor:
    """|z|; its gradient at zero is zero, as PyTorch's."""
    size: Tensor = torch.linalg.vector_norm(torch.stack([z.real, z.imag], -1), dim=-1)
    return size


def view_as_real(z: Pair) -> Tensor:
    """Both parts along a new last axis."""
    return torch.stack([z.real, z.imag], -1)


def conjugate(z: Pair) -> Pair:
    """The conjugate."""
    return Pair(z.real, -z.imag)


def exponential(z: Pair) -> Pair:
    """e^z."""
    size = z.real.exp()
    return Pair(size * z.imag.cos(), size * z.imag.sin())


def added(a: Any, b: Any, alpha: float = 1) -> Pair:
    """`torch.add`."""
    total: Pair = paired(a) + b * alpha
    return total


def subtracted(a: Any, b: Any, alpha: float = 1) -> Pair:
    """`torch.sub`."""
    difference: Pair = paired(a) - b * alpha
    return difference


def divided(a: Any, b: Any) -> Pair:
    """`torch.div`."""
    quotient: Pair = paired(a) / b
    return quotient


def reciprocal(z: Pair) -> Pair:
    """1 / z."""
    square = z.real.square() + z.imag.square()
    return Pair(z.real / square, -z.imag / square)


def power(z: Any, exponent: Any) -> Pair:
    """z^n for a whole number n, by squares."""
    whole = isinstance(exponent, int | float) and exponent == int(exponent)
    if not isinstance(z, Pair) or not whole:
        raise unsupported("pow")
    n = abs(int(exponent))
    result = Pair(torch.ones_like(z.real), torch.zeros_like(z.imag))
    factor = z if exponent >= 0 else reciprocal(z)
    while n:
        result = result * factor if n % 2 else result
        factor, n = factor * factor, n // 2
    return result


def padded(z: Pair, pad: Any, mode: str = "constant", value: Any = None) -> Pair:
    """`torch.nn.functional.pad`."""
    if mode != "constant":
        return Pair(*(functional.pad(part, pad, mode) for part in (z.real, z.imag)))
    filled = complex(value or 0)
    return Pair(
        functional.pad(z.real, pad, value=filled.real),
        functional.pad(z.imag, pad, value=filled.imag),
    )


def converted(z: Pair, *to: Any, **_: Any) -> Pair:
    """`Tensor.to` another complex type or device: a graph has only one of each."""
    if any(isinstance(kind, torch.dtype) and not kind.is_complex for kind in to):
        raise unsupported("to")
    return z


def same(parts: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """For each name in `parts`, a function that returns the part of a pair with this name."""
    return {part: operator.attrgetter(part) for part in parts}


SPECIAL: dict[str, Callable[..., Any]] = {
    **same(("real", "imag")),
    "abs": magnitude,
    "absolute": magnitude,
    "angle": lambda z: torch.atan2(z.imag, z.real),
    "conj": conjugate,
    "resolve_conj": lambda z: z,
    "conj_physical": conjugate,
    "view_as_real": view_as_real,
    "exp": exponential,
    "square": lambda z: z * z,
    "is_complex": lambda z: True,
    "numel": lambda z: z.real.numel(),
    "add": added,
    **dict.fromkeys(("sub", "subtract"), subtracted),
    "rsub": lambda a, b, alpha=1: subtracted(b, a, alpha),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), divided),
    "__rtruediv__": lambda a, b: divided(b, a),
    "reciprocal": reciprocal,
    **dict.fromkeys(("pow", "__pow__"), power),
    "pad": padded,
    "to": converted,
}
"""Functions of torch with a form of their own."""
