"""The packages of the optional runtimes, by name. Nothing is imported here."""

from importlib.util import find_spec

from profiles.errors import BundleError

LITERT = "ai-edge-litert"
OPENVINO = "openvino"


def check_openvino() -> None:
    """Raise BundleError if OpenVINO is not installed. It is not loaded, which takes memory."""
    if find_spec(OPENVINO) is None:
        raise BundleError(
            "OpenVINO is not installed on this device. Install it with "
            "`pip install 'edgetailor[openvino]'`, or leave out --runtime openvino.",
            code="bundle.runtime-missing",
            runtime=OPENVINO,
        )
