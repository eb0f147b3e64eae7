"""torch.onnx's table of operators is built once, and no export changes another's."""

from torch.onnx._internal.exporter._registration import ONNXRegistry

from exporters.onnx.operator_table import operators


def test_exports_get_tables_of_their_own() -> None:
    fresh = ONNXRegistry.from_torchlib(opset_version=18)
    operators()
    first, second = (ONNXRegistry.from_torchlib(opset_version=18) for _ in range(2))
    assert first.functions.keys() == fresh.functions.keys()
    name, (form, *_) = next(iter(first.functions.items()))
    assert second.functions[name][0] is form  # not built again
    first.functions[name].clear()
    assert second.functions[name][0] is form
