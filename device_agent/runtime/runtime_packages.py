"""The packages of the runtimes and their tested versions. This module does not import them."""

LITERT = "ai-edge-litert"
VERIFIED = ("1.19.2", "1.23.2", "1.31.1")
"""The versions of onnxruntime with which this version of EdgeTailor is tested."""


def unverified(installed: str) -> str | None:
    """A remark on the version `installed` of onnxruntime; None if this version is in `VERIFIED`.

    Examples:
        >>> unverified("1.25.0")
        'onnxruntime 1.25.0 is installed; graphs were verified with 1.19.2, 1.23.2 and 1.31.1'
    """
    if installed in VERIFIED:
        return None
    known = f"{', '.join(VERIFIED[:-1])} and {VERIFIED[-1]}"
    return f"onnxruntime {installed} is installed; graphs were verified with {known}"
