"""The models of `make test-zoo`: as their libraries ship them, with random weights, small inputs.

Large architectures get fewer or narrower layers where their constructors allow it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

# torchvision's own operators are built for CUDA; it describes these two when it is imported.
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CLASSES = 5
IMAGE = (3, 64, 64)
TOKENS = (16,)
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: Its name in the table.
        kind: The kind of model.
        library: The library that ships it.
        make: Makes it.
        shape: Shape of one sample.
    """

    name: str
    kind: str
    library: str
    make: Make
    shape: tuple[int, ...]


def called(module: str, name: str, *args: Any, **options: Any) -> Make:
    """Calls `module.name` with some arguments; the module is imported at the call."""
    return lambda: getattr(import_module(module), name)(*args, **options)


def torchvision(name: str, **options: Any) -> Make:
    """A model that torchvision registers."""
    return called("torchvision.models", "get_model", name, num_classes=CLASSES, **options)


def timm(name: str, **options: Any) -> Make:
    """A model that timm registers."""
    return called("timm", "create_model", name, num_classes=CLASSES, **options)


def pytorchcv(name: str) -> Make:
    """A model that pytorchcv provides."""
    return called("pytorchcv.model_provider", "get_model", name, num_classes=10)


def transformers(prefix: str, head: str = "ForSequenceClassification", **options: Any) -> Make:
    """A model of transformers, from a small configuration."""

    def make() -> nn.Module:
        library = import_module("transformers")
        config = getattr(library, f"{prefix}Config")(**{"num_labels": CLASSES, **options})
        model: nn.Module = getattr(library, prefix + head)(config)
        return model

    return make


def seconds_of_sound(prefix: str, **options: Any) -> Make:
    """A model of transformers that reads a waveform."""
    speech = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "conv_dim": (16, 16),
        "conv_kernel": (10, 4),
        "conv_stride": (5, 4),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "classifier_proj_size": 16,
        "layerdrop": 0.0,
        "apply_spec_augment": False,
    }
    return transformers(prefix, **{**speech, **options})


TEXT = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
DECODER = {**TEXT, "pad_token_id": 0}
SHARED_KEYS = {**DECODER, "num_key_value_heads": 2}
VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6]}
ONCE = (1, 1, 1, 1)
LUCIDRAINS = {"num_classes": CLASSES, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
SERIES = {"num_input_channels": 6, "context_length": 64, "patch_length": 8, "num_targets": CLASSES}

CLASSIC: dict[str, tuple[str, Make]] = {
    "resnet18": ("torchvision", torchvision("resnet18")),
    "squeezenet1_1": ("torchvision", torchvision("squeezenet1_1")),
    "densenet": (
        "torchvision",
        called(
            "torchvision.models.densenet",
            "DenseNet",
            growth_rate=8,
            block_config=(3, 3),
            num_init_features=16,
            num_classes=CLASSES,
        ),
    ),
    "googlenet": ("torchvision", torchvision("googlenet", aux_logits=False, init_weights=False)),
    "regnet_y_400mf": ("torchvision", torchvision("regnet_y_400mf")),
    "resnet10t": ("timm", timm("resnet10t")),
    "resnet50": ("timm", timm("resnet50", layers=ONCE)),
    "resnext50_32x4d": ("timm", timm("resnext50_32x4d", layers=ONCE)),
    "vgg": (
        "timm",
        called(
            "timm.models.vgg",
            "VGG",
            [16, "M", 32, "M", 64, 64, "M", 64, 64, "M"],
            mlp_ratio=0.02,
            num_classes=CLASSES,
        ),
    ),
}
MOBILE: dict[str, tuple[str, Make]] = {
    "mobilenet_v2": ("torchvision", torchvision("mobilenet_v2")),
    "mobilenet_v3_small": ("torchvision", torchvision("mobilenet_v3_small")),
    "shufflenet_v2_x0_5": ("torchvision", torchvision("shufflenet_v2_x0_5")),
    "mnasnet0_5": ("torchvision", torchvision("mnasnet0_5")),
    "efficientnet_b0": ("torchvision", torchvision("efficientnet_b0")),
    "mobilenetv2_050": ("timm", timm("mobilenetv2_050")),
    "mobilenetv3_small_075": ("timm", timm("mobilenetv3_small_075")),
    "efficientnet_lite0": ("timm", timm("efficientnet_lite0")),
    "mnasnet_small": ("timm", timm("mnasnet_small")),
    "ghostnetv2_100": ("timm", timm("ghostnetv2_100")),
    "mobileone_s0": ("timm", timm("mobileone_s0")),
    "mobilenetv4_conv_small_050": ("timm", timm("mobilenetv4_conv_small_050")),
    "lcnet_050": ("timm", timm("lcnet_050")),
}
TRANSFORMERS: dict[str, tuple[str, Make]] = {
    "vit": (
        "torchvision",
        called(
            "torchvision.models",
            "VisionTransformer",
            image_size=64,
            patch_size=16,
            num_layers=2,
            num_heads=4,
            hidden_dim=32,
            mlp_dim=64,
            num_classes=CLASSES,
        ),
    ),
    "swin": (
        "torchvision",
        called(
            "torchvision.models",
            "SwinTransformer",
            patch_size=[4, 4],
            window_size=[4, 4],
            num_classes=CLASSES,
            **SWIN,
        ),
    ),
    "vit_tiny_patch16_224": ("timm", timm("vit_tiny_patch16_224", **VIT)),
    "deit_tiny_patch16_224": ("timm", timm("deit_tiny_patch16_224", **VIT)),
    "swin_tiny_patch4_window7": (
        "timm",
        timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, **SWIN),
    ),
    "mixer": (
        "timm",
        called(
            "timm.models.mlp_mixer",
            "MlpMixer",
            img_size=64,
            num_blocks=2,
            embed_dim=32,
            num_classes=CLASSES,
        ),
    ),
    "pvt_v2_b0": ("timm", timm("pvt_v2_b0", depths=ONCE)),
    "simple_vit": (
        "vit-pytorch",
        called("vit_pytorch.simple_vit", "SimpleViT", image_size=64, patch_size=16, **LUCIDRAINS),
    ),
}
HYBRID: dict[str, tuple[str, Make]] = {
    "convnext_atto": ("timm", timm("convnext_atto", depths=(1, 1, 2, 1))),
    "convnextv2_atto": ("timm", timm("convnextv2_atto", depths=ONCE)),
    "edgenext_xx_small": ("timm", timm("edgenext_xx_small")),
    "efficientvit_b0": ("timm", timm("efficientvit_b0")),
    "fastvit_t8": ("timm", timm("fastvit_t8", layers=ONCE)),
    "inception_next_atto": ("timm", timm("inception_next_atto", depths=(1, 1, 2, 1))),
    "maxvit_tiny_tf": (
        "timm",
        timm("maxvit_tiny_tf_224", img_size=64, depths=(1, 1), embed_dim=(32, 64), stem_width=32),
    ),
    "mobilevitv2_050": ("timm", timm("mobilevitv2_050")),
    "poolformer": (
        "timm",
        called(
            "timm.models.metaformer",
            "MetaFormer",
            depths=ONCE,
            dims=(32, 64, 96, 128),
            num_classes=CLASSES,
        ),
    ),
}
ENCODERS: dict[str, Make] = {
    "bert": transformers("Bert", **TEXT),
    "roberta": transformers("Roberta", **TEXT),
    "electra": transformers("Electra", **TEXT, embedding_size=16),
    "albert": transformers("Albert", **TEXT, embedding_size=16),
    "distilbert": transformers(
        "DistilBert",
        vocab_size=200,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=32,
    ),
    "mobilebert": transformers(
        "MobileBert",
        **TEXT,
        embedding_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
    ),
}
DECODERS: dict[str, Make] = {
    "gpt2": transformers(
        "GPT2",
        vocab_size=200,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": transformers("Llama", **SHARED_KEYS),
    "opt": transformers("OPT", **DECODER, ffn_dim=64, word_embed_proj_dim=32),
    "qwen2": transformers("Qwen2", **SHARED_KEYS),
    "gpt_neox": transformers("GPTNeoX", **DECODER),
    "mamba": transformers(
        "Mamba", "ForCausalLM", vocab_size=200, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
}
AUDIO: dict[str, tuple[Make, tuple[int, ...]]] = {
    "wav2vec2": (seconds_of_sound("Wav2Vec2"), (800,)),
    "hubert": (seconds_of_sound("Hubert"), (800,)),
    "wavlm": (seconds_of_sound("WavLM"), (800,)),
    "ast": (
        transformers(
            "AST",
            "ForAudioClassification",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_length=64,
            num_mel_bins=32,
        ),
        (64, 32),
    ),
}
SENSORS: dict[str, tuple[str, Make, tuple[int, ...]]] = {
    "patchtst": (
        "transformers",
        transformers(
            "PatchTST",
            "ForClassification",
            **SERIES,
            patch_stride=8,
            d_model=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            use_cls_token=True,
        ),
        (64, 6),
    ),
    "patchtsmixer": (
        "transformers",
        transformers(
            "PatchTSMixer",
            "ForTimeSeriesClassification",
            **SERIES,
            patch_stride=8,
            d_model=16,
            num_layers=2,
        ),
        (64, 6),
    ),
    "simple_vit_1d": (
        "vit-pytorch",
        called(
            "vit_pytorch.simple_vit_1d",
            "SimpleViT",
            seq_len=64,
            patch_size=8,
            channels=6,
            **LUCIDRAINS,
        ),
        (6, 64),
    ),
}

CIFAR = ("resnet20_cifar10", "preresnet20_cifar10", "sepreresnet20_cifar10", "nin_cifar10")

MODELS = [
    *(ZooModel(name, "classic CNN", *row, IMAGE) for name, row in CLASSIC.items()),
    *(ZooModel(n, "classic CNN", "pytorchcv", pytorchcv(n), (3, 32, 32)) for n in CIFAR),
    *(ZooModel(name, "mobile CNN", *row, IMAGE) for name, row in MOBILE.items()),
    *(ZooModel(name, "vision transformer", *row, IMAGE) for name, row in TRANSFORMERS.items()),
    *(ZooModel(name, "hybrid", *row, IMAGE) for name, row in HYBRID.items()),
    # Its attention has a table of positions for images of 224 x 224 only.
    ZooModel(
        "efficientformer_l1",
        "hybrid",
        "timm",
        timm("efficientformer_l1", depths=(1, 1, 1, 2)),
        (3, 224, 224),
    ),
    *(ZooModel(n, "text encoder", "transformers", make, TOKENS) for n, make in ENCODERS.items()),
    *(ZooModel(n, "decoder", "transformers", make, TOKENS) for n, make in DECODERS.items()),
    *(ZooModel(n, "audio", "transformers", *row) for n, row in AUDIO.items()),
    *(ZooModel(n, "sensors", *row) for n, row in SENSORS.items()),
]
