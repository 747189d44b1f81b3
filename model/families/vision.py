"""Image models of Hugging Face's `transformers`: ViT and CLIP.

    vit                  ViTModel and ViTForImageClassification, including DINO's
    clip_vision_model    CLIPVisionModel, alone or as part of a CLIP: read-only

`transformers` has three layers for queries, keys and values, Polyad one: its rows are those of the
three layers in this order.
"""

import re
from typing import Any

from polyad.model.families.family import FREE, Family, Known, label_keys
from polyad.model.families.keys import (
    Tree,
    WeightsError,
    activation,
    dropouts,
    field,
    inner_size,
    only,
    same,
)
from polyad.model.families.tensors import parameter, rows
from polyad.model.vit import ViTConfig

FREE_OF_IMAGES = FREE | {"num_classes", "head_bias", "drop_path"}
"""Our keys that may differ from a folder's: the data determines the classes."""


_KEYS = (
    *same("hidden_size", "image_size", "patch_size"),
    field("num_hidden_layers", "num_layers"),
    field("num_attention_heads", "num_heads"),
    inner_size("intermediate_size"),
    activation("hidden_act"),
    field("num_channels", "channels"),
    field("layer_norm_eps", "layer_norm_epsilon"),
    dropouts("hidden_dropout_prob", "attention_probs_dropout_prob", is_read=False),
    only(qkv_bias=True),
)
"""The keys that ViT and CLIP share."""


def _written(config: ViTConfig, known: Known) -> dict[str, Any]:
    labels = label_keys(known.class_names, config.number("num_classes"))
    return {**labels, "dtype": "float32"}


VIT = Family(
    title="transformers' ViT",
    config=ViTConfig,
    model_types=("vit",),
    prefix="vit.",
    without_prefix=re.compile(r"classifier\..*"),
    outside={
        "patch_embedding": "embeddings.patch_embeddings.projection",
        "class_token": parameter("embeddings.cls_token", 1),
        "position_embedding": parameter("embeddings.position_embeddings", 1),
        "final_norm": "layernorm",
        "head": "classifier",
    },
    block="encoder.layer.{}.",
    inside={
        "attention_norm": "layernorm_before",
        "attention.qkv": rows(
            *(f"attention.attention.{name}" for name in ("query", "key", "value"))
        ),
        "attention.projection": "attention.output.dense",
        "feed_forward_norm": "layernorm_after",
        "feed_forward.up": "intermediate.dense",
        "feed_forward.down": "output.dense",
    },
    ignored=re.compile(r"pooler\.dense\..*|.*position_ids"),
    may_lack_head=True,
    keys=_KEYS,
    further=lambda tree, shape_of: {"num_classes": (shape_of("classifier.weight") or (1,))[0]},
    free=lambda config: FREE_OF_IMAGES,
    architecture=lambda config: "ViTForImageClassification",
    written=_written,
)


def _tower(tree: Tree) -> Tree:
    tower: Tree = tree.get("vision_config", tree)
    if not isinstance(tower, dict):
        raise WeightsError(f"vision_config: {tower!r} is not an object of keys")
    return tower


CLIP = Family(
    title="transformers' CLIP",
    config=ViTConfig,
    model_types=("clip", "clip_vision_model"),
    prefix="vision_model.",
    outside={
        "patch_embedding.bias": parameter("embeddings.patch_embedding.bias", optional=True),
        "patch_embedding": "embeddings.patch_embedding",
        "class_token": parameter("embeddings.class_embedding", -1),
        "position_embedding": parameter("embeddings.position_embedding.weight"),
        "pre_norm": "pre_layrnorm",
        "final_norm": "post_layernorm",
    },
    block="encoder.layers.{}.",
    inside={
        "attention_norm": "layer_norm1",
        "attention.qkv": rows(*(f"self_attn.{name}_proj" for name in "qkv")),
        "attention.projection": "self_attn.out_proj",
        "feed_forward_norm": "layer_norm2",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    },
    # The text tower, the projections for comparing both, and buffers of older versions.
    ignored=re.compile(r"text_model\..*|logit_scale|(visual|text)_projection\..*|.*position_ids"),
    may_lack_head=True,
    keys=_KEYS,
    section=_tower,
    further=lambda tree, shape_of: {"num_classes": 1, "pre_norm": True},
    free=lambda config: FREE_OF_IMAGES,
)
