"""Computes a key for the graphs of a program. Equal keys mean equal graphs.

A graph depends on three things: the ports of a signature, everything that the signature's function
can reach, and the code that traces and lowers the function. The key covers all three. Tracing takes
a third of the time of an export. So the key is computed from the function and not from the traced
graph.
"""

import functools
import hashlib
import operator
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from exporters.programs.program import Program, ProgramSignature
from exporters.programs.training.losses import Objective

LIBRARIES = (
    *("torch", "onnx", "onnxscript", "onnx-ir", "numpy", "sympy"),
    *("onnxruntime", "ai-edge-litert"),
)
"""Libraries that determine the graph, or run it when it is verified."""

ALWAYS = ("exporters", "device_agent", "profiles")
"""Packages whose code traces, lowers and verifies every program."""

OWN = (*ALWAYS, "toolkit")
"""Packages whose functions a key can describe, because it includes their sources."""

LIBRARY_FUNCTIONS = ("torch", "builtins", "operator", "_operator", "math", "_functools")
"""Packages whose functions are determined by a version in LIBRARIES or by Python's version."""

VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, msgspec.UnsetType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload),
)
"""Types whose `repr` describes a value completely."""


FUNCTIONS = (functools.partial, MethodType, FunctionType, BuiltinFunctionType, type)


class UnknownObjectError(Exception):
    """A function reaches an object that no key can describe, so its graphs are not cached."""


def graphs_key(program: Program, signatures: Sequence[ProgramSignature], format: str) -> str | None:
    """Compute the key of the graphs that result when `signatures` are lowered together.

    Args:
        program: The program. Its tensors are inputs of the signatures, so the key does not depend
            on their numbers. All other tensors become constants of the graphs, so the key depends
            on their numbers.
        signatures: The signatures of `program` that share files.
        format: `onnx` or `tflite`.

    Returns:
        A SHA-256 in hexadecimal. Every process on machines of one kind computes the same key. None
        if a function reaches an object that this module does not know, for example a caller's own
        function.
    """
    inputs = {entry.name for entry in program.tensors}
    inputs |= {entry.stands_for for entry in program.tensors if entry.stands_for is not None}
    walk = Walk(frozenset(inputs))
    try:
        parts = [part for s in signatures for part in walk.signature(s)]
    except UnknownObjectError:
        return None
    # A cached verdict depends on these: verification draws labels and samples within the limits.
    int8 = sorted(program.int8.intersection(port.name for s in signatures for port in s.inputs))
    limits = (program.classes, program.sample_limit, *int8)
    # Take only packages that the functions use, so that changes of others keep the cache valid.
    sources = [sources_digest(package) for package in sorted({*ALWAYS, *walk.packages})]
    return digest([format, repr(limits), environment(), *sources, *parts])


def figures_key(graph: bytes, batch: int) -> str:
    """The cache key for a graph's other forms and its figures, for batches of `batch` samples."""
    sources = [sources_digest(package) for package in ALWAYS]
    return digest([hashlib.sha256(graph).hexdigest(), str(batch), environment(), *sources])


def loss_code(goal: Objective) -> str:
    """Describe the user's own loss by two words: the versions that recorded it, and a key.

    With equal versions, the key changes only if the loss changes. Compare two keys only if the
    versions are equal: other versions, for example of torch, may record the same loss with other
    operators.
    """
    assert isinstance(goal.together, GraphModule)
    recorded_by = digest([environment(), *map(sources_digest, ALWAYS)])
    parts = [repr(goal.labels.parts), *goal.measures, *Walk(frozenset()).graph(goal.together)]
    return f"{recorded_by} {digest(parts)}"


class Walk:
    """Describes all objects that a function can reach, as text.

    `packages` collects the names of this project's packages that contain the code of these objects.
    """

    def __init__(self, inputs: frozenset[str]) -> None:
        """`inputs` are the names of tensors that signatures read as inputs."""
        self.inputs = inputs
        self.packages: set[str] = set()
        # Keep the objects, so that no other object gets the id of a freed object.
        self.seen: dict[int, tuple[int, object]] = {}

    def signature(self, signature: ProgramSignature) -> Iterator[str]:
        """Everything that determines the graph. `signature.source` is only for error messages."""
        yield signature.name
        yield from self.parts((signature.inputs, signature.outputs, signature.recompute))
        yield from self.parts(signature.function)

    def parts(self, value: Any) -> Iterator[str]:
        """Yield the description of `value`. Raises UnknownObjectError if there is none."""
        if isinstance(value, VALUES):
            yield f"{type(value).__name__} {value!r}"
            return
        # Python may share equal immutable objects or not, so their identity means nothing.
        if not isinstance(value, tuple | frozenset | msgspec.Struct):
            if id(value) in self.seen:  # this also ends cycles, for example of recursive functions
                yield f"seen {self.seen[id(value)][0]}"
                return
            self.seen[id(value)] = (len(self.seen), value)
        yield type(value).__qualname__
        yield from self.contents(value)

    def contents(self, value: Any) -> Iterator[str]:
        """Yield the description of the content of `value`, in a form that depends on its type."""
        if isinstance(value, Tensor):
            yield from tensor_parts(value)
        elif isinstance(value, GraphModule):
            yield from self.graph(value)
        elif isinstance(value, Mapping):
            yield from self.mapping(value)
        elif isinstance(value, list | tuple):
            yield str(len(value))
            for item in value:
                yield from self.parts(item)
        elif isinstance(value, set | frozenset):
            if not all(isinstance(item, VALUES) for item in value):
                raise UnknownObjectError
            # The order of a set differs between processes, because hashes of text do.
            yield from sorted(f"{type(item).__name__} {item!r}" for item in value)
        elif isinstance(value, FUNCTIONS):
            yield from self.callable(value)
        else:
            yield from self.instance(value)

    def mapping(self, value: Mapping[Any, Any]) -> Iterator[str]:
        """Yield the description of all keys and values, in order."""
        yield str(len(value))
        for key, item in value.items():
            yield from self.parts(key)
            yield from self.named(key, item)

    def named(self, name: object, value: Any) -> Iterator[str]:
        """Yield the description of `value`, which is called `name`.

        If `value` is a tensor that the graphs take as an input, only its type and shape are
        described.
        """
        if isinstance(value, Tensor) and name in self.inputs:
            yield f"input {value.dtype} {tuple(value.shape)}"
        else:
            yield from self.parts(value)

    def graph(self, module: GraphModule) -> Iterator[str]:
        """The code of a recorded model and everything that it reads."""
        yield module.code
        for node in module.graph.find_nodes(op="get_attr", sort=True):
            name = str(node.target)
            yield name
            yield from self.named(name, operator.attrgetter(name)(module))
        if module.graph.find_nodes(op="call_module"):
            raise UnknownObjectError

    def callable(self, value: Any) -> Iterator[str]:
        """A function's code and the values that are bound to it."""
        if isinstance(value, functools.partial):
            yield from self.parts((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            yield from self.parts((value.__func__, value.__self__))
        elif isinstance(value, FunctionType):
            yield self.place(value)
            yield from code_parts(value.__code__)
            yield from self.parts((value.__defaults__, value.__kwdefaults__))
            for cell in value.__closure__ or ():
                yield from self.parts(contents_of(cell))
            yield from self.mapping(vars(value))
        else:
            yield self.place(value)

    def instance(self, value: Any) -> Iterator[str]:
        """The class and the fields of an object of our own packages."""
        if package_of(type(value)) not in OWN:  # unknown objects may hide changing state
            raise UnknownObjectError
        yield self.place(type(value))
        if isinstance(value, msgspec.Struct):
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
        else:
            try:
                fields = vars(value)
            except TypeError:
                raise UnknownObjectError from None
        yield from self.mapping(fields)

    def place(self, value: Any) -> str:
        """Return module and name of a function or class. Adds packages of our own to `packages`."""
        package = package_of(value)
        if package in OWN:
            self.packages.add(package)
        elif package not in LIBRARY_FUNCTIONS:
            raise UnknownObjectError
        return f"{value.__module__} {value.__qualname__}"


def package_of(value: Any) -> str:
    """The top package of a function or class."""
    return str(value.__module__).partition(".")[0]


def tensor_parts(tensor: Tensor) -> Iterator[str]:
    """Type, shape and numbers of a tensor that becomes a constant of a graph."""
    if isinstance(tensor, FakeTensor) or (tensor.layout, tensor.device.type) != (
        torch.strided,
        "cpu",
    ):
        raise UnknownObjectError
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    yield f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def code_parts(code: CodeType) -> Iterator[str]:
    """A description that distinguishes the functions of one source file."""
    yield f"{code.co_firstlineno} {code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_parts(constant)
        # The `repr` of a frozenset differs between processes. The digest of the sources covers it.
        elif not isinstance(constant, frozenset):
            yield repr(constant)


def contents_of(cell: Any) -> Any:
    """The value of a variable that a function captures from the enclosing function."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise UnknownObjectError from None


def digest(parts: Iterable[str]) -> str:
    """SHA-256 of `parts` and of their lengths, so that ("ab", "c") differs from ("a", "bc")."""
    sha256 = hashlib.sha256()
    for part in parts:
        data = part.encode()
        sha256.update(len(data).to_bytes(8, "big") + data)
    return sha256.hexdigest()


@functools.cache
def sources_digest(package: str) -> str:
    """SHA-256 of all Python sources of one of our packages."""
    folder = Path(str(sys.modules[package].__file__)).parent
    return digest(
        text
        for path in sorted(folder.rglob("*.py"))
        for text in (path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
    )


def environment() -> str:
    """Versions and properties of this machine on which graphs and verdicts depend."""
    # PyTorch chooses its kernels by this.
    capability = torch.backends.cpu.get_cpu_capability()
    return repr((library_versions(), platform.machine(), capability, torch.get_default_dtype()))


@functools.cache
def library_versions() -> tuple[tuple[str, str], ...]:
    """The versions of Python and of LIBRARIES; empty for a library that is not installed."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    return ("python", platform.python_version()), *((name, version(name)) for name in LIBRARIES)
