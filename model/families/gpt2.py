"""GPT-2 of Hugging Face's `transformers`.

transformers' linear layers here are `Conv1D`s, [in, out]: the transpose of ours. The order of the
fused q, k, v is the same.
"""

import re

from polyad.model.decoder_config import GPT2Config
from polyad.model.families.family import FP32_TEXT, FREE, Family
from polyad.model.families.keys import dropouts, field, inner_size, only
from polyad.model.families.tensors import parameter, transposed

_HEAD = "lm_head.weight"


def _free(config: GPT2Config) -> frozenset[str]:
    # A model that scores sequences has no head to tie.
    return FREE if config.head is None else FREE | {"tied_embeddings"}


GPT2 = Family(
    title="Hugging Face's GPT-2",
    config=GPT2Config,
    model_types=("gpt2",),
    prefix="transformer.",  # the hub's first files have none, like those of `GPT2Model`
    without_prefix=re.compile(re.escape(_HEAD)),
    outside={
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "final_norm": "ln_f",
        "head.weight": parameter(_HEAD),
    },
    block="h.{}.",
    inside={
        "attention_norm": "ln_1",
        "attention.qkv": transposed("attn.c_attn"),
        "attention.projection": transposed("attn.c_proj"),
        "feed_forward_norm": "ln_2",
        "feed_forward.up": transposed("mlp.c_fc"),
        "feed_forward.down": transposed("mlp.c_proj"),
    },
    # A tied head is a copy. Older files contain the causal mask as a buffer.
    ignored=re.compile(rf"{re.escape(_HEAD)}|h\.\d+\.attn\.(masked_)?bias"),
    copies=lambda config: {_HEAD: "wte.weight"} if config.tied_embeddings else {},
    always_has_bias=True,
    keys=(
        field("vocab_size", "vocab_size"),
        field("n_positions", "sequence_length"),
        field("n_embd", "hidden_size"),
        field("n_layer", "num_layers"),
        field("n_head", "num_heads"),
        field("layer_norm_epsilon", "layer_norm_epsilon"),
        field("initializer_range", "initializer_range"),
        field("tie_word_embeddings", "tied_embeddings"),
        inner_size("n_inner", may_be_null=True),
        dropouts("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        only("activation_function", "gelu_new"),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("reorder_and_upcast_attn", False),
        only("add_cross_attention", False),
        only("is_encoder_decoder", False),
    ),
    free=_free,
    architecture=lambda config: "GPT2LMHeadModel",
    written=lambda config, known: {
        "bos_token_id": known.end_of_text_id,
        "eos_token_id": known.end_of_text_id,
        **FP32_TEXT,
    },
)
