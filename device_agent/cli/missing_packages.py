"""The error for a Python package that is not installed.

The error names the extra that installs the package.
"""

from profiles.errors import InputError

EXTRAS = {
    **dict.fromkeys(("ai_edge_litert", "flatbuffers", "sympy"), "tflite"),
    **{name: name for name in ("mlflow", "tensorboard")},
}
"""The extra that installs each of these packages. `toolkit` installs all others."""

EVERYWHERE = ("cryptography", "msgspec", "numpy", "onnxruntime", "safetensors", "urllib3")
"""Packages that belong to every installation."""


def missing_package(name: str) -> InputError:
    """The error for the missing module `name`, with the command that installs it."""
    package = name.partition(".")[0]
    if package in EVERYWHERE:
        return InputError(
            "The Python package {package}, which every device needs, is not installed. Run "
            "`pip install {package}`.",
            code="program.missing-package",
            package=package,
        )
    extra = EXTRAS.get(package, "toolkit")
    return InputError(
        "The Python package {package} is not installed. Run `pip install '.[{extra}]'` in the "
        "folder of EdgeTailor's source to install it and all packages of the server side.",
        code="program.missing-package",
        package=package,
        extra=extra,
    )
