"""torch.onnx's table of operators is built once, and no export changes another's."""

from torch.onnx._internal.exporter._registration import ONNXRegistry

from exporters.onnx.operator_table import operators


def test_exports_get_tables_of_their_own() -> None:
    fresh = ONNXRegistry.from_torchlib(opset_version=18)
    operators()
    one, other = (ONNXRegistry.from_torchlib(opset_version=18) for _ in range(2))
    assert one.functions.keys() == fresh.functions.keys()
    name, (form, *_) = next(iter(one.functions.items()))
    assert other.functions[name][0] is form  # not built again
    one.functions[name].clear()
    assert other.functions[name][0] is form
