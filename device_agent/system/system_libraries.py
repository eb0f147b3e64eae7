"""System libraries that compiled packages need and that small systems may lack."""

import re

MISSING = re.compile(r"([\w.+-]+\.so[.\d]*): cannot open shared object file")
DEBIAN_PACKAGES = {
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libgomp.so.1": "libgomp1",
    "libatomic.so.1": "libatomic1",
    "libz.so.1": "zlib1g",
}


def missing_library(said: str) -> str | None:
    """The library that is missing, according to the loader's message `said`; None if none is."""
    matched = MISSING.search(said)
    return matched[1] if matched else None
