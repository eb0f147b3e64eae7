"""The error for a Python package that is not installed: which extra of this project has it."""

from profiles.errors import InputError

EXTRAS = {
    **dict.fromkeys(("ai_edge_litert", "flatbuffers", "sympy"), "tflite"),
    **{name: name for name in ("mlflow", "tensorboard")},
}
"""The extra that installs a package. `toolkit` installs all others."""


def missing_package(name: str) -> InputError:
    """The error for the missing module `name`, with the command that installs it."""
    package = name.partition(".")[0]
    extra = EXTRAS.get(package, "toolkit")
    return InputError(
        "The Python package {package} is not installed. Run `pip install '.[{extra}]'` in the "
        "folder of EdgeTailor's source to install it and all packages of the server side.",
        code="program.missing-package",
        package=package,
        extra=extra,
    )
