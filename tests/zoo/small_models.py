"""Ten stock models, small enough to train them twice, without dropout and stochastic depth.

Each is a factory, so that a model reference such as `small_models:bert` names it. The narrow ones
have half of every width by their own constructors.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from torch import nn

from zoo_models import CLASSES, called, seconds_of_sound, transformers

MISSING = [name for name in ("timm", "torchvision", "transformers") if find_spec(name) is None]
"""Libraries of the extra `zoo` that are not installed."""
WORDS = 50
"""Size of the vocabularies; token 0 pads."""

SWIN = {
    "patch_size": [4, 4],
    "depths": [2, 1],
    "window_size": [4, 4],
    "stochastic_depth_prob": 0.0,
    "num_classes": CLASSES,
}
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_classes": CLASSES}
CONVNEXT = {"depths": (1, 1, 1, 1), "num_classes": CLASSES}
TEXT = {"vocab_size": WORDS, "num_hidden_layers": 1, "max_position_embeddings": 16}
BERT = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**TEXT, "pad_token_id": 0, "head_dim": 8}
GPT2 = {
    "vocab_size": WORDS,
    "n_layer": 1,
    "n_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MAMBA = {"vocab_size": WORDS, "num_hidden_layers": 1}
SPEECH = {
    "num_hidden_layers": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}
WIDE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
NARROW = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def mobilenet_v3() -> nn.Module:
    """MobileNetV3 with four blocks: both activations, with and without a gate and a shortcut."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    blocks = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1),
        InvertedResidualConfig(16, 3, 32, 24, False, "RE", 1, 1, 1),
        InvertedResidualConfig(24, 5, 48, 32, True, "HS", 2, 1, 1),
        InvertedResidualConfig(32, 5, 64, 32, True, "HS", 1, 1, 1),
    ]
    return MobileNetV3(blocks, last_channel=64, num_classes=CLASSES, dropout=0.0)


def efficientnet_b0() -> nn.Module:
    """The first four of the seven stages of EfficientNet-B0, each of one block or two."""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [
        MBConvConfig(1, 3, 1, 32, 16, 1),
        MBConvConfig(6, 3, 2, 16, 24, 1),
        MBConvConfig(6, 5, 2, 24, 40, 2),
        MBConvConfig(6, 3, 2, 40, 80, 1),
    ]
    return EfficientNet(
        stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=128
    )


convnext = called("timm.models.convnext", "ConvNeXt", dims=(16, 24, 24, 24), **CONVNEXT)
convnext_narrow = called("timm.models.convnext", "ConvNeXt", dims=(8, 12, 12, 12), **CONVNEXT)
swin = called("torchvision.models", "SwinTransformer", embed_dim=16, num_heads=[2, 4], **SWIN)
swin_narrow = called("torchvision.models", "SwinTransformer", embed_dim=8, num_heads=[1, 2], **SWIN)
vit = called(
    "torchvision.models", "VisionTransformer", num_heads=4, hidden_dim=32, mlp_dim=64, **VIT
)
vit_narrow = called(
    "torchvision.models", "VisionTransformer", num_heads=2, hidden_dim=16, mlp_dim=32, **VIT
)
bert = transformers("Bert", **BERT, **WIDE)
bert_narrow = transformers("Bert", **BERT, **NARROW)
gpt2 = transformers("GPT2", **GPT2, n_embd=32, n_head=4)
gpt2_narrow = transformers("GPT2", **GPT2, n_embd=16, n_head=2)
llama = transformers("Llama", **LLAMA, **WIDE, num_key_value_heads=2)
llama_narrow = transformers("Llama", **LLAMA, **NARROW, num_key_value_heads=1)
mamba = transformers(
    "Mamba", "ForCausalLM", **MAMBA, hidden_size=16, state_size=4, time_step_rank=2
)
mamba_narrow = transformers(
    "Mamba", "ForCausalLM", **MAMBA, hidden_size=8, state_size=2, time_step_rank=1
)
wav2vec2 = seconds_of_sound("Wav2Vec2", **SPEECH)
wav2vec2_narrow = seconds_of_sound(
    "Wav2Vec2", **SPEECH, **NARROW, conv_dim=(8, 8), classifier_proj_size=8
)


@dataclass(frozen=True)
class SmallModel:
    """A factory of this module.

    Attributes:
        name: The factory's name.
        shape: Shape of one sample.
        tokens: Whether samples are tokens.
        labels: Shape of the labels of one sample: a class, or a token for each position.
    """

    name: str
    shape: tuple[int, ...]
    tokens: bool = False
    labels: tuple[int, ...] = ()


MODELS = [
    SmallModel("mobilenet_v3", (3, 32, 32)),
    SmallModel("efficientnet_b0", (3, 32, 32)),
    SmallModel("convnext", (3, 32, 32)),
    SmallModel("swin", (3, 32, 32)),
    SmallModel("vit", (3, 32, 32)),
    SmallModel("bert", (8,), tokens=True),
    SmallModel("gpt2", (8,), tokens=True),
    SmallModel("llama", (8,), tokens=True),
    SmallModel("mamba", (6,), tokens=True, labels=(6,)),
    SmallModel("wav2vec2", (400,)),
]
