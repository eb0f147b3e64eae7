"""A built page for phones, small, and read by nobody but the tests of how it is served."""

import gzip
import hashlib
import json
from pathlib import Path

FILES = {
    "index.html": ("text/html; charset=utf-8", b"<!doctype html><title>Join</title>", False),
    "page-0a1b.js": ("text/javascript; charset=utf-8", b"// " + b"x" * 200_000, True),
    "agent-2c3d.wasm": ("application/wasm", bytes(range(256)) * 300, True),
}
"""Type, content and whether the name has a hash, by name."""


def brotli(data: bytes) -> bytes:
    """Stands in for brotli, which Python does not have: what matters is which bytes are sent."""
    return b"brotli of " + hashlib.sha256(data).digest() + data[: len(data) // 2]


def build_page(folder: Path) -> Path:
    """Write the page as `make web` does: text also with gzip, the rest with brotli only."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, (kind, data, immutable) in FILES.items():
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
