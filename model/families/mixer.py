"""MLP-Mixers of timm, whose configuration mostly follows from tensor shapes."""

import math
from typing import Any

from polyad.model.families.family import Family, Known, ShapeOf, labels_or_numbers
from polyad.model.families.keys import Tree, WeightsError, only
from polyad.model.families.tensors import Shape
from polyad.model.families.vision import FREE_OF_IMAGES, check_image_model, classes_of
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mixer import CHANNELS, TOKENS, MixerConfig

EPSILON = 1e-6
"""Epsilon of every LayerNorm in timm's Mixer."""
NAMES = {
    (patch, layers, width): f"mixer_{letter}{patch}_224"
    for letter, layers, width in (("s", 8, 512), ("b", 12, 768), ("l", 24, 1024))
    for patch in (16, 32)
}
"""timm's name of a Mixer, by patch size, blocks and width, for any image size."""
RATIOS = (0.5, 4.0)
"""Inner widths of token and channel layers relative to the width; `model_args` may override
them."""
_ARGUMENTS = ("mlp_ratio", "img_size", "in_chans", "num_classes", "patch_size", "num_blocks",
              "embed_dim", "drop_rate", "proj_drop_rate", "drop_path_rate")  # fmt: skip
"""`model_args` that follow from tensor shapes, or only matter in training."""


def _read(tree: Tree, shape_of: ShapeOf) -> dict[str, Any]:
    only("global_pool", "avg").read(tree)
    arguments = tree.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise WeightsError(f"model_args: {arguments!r:.60} is not an object of keys")
    if strange := sorted(arguments.keys() - set(_ARGUMENTS)):
        raise WeightsError(f"model_args.{strange[0]}: is not supported")

    def known(name: str, axes: int = 2) -> Shape:
        shape = shape_of(name)
        if shape is None or len(shape) != axes:
            problem = "no such tensor" if shape is None else f"the shape is {list(shape)}"
            raise WeightsError(f"{name}: {problem}; a Mixer of timm has one of {axes} axes")
        return shape

    width, channels, patch, _ = known("stem.proj.weight", 4)
    tokens, patches = known("blocks.0.mlp_tokens.fc1.weight")
    inner, _ = known("blocks.0.mlp_channels.fc1.weight")
    layers = 1
    while shape_of(f"blocks.{layers}.norm1.weight") is not None:
        layers += 1
    return {
        "image_size": math.isqrt(patches) * patch,
        "patch_size": patch,
        "channels": channels,
        "num_classes": classes_of("head.weight", shape_of),
        "num_layers": layers,
        "hidden_size": width,
        "layer_norm_epsilon": EPSILON,
        "token_feed_forward": DenseFeedForwardConfig(hidden_size=tokens),
        "channel_feed_forward": DenseFeedForwardConfig(hidden_size=inner),
    }


def _labels(tree: Tree) -> object:
    about = tree.get("pretrained_cfg")
    inside = about.get("label_names") if isinstance(about, dict) else None
    return tree.get("label_names", inside)


def _width(config: MixerConfig, key: str) -> int:
    return config.num_patches if key == TOKENS else config.hidden_size


def _check(config: MixerConfig) -> None:
    check_image_model(config)
    if config.activation != "gelu":
        raise WeightsError(f"model.activation: {config.activation!r}: timm's Mixer has 'gelu'")
    if config.layer_norm_epsilon != EPSILON:
        raise WeightsError(
            f"model.layer_norm_epsilon: {config.layer_norm_epsilon:g}: timm's Mixer has {EPSILON:g}"
        )


def _written(config: MixerConfig, known: Known) -> dict[str, Any]:
    size, ratios = config.image_size, _ratios(config)
    own = f"mixer_w{config.hidden_size}_l{config.num_layers}_p{config.patch_size}_{size}"
    return {
        "architecture": _name(config) or own,
        "num_classes": config.number("num_classes"),
        "num_features": config.hidden_size,
        "global_pool": "avg",
        "label_names": labels_or_numbers(known.class_names, config.number("num_classes")),
        "model_args": {} if ratios == RATIOS else {"mlp_ratio": list(ratios)},
        "pretrained_cfg": {
            "input_size": [config.channels, size, size],
            "fixed_input_size": True,
            "first_conv": "stem.proj",
            "classifier": "head",
        },
    }


def _name(config: MixerConfig) -> str | None:
    return NAMES.get((config.patch_size, config.num_layers, config.hidden_size))


def _ratios(config: MixerConfig) -> tuple[float, float]:
    """Returns inner widths relative to the width, of which timm rounds the products down."""
    ratios = []
    for key in (TOKENS, CHANNELS):
        size = config.feed_forwards()[key].inner_size(_width(config, key))
        ratio = size / config.hidden_size
        while int(ratio * config.hidden_size) < size:
            ratio = math.nextafter(ratio, math.inf)
        ratios.append(ratio)
    return ratios[0], ratios[1]


MIXER = Family(
    title="timm's Mixer",
    config=MixerConfig,
    model_types=(),  # timm's files name a model in `architecture`, and no class
    recognizes=lambda tree: str(tree.get("architecture", "")).startswith("mixer_"),
    outside={"patch_embedding": "stem.proj", "final_norm": "norm", "head": "head"},
    block="blocks.{}.",
    inside={
        "token_norm": "norm1",
        "token_feed_forward.up": "mlp_tokens.fc1",
        "token_feed_forward.down": "mlp_tokens.fc2",
        "channel_norm": "norm2",
        "channel_feed_forward.up": "mlp_channels.fc1",
        "channel_feed_forward.down": "mlp_channels.fc2",
    },
    may_lack_head=True,
    further=_read,
    free=lambda config: FREE_OF_IMAGES,
    width=_width,
    labels=_labels,
    check=_check,
    written=_written,
)
