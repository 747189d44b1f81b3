"""BERT as Hugging Face's `transformers` has it: names, shapes and config.json, both ways.

Their queries, keys and values are three layers, ours is one: its rows are theirs, one after the
other. Nothing here reads tensors or imports `transformers`.

    BertForMaskedLM                  model.head.kind: language
    BertForSequenceClassification    model.head.kind: classification
    BertModel                        model.head.kind: none
"""

import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from polyad.model.bert import BertConfig
from polyad.model.huggingface import HuggingFaceError
from polyad.model.huggingface_vision import ACTIVATIONS, Parts, Shape, activation_of, in_their_names

PREFIX = "bert."
"""Before the names of the encoder and of the pooler, but in files that `BertModel` saved."""
IGNORED = re.compile(
    r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*|"
    r"cls\.predictions\.decoder\..*"
)
"""Tensors that not every model here has: buffers of older versions, the pooler, the head for the
next sentence, and copies of `cls.predictions.bias` and of the token embedding."""
DECODER = "cls.predictions.decoder.weight"
EMBEDDING = "embeddings.word_embeddings.weight"
_OF_HEAD = re.compile(r"(cls|classifier)\..*")

_OUTSIDE = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.decoder": "cls.predictions",
    "head.pooler.dense": "pooler.dense",
    "head.classifier": "classifier",
}
_INSIDE = {
    "attention.qkv": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.projection": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}
_KEYS = {
    "vocab_size": ("vocab_size", 30522), "hidden_size": ("hidden_size", 768),
    "num_hidden_layers": ("num_layers", 12), "num_attention_heads": ("num_heads", 12),
    "max_position_embeddings": ("sequence_length", 512), "type_vocab_size": ("num_segments", 2),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-12),
    "initializer_range": ("initializer_range", 0.02),
}  # fmt: skip
"""Of transformers: ours, and what it takes where config.json says nothing."""
_ONLY = {
    "is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}  # fmt: skip
"""Options of transformers, and the one value of each that this BERT supports."""
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_CLASSES = {
    "language": "BertForMaskedLM", "classification": "BertForSequenceClassification",
    "none": "BertModel",
}  # fmt: skip


def is_bert(tree: dict[str, Any]) -> bool:
    """Whether a config.json is of a BERT."""
    return tree.get("model_type") == "bert"


def plain_name(stored: str) -> str:
    """The name of a tensor of a file, without prefix and as newer versions write it."""
    name = stored.removeprefix(PREFIX)
    return re.sub(r"LayerNorm\.(gamma|beta)$", _newer, name)


def _newer(found: re.Match[str]) -> str:
    return f"LayerNorm.{'weight' if found[1] == 'gamma' else 'bias'}"


def stored_name(plain: str, head: str) -> str:
    """The name that transformers writes.

    Args:
        plain: As `parts_of` has it.
        head: The kind of the model's head.
    """
    return plain if head == "none" or _OF_HEAD.fullmatch(plain) else PREFIX + plain


def parts_of(name: str, shape: Shape) -> Parts:
    """Where a weight of ours is.

    Args:
        name: Ours.
        shape: Ours.

    Raises:
        HuggingFaceError: transformers' BERT has no such weight.
    """
    owner, _, kind = name.rpartition(".")
    if owner in _OUTSIDE:
        return Parts((f"{_OUTSIDE[owner]}.{kind}",), shape)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", owner)
    if block is None or block[2] not in _INSIDE:
        raise HuggingFaceError(f"{name}: Hugging Face's BERT has no such parameter")
    names = tuple(f"encoder.layer.{block[1]}.{each}.{kind}" for each in _INSIDE[block[2]])
    return Parts(names, (shape[0] // len(names), *shape[1:]))


def config_from_huggingface(
    tree: dict[str, Any], shape_of: Callable[[str], Shape | None], origin: str
) -> BertConfig:
    """Reads the configuration of a folder.

    Args:
        tree: The content of config.json.
        shape_of: The shape of a tensor of the folder by its plain name; None if it is not there.
        origin: What to call config.json in errors.

    Returns:
        Ours, with the head that the folder has. Without dropout if the two dropouts of transformers
        differ: dropout matters in training alone.

    Raises:
        HuggingFaceError: It asks for what is not built here.
    """
    for key, only in _ONLY.items():
        if tree.get(key, only) != only:
            raise HuggingFaceError(f"{origin}: {key}: {tree[key]!r} is not supported; {only!r} is")
    for key in ("quantization_config", "pruned_heads"):
        if tree.get(key):
            raise HuggingFaceError(f"{origin}: {key}: is not supported; it has to be absent")
    dropouts = [tree.get(key, 0.1) for key in _DROPOUTS]
    values = {ours: tree.get(theirs, usual) for theirs, (ours, usual) in _KEYS.items()}
    if values["vocab_size"] is None:  # null means that of the data, which weights do not have
        raise HuggingFaceError(f"{origin}: vocab_size: None: a number of at least 1 is needed")
    values |= {
        "activation": activation_of(tree, "gelu", origin),
        "dropout": dropouts[0] if dropouts[0] == dropouts[1] else 0.0,
        "feed_forward": {"kind": "dense", "hidden_size": tree.get("intermediate_size", 3072)},
        "head": _head_of(tree, shape_of),
    }
    try:
        return BertConfig.model_validate(values)
    except ValidationError as error:
        named = {theirs: ours for theirs, (ours, _) in _KEYS.items()}
        raise HuggingFaceError(f"{origin}: {in_their_names(error, named)}") from None


def _head_of(tree: dict[str, Any], shape_of: Callable[[str], Shape | None]) -> dict[str, Any]:
    """The head that a folder has: by its tensors, since older files name no class."""
    if shape_of("cls.predictions.bias") is not None:
        return {"kind": "language"}
    classifier = shape_of("classifier.weight")
    pooler = shape_of("pooler.dense.weight") is not None
    if classifier and pooler:
        return {
            "kind": "classification", "num_classes": classifier[0],
            "dropout": tree.get("classifier_dropout"),
        }  # fmt: skip
    return {"kind": "none", "pooler": pooler}


def config_to_huggingface(
    config: BertConfig, pad_id: int | None, class_names: list[str] | None
) -> dict[str, Any]:
    """Writes a configuration for transformers.

    Args:
        config: With the vocabulary size, and the number of classes if there are any.
        pad_id: The token that fills sequences up, if the tokenizer is known.
        class_names: If they are known.

    Returns:
        The content of config.json; every key that decides what is computed is written out.

    Raises:
        HuggingFaceError: transformers' BERT cannot be such a model.
    """
    feed_forward = config.feed_forward
    if feed_forward.kind != "dense":
        raise HuggingFaceError(
            f"model.feed_forward.kind: {feed_forward.kind!r}: Hugging Face's transformers has no "
            f"such architecture, its BERT is 'dense' alone; `--to safetensors` writes the weights "
            f"under our names"
        )
    head, about = config.head, {}
    if head.kind == "classification":
        names = class_names or [f"LABEL_{number}" for number in range(head.num_classes or 0)]
        about = {
            "classifier_dropout": head.dropout,
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    return {
        "architectures": [_CLASSES[head.kind]],
        "model_type": "bert",
        **{key: getattr(config, ours) for key, (ours, _) in _KEYS.items()},
        "vocab_size": config.known_vocab_size(),
        "intermediate_size": feed_forward.inner_size(config.hidden_size),
        "hidden_act": theirs[config.activation],
        **dict.fromkeys(_DROPOUTS, config.dropout),
        **_ONLY,
        "pad_token_id": pad_id,
        **about,
        "dtype": "float32",
        "use_cache": True,
    }
