"""ONNX Runtime's blocked operators by their definition, for the reference evaluator."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from onnx.reference.op_run import OpRun

from exporters.onnx.graph_reading import DOMAIN


def in_order(blocks: np.ndarray, block: int) -> np.ndarray:
    """(N, C, H, W) from the memory of a blocked tensor of this shape."""
    batch, channels, rows, columns = blocks.shape
    apart = blocks.reshape(batch, channels // block, rows, columns, block)
    return apart.transpose(0, 1, 4, 2, 3).reshape(blocks.shape)


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    batch, channels, rows, columns = x.shape
    apart = x.reshape(batch, channels // block, block, rows, columns)
    return np.ascontiguousarray(apart.transpose(0, 1, 3, 4, 2)).reshape(x.shape)


def operators(block: int) -> list[type[OpRun]]:
    """ONNX Runtime's blocked operators by their definition (onnxruntime, nchwc_ops.cc)."""

    class ReorderInput(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, channels_last: int = 0) -> tuple[Any]:
            x = np.moveaxis(x, -1, 1) if channels_last else x
            missing = -x.shape[1] % block
            return (in_blocks(np.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))), block),)

    class ReorderOutput(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, channels: int = 0, channels_last: int = 0) -> tuple[Any]:
            assert x.shape[1] == channels
            x_in_order = in_order(x, block)
            return (np.moveaxis(x_in_order, 1, -1) if channels_last else x_in_order,)

    class Conv(OpRun):
        op_domain = DOMAIN

        def _run(
            self, x: Any, w: Any, bias: Any = None, summand: Any = None, **given: Any
        ) -> tuple[Any]:
            outer, inner, *kernel = w.shape
            if inner % block == 0:
                weight = w.reshape(outer // block, inner // block, *kernel, block, block)
                weight = weight.transpose(0, 5, 1, 4, 2, 3).reshape(w.shape)
            else:
                weight = w.reshape(outer // block, inner, *kernel, block)
                weight = weight.transpose(0, 4, 1, 2, 3).reshape(w.shape)
            images = x if x.shape[1] < block else in_order(x, block)
            top, left, bottom, right = given["pads"]
            assert list(kernel) == list(given.get("kernel_shape") or kernel)
            y = F.conv2d(
                F.pad(torch.tensor(images), (left, right, top, bottom)),
                torch.tensor(np.ascontiguousarray(weight)),
                None if bias is None else torch.tensor(bias),
                given["strides"],
                0,
                given["dilations"],
                given["group"],
            )
            result = in_blocks(y.numpy(), block)
            if summand is not None:
                result = result + summand
            return (np.maximum(result, 0) if given.get("activation") == "Relu" else result,)

    class MaxPool(OpRun):
        op_domain = DOMAIN

        def _run(
            self,
            x: Any,
            kernel_shape: Any,
            strides: Any,
            pads: Any,
            dilations: Any = None,
            **_: Any,
        ) -> tuple[Any]:
            images, (top, left, bottom, right) = torch.tensor(in_order(x, block)), pads
            framed = F.pad(images, (left, right, top, bottom), value=-np.inf)
            pooled = F.max_pool2d(framed, kernel_shape, strides, 0, dilations)
            return (in_blocks(pooled.numpy(), block),)

    class GlobalAveragePool(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any) -> tuple[Any]:
            return (in_blocks(in_order(x, block).mean((2, 3), keepdims=True), block),)

    class Pad(OpRun):  # the reference has none that crops
        def _run(
            self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: Any = None
        ) -> tuple[Any]:
            assert axes is None
            ends = pads.reshape(2, -1).T[::-1].reshape(-1).tolist()
            number = 0.0 if value is None else float(value)
            # The reference reverses axes by strides below zero, which torch does not take.
            padded = F.pad(torch.tensor(np.ascontiguousarray(x)), ends, value=number)
            return (padded.numpy(),)

    return [ReorderInput, ReorderOutput, Conv, MaxPool, GlobalAveragePool, Pad]
