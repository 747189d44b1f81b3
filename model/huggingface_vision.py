"""Models of images as other libraries have them: names, shapes and config.json, both ways.

    vit                 transformers' ViTModel and ViTForImageClassification, DINO's among them
    clip_vision_model   transformers' CLIPVisionModel, alone or as part of a CLIP
    mixer               timm's MLP-Mixer

Their queries, keys and values are three layers, ours is one: its rows are theirs, one after the
other. Nothing here reads tensors or imports their libraries.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.huggingface import HuggingFaceError
from polyad.model.huggingface_timm import mixer_config, mixer_tree
from polyad.model.mixer import MixerConfig
from polyad.model.settings import ModelSettings
from polyad.model.vision import ImageModelSettings
from polyad.model.vit import ViTConfig

Shape = tuple[int, ...]
ACTIVATIONS = {
    "gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""Ours, by transformers' name."""
_KEYS = {
    "hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "image_size": "image_size", "patch_size": "patch_size",
    "num_channels": "channels", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip
"""Keys of transformers' ViT and CLIP, and ours."""
IGNORED = re.compile(
    r"pooler\.dense\..*|text_model\..*|logit_scale|(visual|text)_projection\..*|.*position_ids"
)
"""Tensors that a classifier does not have."""


class Parts(NamedTuple):
    """Where a weight of ours is in a file."""

    names: tuple[str, ...]
    """Tensors whose rows stand one after the other; none: it is zeros."""
    shape: Shape
    """Of each of them."""


class Library(NamedTuple):
    """The names of one library."""

    title: str
    prefix: str
    """Before the names in the files of some of its classes."""
    outside: Mapping[str, str]
    inside: Mapping[str, tuple[str, ...]]
    """Of a block, with its number for {}: several names are queries, keys and values."""


_VIT = Library(
    "transformers' ViT",
    "vit.",
    {
        "patch_embedding": "embeddings.patch_embeddings.projection",
        "class_token": "embeddings.cls_token",
        "position_embedding": "embeddings.position_embeddings",
        "final_norm": "layernorm",
        "head": "classifier",
    },
    {
        "attention_norm": ("encoder.layer.{}.layernorm_before",),
        "attention.qkv": tuple(
            f"encoder.layer.{{}}.attention.attention.{name}" for name in ("query", "key", "value")
        ),
        "attention.projection": ("encoder.layer.{}.attention.output.dense",),
        "feed_forward_norm": ("encoder.layer.{}.layernorm_after",),
        "feed_forward.up": ("encoder.layer.{}.intermediate.dense",),
        "feed_forward.down": ("encoder.layer.{}.output.dense",),
    },
)
_CLIP = Library(
    "transformers' CLIP",
    "vision_model.",
    {
        "patch_embedding": "embeddings.patch_embedding",
        "class_token": "embeddings.class_embedding",
        "position_embedding": "embeddings.position_embedding.weight",
        "pre_norm": "pre_layrnorm",
        "final_norm": "post_layernorm",
    },
    {
        "attention_norm": ("encoder.layers.{}.layer_norm1",),
        "attention.qkv": tuple(f"encoder.layers.{{}}.self_attn.{n}_proj" for n in "qkv"),
        "attention.projection": ("encoder.layers.{}.self_attn.out_proj",),
        "feed_forward_norm": ("encoder.layers.{}.layer_norm2",),
        "feed_forward.up": ("encoder.layers.{}.mlp.fc1",),
        "feed_forward.down": ("encoder.layers.{}.mlp.fc2",),
    },
)
_MIXER = Library(
    "timm's Mixer",
    "",
    {"patch_embedding": "stem.proj", "final_norm": "norm", "head": "head"},
    {
        "token_norm": ("blocks.{}.norm1",),
        "token_feed_forward.up": ("blocks.{}.mlp_tokens.fc1",),
        "token_feed_forward.down": ("blocks.{}.mlp_tokens.fc2",),
        "channel_norm": ("blocks.{}.norm2",),
        "channel_feed_forward.up": ("blocks.{}.mlp_channels.fc1",),
        "channel_feed_forward.down": ("blocks.{}.mlp_channels.fc2",),
    },
)
_WITHOUT_OWNER = ("class_token", "position_embedding")
"""Parameters of the model itself."""


def library_of(tree: Mapping[str, Any]) -> Library | None:
    """Whose model a config.json is of; None if it is none of images."""
    kind = tree.get("model_type")
    if kind == "vit":
        return _VIT
    if kind in ("clip", "clip_vision_model"):
        return _CLIP
    return _MIXER if str(tree.get("architecture", "")).startswith("mixer_") else None


def labels_of(tree: Mapping[str, Any]) -> object:
    """The names of the classes in a config.json; None: there are none."""
    if tree.get("id2label") is not None:
        return tree["id2label"]
    about = tree.get("pretrained_cfg")
    inside = about.get("label_names") if isinstance(about, dict) else None
    return tree.get("label_names", inside)


def parts_of(name: str, shape: Shape, library: Library, stored: Collection[str]) -> Parts:
    """Where a weight of ours is.

    Args:
        name: Ours.
        shape: Ours.
        library: Whose files they are.
        stored: Names in the files.

    Raises:
        HuggingFaceError: The library has no such weight.
    """
    if name in _WITHOUT_OWNER:
        theirs = library.outside.get(name)
        if theirs is None:
            raise HuggingFaceError(f"{name}: {library.title} has no such parameter")
        extra = {"class_token": (1, *shape), "position_embedding": (1, *shape)}[name]
        if library is _CLIP:
            extra = (shape[-1],) if name == "class_token" else shape
        return Parts((theirs,), extra)
    owner, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", owner)
    if block is not None and block[2] in library.inside:
        names = tuple(f"{each.format(block[1])}.{kind}" for each in library.inside[block[2]])
        return Parts(names, (shape[0] // len(names), *shape[1:]))
    if owner not in library.outside:
        raise HuggingFaceError(f"{name}: {library.title} has no such parameter")
    theirs = f"{library.outside[owner]}.{kind}"
    if library is _CLIP and theirs not in stored and kind == "bias":
        return Parts((), shape)  # its patches have no bias
    return Parts((theirs,), shape)


def parameter_shapes(config: ImageModelSettings) -> dict[str, Shape]:
    """Names and shapes of our parameters."""
    model = build_model(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def config_from_files(
    tree: dict[str, Any], shape_of: Callable[[str], Shape | None], origin: str
) -> ImageModelSettings:
    """Reads the configuration of a folder.

    Args:
        tree: The content of config.json.
        shape_of: The shape of a tensor of the folder; None if it is not there.
        origin: What to call config.json in errors.

    Returns:
        Ours; `num_classes` is that of the folder's head, and 1 if it has none.

    Raises:
        HuggingFaceError: It asks for what is not built here.
    """
    library = library_of(tree)
    assert library is not None
    try:
        if library is _MIXER:
            return mixer_config(tree, shape_of, origin)
        return _vit_config(tree, shape_of, origin, library)
    except ValidationError as error:
        raise HuggingFaceError(f"{origin}: {in_their_names(error, _KEYS)}") from None


def in_their_names(error: ValidationError, names: Mapping[str, str]) -> str:
    """The first fault of a configuration that was read from other keys.

    Args:
        error: Of ours.
        names: Of their keys ours.
    """
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    ours = ".".join(map(str, first["loc"]))
    theirs = {each: name for name, each in names.items()}
    theirs["feed_forward.dense.hidden_size"] = "intermediate_size"
    return f"{theirs.get(ours, ours)}: {first['input']!r:.60}: {reason}" if ours else reason


def activation_of(tree: Mapping[str, Any], usual: str, origin: str) -> str:
    """Our name of the activation of a config.json.

    Args:
        tree: Its content.
        usual: What transformers takes where it says nothing.
        origin: What to call it in errors.

    Raises:
        HuggingFaceError: There is no such activation here.
    """
    name = tree.get("hidden_act", usual)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise HuggingFaceError(f"{origin}: hidden_act: {name!r} is not supported; {known}")
    return ACTIVATIONS[name]


def _vit_config(
    tree: dict[str, Any], shape_of: Callable[[str], Shape | None], origin: str, library: Library
) -> ViTConfig:
    clip = library is _CLIP
    values = tree.get("vision_config", tree) if clip else tree
    if not isinstance(values, dict):
        raise HuggingFaceError(f"{origin}: vision_config: {values!r} is not an object of keys")
    usual = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 224, "patch_size": 32 if clip else 16, "num_channels": 3,
             "layer_norm_eps": 1e-5 if clip else 1e-12}  # fmt: skip
    if values.get("qkv_bias", True) is not True:
        raise HuggingFaceError(f"{origin}: qkv_bias: False is not supported; True is")
    head = None if clip else shape_of("classifier.weight")
    return ViTConfig.model_validate(
        {ours: values.get(theirs, usual[theirs]) for theirs, ours in _KEYS.items()}
        | {
            "num_classes": head[0] if head else 1,
            "pre_norm": clip,
            "activation": activation_of(values, "quick_gelu" if clip else "gelu", origin),
            "feed_forward": {
                "kind": "dense",
                "hidden_size": values.get("intermediate_size", 3072),
            },
        }
    )


def config_to_files(
    config: ModelSettings, class_names: list[str] | None
) -> tuple[dict[str, Any], Library]:
    """Writes a configuration for the library that has such a model.

    Args:
        config: With the number of classes.
        class_names: If they are known.

    Returns:
        The content of config.json, and whose it is.

    Raises:
        HuggingFaceError: None has such a model.
    """
    if not isinstance(config, ImageModelSettings):
        raise HuggingFaceError(
            f"model.kind: {config.kind!r}: other libraries have no such model; `--to safetensors` "
            f"writes the weights under our names"
        )
    for key, each in config.feed_forwards().items():
        if each.kind != "dense":
            raise HuggingFaceError(
                f"{key}.kind: {each.kind!r}: other libraries have no such architecture, but dense "
                f"ones; `--to safetensors` writes the weights under our names"
            )
    if config.head.kind != "linear":
        raise HuggingFaceError(
            f"model.head.kind: {config.head.kind!r}: other libraries have 'linear' heads alone"
        )
    if not config.bias:
        raise HuggingFaceError("model.bias: False: other libraries' models of images have biases")
    names = class_names or [f"LABEL_{number}" for number in range(config.known_num_classes())]
    if isinstance(config, MixerConfig):
        return mixer_tree(config, names), _MIXER
    assert isinstance(config, ViTConfig)
    for key, only in (("pre_norm", False), ("pre_logits", None), ("pool", "class_token")):
        if getattr(config, key) != only:
            raise HuggingFaceError(
                f"model.{key}: {getattr(config, key)!r}: transformers' ViT has no such model; "
                f"{only!r} is"
            )
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.block_feed_forwards()[0].inner_size(config.hidden_size),
        "hidden_act": theirs[config.activation],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "layer_norm_eps": config.layer_norm_epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "qkv_bias": True,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "dtype": "float32",
    }, _VIT
