"""Size, accuracy and time of deployed graphs by precision, for three models trained on digits.

Each model trains in plain PyTorch. `edgetailor deploy` then writes it in both formats as float32,
float16 and int8, calibrated on 512 of the samples that it was trained with. Accuracy is that of the
file on 360 other samples. Times are those of the card: a prediction of one sample on one thread,
in turns with float32. Run `make bench-deploy`.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import edgetailor as et
from deployed_digits import split_digits, train

Images = tuple[np.ndarray, np.ndarray]


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and projection, as in MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 6) -> None:
        super().__init__()
        wide = inputs * expansion
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return x + y if self.adds else y  # type: ignore[no-any-return]


def mobilenet() -> nn.Module:
    """MobileNetV2's blocks, for images of 8 x 8."""
    torch.manual_seed(1)
    blocks = [(32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 1), (96, 96, 1)]
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
        *(InvertedResidual(*block) for block in blocks),
        nn.Conv2d(96, 384, 1, bias=False), nn.BatchNorm2d(384), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip


def enlarged(data: Images) -> Images:
    """The digits as images of three channels and 32 x 32 points, for `resnet20`."""
    x, y = data
    return x.repeat(3, 1).repeat(4, 2).repeat(4, 3), y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Images], Images], int]] = {
    "digits_cnn": (lambda: et.load_model("toolkit.models:digits_cnn", seed=1), lambda d: d, 8),
    "resnet20": (lambda: et.load_model("toolkit.models:resnet20", seed=1), enlarged, 10),
    "MobileNetV2's blocks": (mobilenet, lambda d: d, 10),
}


def main() -> None:
    """Print a row for each model, format and precision."""
    print("| model | format | precision | file, kB | of float32 | accuracy | time of float32 |")
    print("|---|---|---|---|---|---|---|")
    for name, (build, shaped, epochs) in MODELS.items():
        own, held_out = map(shaped, split_digits())
        model = train(build(), *own, epochs=epochs)
        for file_format in ("onnx", "tflite"):
            whole = 0
            for precision in ("float32", "float16", "int8"):
                with tempfile.TemporaryDirectory() as folder:
                    card = et.deploy(
                        model, "full", own[0].shape[1:], Path(folder, "out"),
                        data=held_out, calibration=own,
                        format=file_format, precision=precision,  # type: ignore[arg-type]
                    ).card  # fmt: skip
                whole = whole or card.graph_bytes
                assert card.quality is not None
                assert card.quality.accuracy is not None
                time = "" if card.speed is None else (
                    f"{card.speed.seconds / card.speed.float32_seconds:.2f}"
                )  # fmt: skip
                print(
                    f"| `{name}` | {file_format} | {precision} | {card.graph_bytes / 1e3:.1f} | "
                    f"{card.graph_bytes / whole:.2f} | {card.quality.accuracy:.2%} | {time} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
