"""Made-up sysfs trees, which describe any machine."""

from collections.abc import Mapping
from pathlib import Path


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root
