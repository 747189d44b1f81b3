"""GPT-2 as Hugging Face's `transformers` has it: names, shapes and config.json, both ways.

Their linear layers are `Conv1D`s, [in, out]: the transpose of ours. Their fused q, k, v has our
order. A buffer with the causal mask, which older files hold (`attn.bias`), is no parameter. Nothing
here reads tensors or imports `transformers`.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.gpt2 import GPT2Config

CONFIG_FILE = "config.json"
PREFIX = "transformer."
"""Before every name in a file that `GPT2LMHeadModel` saved; `GPT2Model` and the hub's first files
have none."""
SUPPORTED = "gpt2, bert, vit, clip and clip_vision_model of transformers, and timm's mixer_*"
"""What folders of other libraries may be of."""
HEAD = "lm_head.weight"
"""The output head, never with the prefix; of a tied one at most a copy of `wte.weight`."""
IGNORED = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
"""Buffers of older versions."""

_OUTSIDE = {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f"}
_INSIDE = {
    "attention_norm": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.projection": ("attn.c_proj", True),
    "feed_forward_norm": ("ln_2", False),
    "feed_forward.up": ("mlp.c_fc", True),
    "feed_forward.down": ("mlp.c_proj", True),
}

# What transformers takes where config.json says nothing. Keys of the second column are its aliases.
_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
}  # fmt: skip
_ALIASES = {
    "n_positions": "max_position_embeddings", "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
}  # fmt: skip
_OURS = {
    "vocab_size": "vocab_size", "n_positions": "sequence_length", "n_embd": "hidden_size",
    "n_layer": "num_layers", "n_head": "num_heads", "layer_norm_epsilon": "layer_norm_epsilon",
    "initializer_range": "initializer_range", "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
_ONLY = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}
"""Options of transformers, and the one value of each that this GPT-2 supports."""
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_THEIRS = {
    **{ours: theirs for theirs, ours in _OURS.items()},
    **{"dropout": _DROPOUTS[0], "feed_forward": "n_inner"},
}
"""Keys of transformers for errors about config.json, by Polyad's key."""


class HuggingFaceError(ValueError):
    """A Hugging Face folder, or a model, that cannot be brought over: one line that says why."""

    exit_status = 2


class TheirTensor(NamedTuple):
    """A parameter's form in transformers."""

    name: str
    """Without `PREFIX`."""
    transposed: bool


def their_tensor(name: str) -> TheirTensor:
    """Translates the name of a parameter.

    Args:
        name: Polyad's name, as in `named_parameters`.

    Returns:
        The name in transformers, and whether its files store the transpose.

    Raises:
        HuggingFaceError: transformers' GPT-2 has no such parameter.
    """
    if name == "head.weight":
        return TheirTensor(HEAD, False)
    owner, _, kind = name.rpartition(".")
    if owner in _OUTSIDE:
        return TheirTensor(f"{_OUTSIDE[owner]}.{kind}", False)
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", owner)
    if block is None or block[2] not in _INSIDE:
        raise HuggingFaceError(f"{name}: Hugging Face's GPT-2 has no such parameter")
    module, conv = _INSIDE[block[2]]
    return TheirTensor(f"h.{block[1]}.{module}.{kind}", conv and kind == "weight")


def parameter_shapes(config: GPT2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Lists the parameters of transformers' model: all of Polyad's, biases included.

    Args:
        config: With the vocabulary size filled in.

    Yields:
        Polyad's names and shapes, in the order of `named_parameters`.
    """
    model = build_model(config.model_copy(update={"bias": True}))
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def config_from_huggingface(tree: dict[str, Any], origin: str) -> GPT2Config:
    """Reads a configuration of transformers.

    Args:
        tree: The content of config.json.
        origin: What to call it in errors.

    Returns:
        Polyad's configuration. It has no dropout if the three dropouts of transformers differ:
        dropout matters in training alone.

    Raises:
        HuggingFaceError: It is of another architecture, or asks for what is not built here.
    """
    kind = tree.get("model_type")
    if kind != "gpt2":
        said = f"model_type: {kind!r}"
        if kind is None and "architecture" in tree:
            said = f"architecture: {tree['architecture']!r:.60}"
        raise HuggingFaceError(f"{origin}: {said} is not supported; {SUPPORTED} are")
    for key, only in _ONLY.items():
        if tree.get(key, only) != only:
            raise HuggingFaceError(f"{origin}: {key}: {tree[key]!r} is not supported; {only!r} is")
    for key in ("quantization_config", "pruned_heads"):
        if tree.get(key):
            raise HuggingFaceError(f"{origin}: {key}: is not supported; it has to be absent")
    values: dict[str, Any] = {
        _OURS[key]: tree.get(key, tree.get(_ALIASES.get(key, key), default))
        for key, default in _DEFAULTS.items()
    }
    if (
        values["vocab_size"] is None
    ):  # None is allowed in Polyad's configuration, not in one of weights
        raise HuggingFaceError(f"{origin}: vocab_size: None: a number of at least 1 is needed")
    dropouts = [tree.get(key, 0.1) for key in _DROPOUTS]
    values["dropout"] = dropouts[0] if dropouts.count(dropouts[0]) == len(dropouts) else 0.0
    values["feed_forward"] = {"kind": "dense", "hidden_size": tree.get("n_inner")}
    try:
        return GPT2Config.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        ours = str(first["loc"][0]) if first["loc"] else ""
        theirs = _THEIRS.get(ours, ours)
        message = _in_their_names(first["msg"].removeprefix("Value error, "))
        where = f"{theirs}: {first['input']!r}: " if theirs else ""
        raise HuggingFaceError(f"{origin}: {where}{message}") from None


def _in_their_names(message: str) -> str:
    """Replaces Polyad's keys in an error by those of transformers."""
    for ours, theirs in _THEIRS.items():
        message = re.sub(rf"\b(model\.)?{ours}\b", theirs, message)
    return message


def config_to_huggingface(config: GPT2Config, end_of_text_id: int | None) -> dict[str, Any]:
    """Writes a configuration for transformers.

    Args:
        config: With the vocabulary size filled in.
        end_of_text_id: The token that ends a document, if the tokenizer is known.

    Returns:
        The content of config.json; every key that decides what is computed is written out.

    Raises:
        HuggingFaceError: transformers' GPT-2 cannot be such a model.
    """
    if config.head is not None:
        raise HuggingFaceError(
            f"model.head.kind: {config.head.kind!r}: only a language model is written in Hugging "
            f"Face's form; `--to safetensors` writes the weights under our names"
        )
    if not isinstance(config.feed_forward, DenseFeedForwardConfig):
        raise HuggingFaceError(
            f"model.feed_forward.kind: {config.feed_forward.kind!r}: Hugging Face's transformers "
            f"has no such architecture, its GPT-2 is 'dense' alone; `--to safetensors` writes the "
            f"weights under our names"
        )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for theirs, ours in _OURS.items()},
        "vocab_size": config.known_vocab_size(),
        "n_inner": config.feed_forward.hidden_size,
        **dict.fromkeys(_DROPOUTS, config.dropout),
        **_ONLY,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
        "dtype": "float32",
        "use_cache": True,
    }
