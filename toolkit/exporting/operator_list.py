"""The operators that a model may use, for programs. `exporters` has the table itself."""

from exporters.programs.coverage import SUPPORTED, UNSUPPORTED

OPERATORS_VERSION = 1


def as_json() -> dict[str, object]:
    """The document that `export --list-operators --json` prints.

    Every group in `operators` exports as ONNX and as TFLite, gradients included. Those in
    `not_covered` export in neither format; `aten_prefixes` are how their ATen names begin.
    """
    return {
        "version": OPERATORS_VERSION,
        "operators": [{"name": group.name, "covers": group.covers} for group in SUPPORTED],
        "not_covered": [
            {
                "name": one.name,
                "aten_prefixes": list(one.prefixes),
                "reason": one.reason,
                "instead": one.alternative,
            }
            for one in UNSUPPORTED
        ],
    }
