"""A built page for phones, small, and read by nobody but the tests of how it is served."""

import gzip
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, tuple[str, bytes, bool]]
FILES: Files = {
    "index.html": ("text/html; charset=utf-8", b"<!doctype html><title>Join</title>", False),
    "page-0a1b.js": ("text/javascript; charset=utf-8", b"// " + b"x" * 200_000, True),
    "agent-2c3d.wasm": ("application/wasm", bytes(range(256)) * 300, True),
}
"""Type, content and whether the name has a hash, by name."""
OPERATOR_FILES: Files = {
    "operator.4e5f.js": ("text/javascript; charset=utf-8", b"// live", True),
    "operator.6a7b.css": ("text/css; charset=utf-8", b"body {}", True),
    "icon.svg": ("image/svg+xml", b"<svg/>", False),
}
"""The same, for the operator's page."""


def brotli(data: bytes) -> bytes:
    """Stands in for brotli, which Python does not have: what matters is which bytes are sent."""
    return b"brotli of " + hashlib.sha256(data).digest() + data[: len(data) // 2]


def build_page(folder: Path, files: Files = FILES) -> Path:
    """Write the page as `make web` does: text also with gzip, the rest with brotli only."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, (kind, data, immutable) in files.items():
        (folder / f"{name}.br").write_bytes(brotli(data))
        if kind.startswith("text/"):
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        listed[name] = {
            "type": kind,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "immutable": immutable,
            "encodings": ["br", "gz"] if kind.startswith("text/") else ["br"],
        }
    (folder / "files.json").write_text(json.dumps(listed))
    return folder
