"""MLP-Mixers of timm: config.json both ways."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.huggingface import HuggingFaceError
from polyad.model.mixer import CHANNELS, TOKENS, MixerConfig

Shape = tuple[int, ...]
TIMM_EPSILON = 1e-6
"""In every LayerNorm of timm's Mixer."""
TIMM_NAMES = {
    (patch, layers, width): f"mixer_{letter}{patch}_224"
    for letter, layers, width in (("s", 8, 512), ("b", 12, 768), ("l", 24, 1024))
    for patch in (16, 32)
}
"""Timm's name of a Mixer, by patch size, blocks and width; the image size may be any."""
TIMM_RATIOS = (0.5, 4.0)
"""Inner widths of token and channel layers over the width, unless `model_args` has others."""
_TIMM_ARGUMENTS = ("mlp_ratio", "img_size", "in_chans", "num_classes", "patch_size", "num_blocks",
                   "embed_dim", "drop_rate", "proj_drop_rate", "drop_path_rate")  # fmt: skip
"""`model_args` that the shapes of tensors tell, or that matter in training alone."""


def mixer_config(
    tree: Mapping[str, Any], shape_of: Callable[[str], Shape | None], origin: str
) -> MixerConfig:
    """Reads the configuration of timm's folder, most of it from the shapes of its tensors.

    Args:
        tree: The content of config.json.
        shape_of: The shape of a tensor of the folder; None if it is not there.
        origin: What to call config.json in errors.

    Raises:
        HuggingFaceError: It asks for what is not built here.
    """
    arguments = tree.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise HuggingFaceError(f"{origin}: model_args: {arguments!r:.60} is not an object of keys")
    if strange := sorted(arguments.keys() - set(_TIMM_ARGUMENTS)):
        raise HuggingFaceError(f"{origin}: model_args.{strange[0]}: is not supported")
    if tree.get("global_pool", "avg") != "avg":
        raise HuggingFaceError(
            f"{origin}: global_pool: {tree['global_pool']!r:.60} is not supported; 'avg' is"
        )

    def known(name: str, axes: int = 2) -> Shape:
        shape = shape_of(name)
        if shape is None or len(shape) != axes:
            found = "no such tensor" if shape is None else f"the shape is {list(shape)}"
            raise HuggingFaceError(
                f"{origin}: {name}: {found}; a Mixer of timm has one of {axes} axes"
            )
        return shape

    width, channels, patch, _ = known("stem.proj.weight", 4)
    tokens, patches = known("blocks.0.mlp_tokens.fc1.weight")
    layers = 1
    while shape_of(f"blocks.{layers}.norm1.weight") is not None:
        layers += 1
    head = shape_of("head.weight")
    return MixerConfig(
        image_size=math.isqrt(patches) * patch,
        patch_size=patch,
        channels=channels,
        num_classes=head[0] if head else 1,
        num_layers=layers,
        hidden_size=width,
        layer_norm_epsilon=TIMM_EPSILON,
        token_feed_forward=DenseFeedForwardConfig(hidden_size=tokens),
        channel_feed_forward=DenseFeedForwardConfig(
            hidden_size=known("blocks.0.mlp_channels.fc1.weight")[0]
        ),
    )


def mixer_tree(config: MixerConfig, names: list[str]) -> dict[str, Any]:
    """Writes config.json for timm.

    Args:
        config: With the number of classes.
        names: Of the classes.

    Raises:
        HuggingFaceError: timm has no such Mixer.
    """
    if config.activation != "gelu":
        raise HuggingFaceError(f"model.activation: {config.activation!r}: timm's Mixer has 'gelu'")
    if config.layer_norm_epsilon != TIMM_EPSILON:
        raise HuggingFaceError(
            f"model.layer_norm_epsilon: {config.layer_norm_epsilon:g}: timm's Mixer has "
            f"{TIMM_EPSILON:g}"
        )
    size, name = config.image_size, _timm_name(config)
    ratios = _timm_ratios(config)
    own = f"mixer_w{config.hidden_size}_l{config.num_layers}_p{config.patch_size}_{size}"
    return {
        "architecture": name or own,
        "num_classes": config.known_num_classes(),
        "num_features": config.hidden_size,
        "global_pool": "avg",
        "label_names": names,
        "model_args": {} if ratios == TIMM_RATIOS else {"mlp_ratio": list(ratios)},
        "pretrained_cfg": {
            "input_size": [config.channels, size, size],
            "fixed_input_size": True,
            "first_conv": "stem.proj",
            "classifier": "head",
        },
    }


def timm_call(config: MixerConfig) -> str | None:
    """How timm builds a Mixer that it has no name for; None: it has one.

    Args:
        config: With the number of classes.
    """
    if _timm_name(config) is not None:
        return None
    return (
        f"timm.models.mlp_mixer.MlpMixer(num_classes={config.known_num_classes()}, "
        f"img_size={config.image_size}, patch_size={config.patch_size}, "
        f"num_blocks={config.num_layers}, embed_dim={config.hidden_size}, "
        f"mlp_ratio={_timm_ratios(config)})"
    )


def _timm_name(config: MixerConfig) -> str | None:
    return TIMM_NAMES.get((config.patch_size, config.num_layers, config.hidden_size))


def _timm_ratios(config: MixerConfig) -> tuple[float, float]:
    """Inner widths of token and channel layers over the width; timm rounds their products down."""
    parts = config.feed_forwards()
    inner = (
        parts[TOKENS].inner_size(config.num_patches),
        parts[CHANNELS].inner_size(config.hidden_size),
    )
    ratios = []
    for size in inner:
        ratio = size / config.hidden_size
        while int(ratio * config.hidden_size) < size:
            ratio = math.nextafter(ratio, math.inf)
        ratios.append(ratio)
    return ratios[0], ratios[1]
