"""The operators that a model may use, for programs. `exporters` has the table itself."""

from exporters.programs.coverage import GROUPS, REFUSALS

OPERATORS_VERSION = 1


def as_json() -> dict[str, object]:
    """The document that `export --list-operators --json` prints.

    Every group in `operators` exports as ONNX and as TFLite, gradients included. Those in
    `not_covered` export in neither format; `aten_prefixes` are how their ATen names begin.
    """
    return {
        "version": OPERATORS_VERSION,
        "operators": [{"name": group.name, "covers": group.covers} for group in GROUPS],
        "not_covered": [
            {
                "name": one.name,
                "aten_prefixes": list(one.words),
                "reason": one.reason,
                "instead": one.nearest,
            }
            for one in REFUSALS
        ],
    }
