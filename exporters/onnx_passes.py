"""Our own passes over an ONNX graph, beside those of onnx_ir."""

import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult


class MergeTransposes(InPlacePass):
    """Before: any graph. After: no Transpose reads a Transpose or leaves the axes in place."""

    def call(self, model: ir.Model) -> PassResult:
        """Let each second Transpose read what the first one read; both together permute once."""
        modified = False
        for node in list(model.graph):
            if node.op_type != "Transpose":
                continue
            (source,) = node.inputs
            first = source.producer() if source is not None else None
            order = permutation(node)
            if first is not None and first.op_type == "Transpose":
                modified = True
                before = permutation(first)
                order = [before[axis] for axis in order]
                source = first.inputs[0]
                node.replace_input_with(0, source)
                node.attributes["perm"] = ir.AttrInt64s("perm", order)
            (result,) = node.outputs
            if order == sorted(order) and source is not None and not result.is_graph_output():
                modified = True
                result.replace_all_uses_with(source)
        return PassResult(model, modified)


def permutation(node: ir.Node) -> list[int]:
    """Which axis of its input each axis of a Transpose's output is."""
    return list(node.attributes["perm"].as_ints())
