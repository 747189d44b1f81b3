"""Encoders of Hugging Face's `transformers`: BERT, and the image models ViT and CLIP.

    BertForMaskedLM                  model.head.kind: language
    BertForSequenceClassification    model.head.kind: classification
    BertModel                        model.head.kind: none
    vit                              ViTModel and ViTForImageClassification, including DINO's
    clip_vision_model                CLIPVisionModel, alone or as part of a CLIP: read-only

`transformers` has three layers for queries, keys and values, Polyad one: its rows are those of the
three layers in this order.
"""

import re
from typing import Any

from polyad.model.bert import BertConfig
from polyad.model.families.family import FP32_TEXT, FREE, Family, Known, ShapeOf, label_keys
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
from polyad.model.heads import ClassificationHeadConfig
from polyad.model.vit import ViTConfig

_KEYS = (
    *same("hidden_size"),
    field("num_hidden_layers", "num_layers"),
    field("num_attention_heads", "num_heads"),
    field("layer_norm_eps", "layer_norm_epsilon"),
    inner_size("intermediate_size"),
    activation("hidden_act"),
)
"""The keys of all encoders."""
_EMBEDDING, _BIAS = "embeddings.word_embeddings.weight", "cls.predictions.bias"
_CLASSES = {
    "language": "BertForMaskedLM", "classification": "BertForSequenceClassification",
    "none": "BertModel",
}  # fmt: skip


def _copies(config: BertConfig) -> dict[str, str]:
    copies = {"cls.predictions.decoder.weight": _EMBEDDING}
    if config.head.kind == "language":
        copies["cls.predictions.decoder.bias"] = _BIAS
    return copies


def _head_of(tree: Tree, shape_of: ShapeOf) -> dict[str, Any]:
    """Determines a folder's head from its tensors, since older files do not name the class."""
    if shape_of(_BIAS) is not None:
        return {"kind": "language"}
    classifier = shape_of("classifier.weight")
    pooler = shape_of("pooler.dense.weight") is not None
    if classifier and pooler:
        return {
            "kind": "classification", "num_classes": classifier[0],
            "dropout": tree.get("classifier_dropout"),
        }  # fmt: skip
    return {"kind": "none", "pooler": pooler}


def _written_bert(config: BertConfig, known: Known) -> dict[str, Any]:
    head, about = config.head, {}
    if isinstance(head, ClassificationHeadConfig):
        labels = label_keys(known.class_names, config.number("head.num_classes"))
        about = {"classifier_dropout": head.dropout, **labels}
    return {"pad_token_id": known.pad_id, **about, **FP32_TEXT}


BERT = Family(
    title="Hugging Face's BERT",
    config=BertConfig,
    model_types=("bert",),
    prefix="bert.",
    without_prefix=re.compile(r"(cls|classifier)\..*"),
    has_prefix=lambda config: config.head.kind != "none",
    older={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    outside={
        "token_embedding": "embeddings.word_embeddings",
        "position_embedding": "embeddings.position_embeddings",
        "segment_embedding": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        "head.transform": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.decoder": "cls.predictions",
        "head.pooler.dense": "pooler.dense",
        "head.classifier": "classifier",
    },
    block="encoder.layer.{}.",
    inside={
        "attention.qkv": rows(*(f"attention.self.{name}" for name in ("query", "key", "value"))),
        "attention.projection": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.up": "intermediate.dense",
        "feed_forward.down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    },
    # Buffers of older versions; tensors that only some heads use, such as the pooler and the head
    # for next-sentence prediction; copies.
    ignored=re.compile(
        r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*|"
        r"cls\.predictions\.decoder\..*"
    ),
    mentioned=("pooler", "cls.seq_relationship"),
    copies=_copies,
    keys=(
        *_KEYS,
        *same("vocab_size", "initializer_range"),
        field("max_position_embeddings", "sequence_length"),
        field("type_vocab_size", "num_segments"),
        dropouts("hidden_dropout_prob", "attention_probs_dropout_prob"),
        only(is_decoder=False, add_cross_attention=False),
        only(tie_word_embeddings=True, position_embedding_type="absolute"),
    ),
    further=lambda tree, shape_of: {"head": _head_of(tree, shape_of)},
    architecture=lambda config: _CLASSES[config.head.kind],
    written=_written_bert,
)

FREE_OF_IMAGES = FREE | {"num_classes", "head_bias", "drop_path"}
"""Our keys that may differ from a folder's: the data determines the classes."""


_IMAGE_KEYS = (
    *_KEYS,
    *same("image_size", "patch_size"),
    field("num_channels", "channels"),
    dropouts("hidden_dropout_prob", "attention_probs_dropout_prob", is_read=False),
    only(qkv_bias=True),
)
"""The keys that ViT and CLIP share."""


def _written_vit(config: ViTConfig, known: Known) -> dict[str, Any]:
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
    keys=_IMAGE_KEYS,
    further=lambda tree, shape_of: {"num_classes": (shape_of("classifier.weight") or (1,))[0]},
    free=lambda config: FREE_OF_IMAGES,
    architecture=lambda config: "ViTForImageClassification",
    written=_written_vit,
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
    keys=_IMAGE_KEYS,
    section=_tower,
    further=lambda tree, shape_of: {"num_classes": 1, "pre_norm": True},
    free=lambda config: FREE_OF_IMAGES,
)
