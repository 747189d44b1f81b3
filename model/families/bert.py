"""BERT of Hugging Face's `transformers`.

`transformers` has three layers for queries, keys and values, Polyad one: its rows are those of the
three layers in this order.

    BertForMaskedLM                  model.head.kind: language
    BertForSequenceClassification    model.head.kind: classification
    BertModel                        model.head.kind: none
"""

import re
from typing import Any

from polyad.model.bert import BertConfig
from polyad.model.families.family import FP32_TEXT, Family, Known, ShapeOf, label_keys
from polyad.model.families.keys import Tree, activation, dropouts, field, inner_size, only, same
from polyad.model.families.tensors import rows
from polyad.model.heads import ClassificationHeadConfig

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


def _written(config: BertConfig, known: Known) -> dict[str, Any]:
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
        *same("vocab_size", "hidden_size", "initializer_range"),
        field("num_hidden_layers", "num_layers"),
        field("num_attention_heads", "num_heads"),
        field("max_position_embeddings", "sequence_length"),
        field("type_vocab_size", "num_segments"),
        field("layer_norm_eps", "layer_norm_epsilon"),
        inner_size("intermediate_size"),
        activation("hidden_act"),
        dropouts("hidden_dropout_prob", "attention_probs_dropout_prob"),
        only(is_decoder=False, add_cross_attention=False),
        only(tie_word_embeddings=True, position_embedding_type="absolute"),
    ),
    further=lambda tree, shape_of: {"head": _head_of(tree, shape_of)},
    architecture=lambda config: _CLASSES[config.head.kind],
    written=_written,
)
