"""Checks the content of an ONNX file before a runtime opens it.

The file of an exported graph contains all values and only operators of ONNX's own domain. A graph
in blocked form may also contain the runtime's operators for this form. Other content could make the
runtime read other files or load other code. Devices do not have the library `onnx`. So this module
reads the needed parts of the file's Protocol Buffers
(github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from device_agent.formats.graph_forms import WINOGRAD, form_of
from profiles.errors import BundleError

LARGEST_BYTE = 127
"""The largest value of the last byte of an encoded integer (varint)."""
DEEPEST = 100
"""How far graphs may be nested in attributes of operators."""
INSIDE = {
    "model": {7: "graph"},
    "graph": {1: "operator", 5: "tensor", 15: "sparse tensor"},
    "operator": {5: "attribute"},
    "attribute": {
        **dict.fromkeys((5, 10), "tensor"),
        **dict.fromkeys((6, 11), "graph"),
        **dict.fromkeys((22, 23), "sparse tensor"),
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""The protobuf messages inside each message, by the number of the field."""
FORBIDDEN = {
    ("model", 20): "a training of its own",
    ("model", 25): "functions",
    ("tensor", 13): "values in another file",
}
"""Fields that exported graphs never have, and a description of their content."""
OPERATOR = ("operator", 4)
RANDOM = frozenset(
    (b"Bernoulli", b"Dropout", b"Multinomial", b"RandomNormal", b"RandomNormalLike",
     b"RandomUniform", b"RandomUniformLike")
)  # fmt: skip
"""Operators whose results depend on earlier runs. With them, a gradient could reveal how many
samples came before, so noise for one sample would not be enough. Exported graphs use a seed
instead."""
DOMAIN = ("operator", 7)
EXTERNAL = ("tensor", 14)
OWN = frozenset({b"", b"ai.onnx"})
"""Names of ONNX's own domain."""
BLOCKED = OWN | {b"com.microsoft.nchwc"}
"""The domains of a graph in blocked form."""


def check_graph(path: Path) -> None:
    """Check the ONNX file `path` before a runtime opens it.

    Raises:
        BundleError: The file has content that exported graphs never have, or is not an ONNX file.
    """
    try:
        domains = OWN if form_of(path.name) in (None, WINOGRAD) else BLOCKED
        content = foreign(memoryview(path.read_bytes()), domains=domains)
    except (ValueError, IndexError):
        content = "bytes that are not ONNX"
    if content is not None:
        raise BundleError(
            "{file} was not opened: the graph has {found}, which exported graphs never have. Do "
            "not train this bundle; ask where it comes from.",
            code="bundle.unsafe-graph",
            file=path.name,
            found=content,
        )


def foreign(
    data: memoryview, kind: str = "model", depth: int = 0, domains: Collection[bytes] = OWN
) -> str | None:
    """Describe the first content in the protobuf message `data` that exported graphs never have.

    Returns None if there is no such content. `domains` are the allowed domains of operators.

    Raises ValueError or IndexError if `data` is not a message of this `kind`.
    """
    if depth > DEEPEST:
        return "too many graphs within graphs"
    for number, value in fields(data):
        if (kind, number) in FORBIDDEN or ((kind, number) == EXTERNAL and value):
            return FORBIDDEN.get((kind, number), "values in another file")
        if isinstance(value, int):
            continue
        if (kind, number) == OPERATOR and bytes(value) in RANDOM:
            return f"the operator {bytes(value).decode()!r}"
        if (kind, number) == DOMAIN and bytes(value) not in domains:
            return f"operators of the domain {bytes(value[:40]).decode('ascii', 'replace')!r}"
        if number in INSIDE[kind]:
            content = foreign(value, INSIDE[kind][number], depth + 1, domains)
            if content is not None:
                return content
    return None


def fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield the fields of a protobuf message: each number, and its bytes or integer."""
    position = 0
    while position < len(data):
        # Nearly all keys and sizes have one byte. Reading them without a call halves the time.
        key, position = data[position], position + 1
        if key > LARGEST_BYTE:
            key, position = varint(data, position - 1)
        match key & 7:
            case 0:
                value, position = varint(data, position)
                yield key >> 3, value
            case 1:
                position += 8
            case 2:
                size, position = data[position], position + 1
                if size > LARGEST_BYTE:
                    size, position = varint(data, position - 1)
                if size > len(data) - position:
                    raise ValueError("a field ends after its message")
                yield key >> 3, data[position : position + size]
                position += size
            case 5:
                position += 4
            case other:
                raise ValueError(f"no wire type {other}")


def varint(data: memoryview, position: int) -> tuple[int, int]:
    """Decode the integer at `position`. Returns the integer and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & LARGEST_BYTE) << shift
        if byte <= LARGEST_BYTE:
            return number, position
    raise ValueError("a whole number is too long")
