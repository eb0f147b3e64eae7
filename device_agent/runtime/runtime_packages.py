"""The packages of the optional runtimes, by name. Nothing is imported here."""

from importlib.util import find_spec

from profiles.errors import BundleError

LITERT = "ai-edge-litert"
OPENVINO = "openvino"
VERIFIED = ("1.19.2", "1.23.2", "1.31.1")
"""The versions of onnxruntime that this version of EdgeTailor is tested with."""


def unverified(installed: str) -> str | None:
    """A remark on the version `installed` of onnxruntime; None if it is one of `VERIFIED`.

    Examples:
        >>> unverified("1.25.0")
        'onnxruntime 1.25.0 is installed; graphs were verified with 1.19.2, 1.23.2 and 1.31.1'
    """
    if installed in VERIFIED:
        return None
    known = f"{', '.join(VERIFIED[:-1])} and {VERIFIED[-1]}"
    return f"onnxruntime {installed} is installed; graphs were verified with {known}"


def check_openvino() -> None:
    """Raise BundleError if OpenVINO is not installed. It is not loaded, which takes memory."""
    if find_spec(OPENVINO) is None:
        raise BundleError(
            "OpenVINO is not installed on this device. Install it with "
            "`pip install 'edgetailor[openvino]'`, or leave out --runtime openvino.",
            code="bundle.runtime-missing",
            runtime=OPENVINO,
        )
