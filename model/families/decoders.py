"""Decoders of Hugging Face's `transformers`: GPT-2; Llama-style ones and their mixtures of experts.

Each `model_type` has one table, with its keys of config.json and their counterparts here, and its
tensor names. A value that is the same in all models of a family is a `constant`. A folder with a
key that no table mentions is refused, unless the key is null or false.

Experts are stored one by one, or all in one tensor (`FUSED`), as written by `save_pretrained(...,
save_original_format=False)`.

transformers' linear layers of GPT-2 are `Conv1D`s, [in, out]: the transpose of ours. The order of
the fused q, k, v is the same.
"""

import re
from collections.abc import Callable
from typing import Any

from polyad.model.config import Config
from polyad.model.decoder import DecoderConfig, GPT2Config
from polyad.model.families.family import FP32_TEXT, FREE, Family, Rules
from polyad.model.families.keys import (
    Key,
    Tree,
    WeightsError,
    constant,
    dropouts,
    field,
    implied,
    inner_size,
    only,
    same,
    supported,
)
from polyad.model.families.tensors import Rule, every_other, half, parameter, per_expert, transposed
from polyad.model.rotary import LinearScaling, Llama3Scaling, YarnScaling

HEAD = "lm_head.weight"


def _free(config: GPT2Config) -> frozenset[str]:
    # A model that scores sequences has no head to tie.
    return FREE if config.head is None else FREE | {"tied_embeddings"}


GPT2 = Family(
    title="Hugging Face's GPT-2",
    config=GPT2Config,
    model_types=("gpt2",),
    prefix="transformer.",  # the hub's first files have none, like those of `GPT2Model`
    without_prefix=re.compile(re.escape(HEAD)),
    outside={
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "final_norm": "ln_f",
        "head.weight": parameter(HEAD),
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
    ignored=re.compile(rf"{re.escape(HEAD)}|h\.\d+\.attn\.(masked_)?bias"),
    copies=lambda config: {HEAD: "wte.weight"} if config.tied_embeddings else {},
    always_has_bias=True,
    keys=(
        *same("vocab_size", "layer_norm_epsilon", "initializer_range"),
        field("n_positions", "sequence_length"),
        field("n_embd", "hidden_size"),
        field("n_layer", "num_layers"),
        field("n_head", "num_heads"),
        field("tie_word_embeddings", "tied_embeddings"),
        field("n_inner", "feed_forward.hidden_size"),
        dropouts("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        only(activation_function="gelu_new", scale_attn_weights=True),
        only(scale_attn_by_inverse_layer_idx=False, reorder_and_upcast_attn=False),
        only(add_cross_attention=False, is_encoder_decoder=False),
    ),
    free=_free,
    architecture=lambda config: "GPT2LMHeadModel",
    written=lambda config, known: {
        "bos_token_id": known.end_of_text_id,
        "eos_token_id": known.end_of_text_id,
        **FP32_TEXT,
    },
)

IGNORED_KEYS = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation",
    "auto_map", "bos_token_id", "dtype", "eos_token_id", "head_dim", "id2label",
    "initializer_range", "label2id", "layer_types", "max_sequence_length", "max_window_layers",
    "model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type",
    "quantization_config", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "tokenizer_class", "torch_dtype",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip
"""Keys that do not affect the computation, or that a family reads where they do."""

LLAMA: Rules = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.projection": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
ROUTED: Rules = {
    "feed_forward.router.score": "mlp.gate",
    "feed_forward.router.selection.balancing_bias": parameter("mlp.gate.e_score_correction_bias"),
    "feed_forward.experts.gate": per_expert("mlp.experts.{expert}.gate_proj.weight"),
    "feed_forward.experts.up": per_expert("mlp.experts.{expert}.up_proj.weight"),
    "feed_forward.experts.down": per_expert("mlp.experts.{expert}.down_proj.weight"),
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
}
"""Names of experts in OLMoE, Qwen and DeepSeek."""


def _experts(gate_up: str, down: str) -> Rules:
    return {
        "feed_forward.experts.gate": half(gate_up, 0, is_transposed=True),
        "feed_forward.experts.up": half(gate_up, 1, is_transposed=True),
        "feed_forward.experts.down": Rule((down,), transposed=True),
    }


def _shared(name: str) -> Rules:
    parts = ("gate", "up", "down")
    return {f"feed_forward.shared.{part}": f"{name}.{part}_proj" for part in parts}


FUSED = _experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LATENT: Rules = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_norm": "self_attn.kv_a_layernorm",
    "attention.key_value_up": "self_attn.kv_b_proj",
}
MIXTRAL: Rules = {
    "feed_forward.router.score": "block_sparse_moe.gate",
    "feed_forward.experts.gate": per_expert("block_sparse_moe.experts.{expert}.w1.weight"),
    "feed_forward.experts.up": per_expert("block_sparse_moe.experts.{expert}.w3.weight"),
    "feed_forward.experts.down": per_expert("block_sparse_moe.experts.{expert}.w2.weight"),
}
GRANITE: Rules = {
    "feed_forward.router.score": "block_sparse_moe.router.layer",
    **_experts(
        "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
    ),
    "feed_forward.shared.gate.weight": half("shared_mlp.input_linear.weight", 0),
    "feed_forward.shared.up.weight": half("shared_mlp.input_linear.weight", 1),
    "feed_forward.shared.down": "shared_mlp.output_linear",
}  # fmt: skip
GPT_OSS: Rules = {
    "attention.sinks": parameter("self_attn.sinks"),
    "feed_forward.router.score": "mlp.router",
    "feed_forward.experts.gate": every_other("mlp.experts.gate_up_proj", 0),
    "feed_forward.experts.up": every_other("mlp.experts.gate_up_proj", 1),
    "feed_forward.experts.down": parameter("mlp.experts.down_proj"),
    "feed_forward.experts.gate_bias": every_other("mlp.experts.gate_up_proj_bias", 0),
    "feed_forward.experts.up_bias": every_other("mlp.experts.gate_up_proj_bias", 1),
    "feed_forward.output_bias": parameter("mlp.experts.down_proj_bias"),
}


def rope(*, dtype: str = "model", is_latent: bool = False, scales: bool = False) -> Key:
    """Rotary positions.

    Args:
        dtype: The precision of the rotation.
        is_latent: Whether YaRN scales logits, and the file says which units are rotated together.
        scales: Whether the library scales them by default.
    """

    def read(tree: Tree) -> dict[str, Any]:
        parameters = tree["rope_parameters"]
        kind = supported("rope_type", parameters["rope_type"], "default", *_SCALINGS)
        implied(partial_rotary_factor=1.0).read(parameters)
        values: dict[str, Any] = {"theta": parameters["rope_theta"], "dtype": dtype}
        if is_latent:
            values["pairs"] = "neighbours" if tree.get("rope_interleave", True) else "halves"
        if kind != "default":
            longest = tree["max_position_embeddings"]
            values["scaling"] = _read_scaling(parameters, longest, is_latent)
        return {"rotary": values}

    def write(config: DecoderConfig) -> dict[str, Any]:
        assert config.rotary is not None
        none = {"rope_type": "default"} if scales else None
        written: dict[str, Any] = {"rope_theta": config.rotary.theta, "rope_scaling": none}
        if (scaling := config.rotary.scaling) is not None:
            stated = scaling.model_dump(exclude={"kind", "scaled_logits"}, exclude_none=True)
            named = {_THEIRS.get(ours, ours): value for ours, value in stated.items()}
            written["rope_scaling"] = {"rope_type": scaling.kind, **named}
        if is_latent:
            written["rope_interleave"] = config.rotary.pairs == "neighbours"
        return written

    names = {"rotary": "rope_scaling", "rotary.theta": "rope_theta"}
    return Key(names, read, write, reads=("rope_parameters", "rope_interleave"))


_SCALINGS: dict[str, type[Config]] = {
    "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling,
}  # fmt: skip
_THEIRS = {
    "original_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "rounded": "truncate",
}
"""The library's scaling keys by ours, where they differ."""


def _read_scaling(parameters: Tree, longest: Any, is_latent: bool) -> dict[str, Any]:
    """Reads a section `rotary.scaling`.

    Args:
        parameters: The parameters of rotary positions, in the newer form.
        longest: `max_position_embeddings`.
        is_latent: See `rope`.
    """
    values, kind = dict(parameters), parameters["rope_type"]
    if values.get("factor") is None and longest is not None:
        values["factor"] = longest / (values.get("original_max_position_embeddings") or longest)
    named = {ours: values.get(_THEIRS.get(ours, ours)) for ours in _SCALINGS[kind].model_fields}
    # mscale: 0 means none.
    stated = {ours: each for ours, each in named.items() if each or isinstance(each, bool)}
    return stated | {"kind": kind} | ({"scaled_logits": is_latent} if kind == "yarn" else {})


def window(*, is_optional: bool = False) -> Key:
    """The sliding window, and the blocks that have it: all without `layer_types`.

    Args:
        is_optional: Whether the file has `use_sliding_window`.
    """

    def read(tree: Tree) -> dict[str, Any]:
        size, types = tree.get("sliding_window"), tree.get("layer_types")
        listed = [block for block, kind in enumerate(types or ()) if kind == "sliding_attention"]
        if not size or (types and not listed):
            return {}
        all_slide = not types or len(listed) == len(types)
        return {"sliding_window": size, "sliding_window_blocks": 1 if all_slide else listed}

    def write(config: DecoderConfig) -> dict[str, Any]:
        size = config.sliding_window
        types = [
            "sliding_attention" if size and config.slides(block) else "full_attention"
            for block in range(config.num_layers)
        ]
        written: dict[str, Any] = {"sliding_window": size, "layer_types": types}
        return written | ({"use_sliding_window": size is not None} if is_optional else {})

    return Key({"sliding_window": "sliding_window"}, read, write, reads=("use_sliding_window",))


def placement(
    routes: Callable[[Tree, int], bool], write: Callable[[list[int]], dict[str, Any]], *reads: str
) -> Key:
    """The blocks that have experts.

    Args:
        routes: Whether a block has experts.
        write: Returns the library's keys for a list of the blocks without experts.
        reads: The library's keys.
    """

    def read(tree: Tree) -> dict[str, Any]:
        blocks = range(tree["num_hidden_layers"])
        listed = [block for block in blocks if routes(tree, block)]
        if not listed:
            text = ", ".join(f"{key}: {tree[key]}" for key in reads)
            raise WeightsError(f"{text}: leaves none of {len(blocks)} blocks with experts")
        return {"feed_forward.placement": 1 if len(listed) == len(blocks) else listed}

    def written(config: Any) -> dict[str, Any]:
        return write([b for b in range(config.num_layers) if not config.feed_forward.routes(b)])

    return Key({"feed_forward.placement": reads[0]}, read, written, reads=reads)


def shared_experts() -> Key:
    """DeepSeek's shared experts: n of an expert's width are read as one, n times as wide."""

    def read(tree: Tree) -> dict[str, Any]:
        size = (tree["n_shared_experts"] or 0) * tree["moe_intermediate_size"]
        return {"feed_forward.shared_hidden_size": size or None}

    def write(config: Any) -> dict[str, Any]:
        experts = config.feed_forward
        size, each = experts.shared_hidden_size or 0, experts.expert_hidden_size or 1
        if size % each:
            raise WeightsError(
                f"model.feed_forward.shared_hidden_size: {size} is not a multiple of "
                f"expert_hidden_size: {each}, as DeepSeek's is"
            )
        return {"n_shared_experts": size // each}

    return Key({"feed_forward.shared_hidden_size": "n_shared_experts"}, read, write)


def _within(pad_id: Any, vocab_size: Any) -> Any:
    """Converts a padding token counted from the end to one counted from the start."""
    return pad_id + vocab_size if isinstance(pad_id, int) and pad_id < 0 else pad_id


def _layer_types(tree: Tree) -> dict[str, Any]:
    for kind in tree.get("layer_types") or ():
        supported("layer_types", kind, "full_attention", "sliding_attention", "attention")
    return {}


SHAPE = (
    Key({}, _layer_types, reads=("layer_types",)),
    *same("vocab_size", "hidden_size", "initializer_range"),
    field("num_hidden_layers", "num_layers"),
    field("num_attention_heads", "num_heads"),
    field("max_position_embeddings", "sequence_length"),
    field("rms_norm_eps", "norm_epsilon"),
    field("tie_word_embeddings", "tied_embeddings"),
    field("attention_dropout", "dropout"),
    only(hidden_act="silu"),
    Key(
        {"pad_id": "pad_token_id"},
        lambda tree: {"pad_id": _within(tree["pad_token_id"], tree["vocab_size"])},
        lambda config: {"pad_token_id": config.pad_id},
    ),
)
"""The keys of all families."""
HEADS = (
    field("num_key_value_heads", "num_key_value_heads"),
    field("head_dim", "head_size"),
)
LLAMA_KEYS = (*SHAPE, *HEADS, rope())
HEAD_NORMS = (constant(query_key_norm="head"), implied(use_qk_norm=True))
BIASES = (
    field("attention_bias", "attention_bias"),
    field("attention_bias", "attention_output_bias"),
)
"""Whether attention has biases: one key of the library for two of ours, which must be equal."""
SUM_TO_ONE = (constant(feed_forward__combine="sum_to_one"), implied(norm_topk_prob=True))
NORMALIZED = field(
    "norm_topk_prob",
    "feed_forward.combine",
    lambda value: "sum_to_one" if value else "scores",
    lambda value: value == "sum_to_one",
)
"""Whether the weights of a token's experts are divided by their sum."""
DENSE = inner_size("intermediate_size")


def _sparse(experts: str, size: str = "intermediate_size") -> tuple[Key, ...]:
    """The keys of experts that all families have.

    Args:
        experts: The key of the number of experts.
        size: The key of an expert's width.
    """
    return (
        constant(
            feed_forward__kind="smoe",
            feed_forward__activation="swiglu",
            feed_forward__router_dtype="model",
        ),
        field(experts, "feed_forward.num_experts"),
        field("num_experts_per_tok", "feed_forward.top_k"),
        field(size, "feed_forward.expert_hidden_size"),
    )


def _qwen_routes(tree: Tree, block: int) -> bool:
    step = tree["decoder_sparse_step"]
    if step is None or step < 1:
        raise WeightsError(f"decoder_sparse_step: {step} is not allowed; it must be at least 1")
    return block not in tree["mlp_only_layers"] and (block + 1) % step == 0


QWEN_BLOCKS = placement(
    _qwen_routes,
    lambda dense: {"decoder_sparse_step": 1, "mlp_only_layers": dense},
    "mlp_only_layers",
    "decoder_sparse_step",
)


DENSE_BLOCKS = Key(
    {"feed_forward.dense_hidden_size": "intermediate_size"},
    lambda tree: {"feed_forward.dense_hidden_size": tree["intermediate_size"]},
    lambda config: {
        "intermediate_size": config.feed_forward.dense().inner_size(config.hidden_size)
    },
)
"""The width of dense blocks."""


QWEN_EXPERTS = (
    *_sparse("num_experts", "moe_intermediate_size"),
    NORMALIZED, DENSE_BLOCKS, QWEN_BLOCKS, window(is_optional=True),
)  # fmt: skip


def groups(theirs: str, ours: str) -> Key:
    """A number of DeepSeek's groups of experts, which is null without groups."""
    return field(theirs, f"feed_forward.{ours}", lambda value: 1 if value is None else value)


DEEPSEEK = (
    *SHAPE,
    field("kv_lora_rank", "latent_attention.key_value_rank"),
    field("q_lora_rank", "latent_attention.query_rank"),
    field("qk_nope_head_dim", "latent_attention.plain_size"),
    field("qk_rope_head_dim", "latent_attention.rotated_size"),
    field("v_head_dim", "latent_attention.value_size"),
    *BIASES,
    Key({}, lambda tree: implied(num_key_value_heads=tree["num_attention_heads"]).read(tree),
        lambda config: {"num_key_value_heads": config.num_heads},
        reads=("num_key_value_heads", "qk_head_dim", "num_nextn_predict_layers", "ep_size",
               "aux_loss_alpha", "seq_aux")),
    *_sparse("n_routed_experts", "moe_intermediate_size"),
    constant(feed_forward__router_dtype="fp32"),
    DENSE_BLOCKS,
    placement(
        lambda tree, block: block >= tree["first_k_dense_replace"],
        lambda dense: {"first_k_dense_replace": len(dense)},
        "first_k_dense_replace",
    ),
    shared_experts(),
    field("routed_scaling_factor", "feed_forward.routed_scaling_factor"),
    groups("n_group", "num_groups"),
    groups("topk_group", "top_groups"),
    only(moe_layer_freq=1, mlp_bias=False),
)  # fmt: skip
"""The keys of both DeepSeek versions."""


def _decoder(
    model_type: str, title: str, classes: str, keys: tuple[Key, ...], *rules: Rules, **more: Any
) -> Family:
    inside: dict[str, str | Rule] = {}
    for each in (LLAMA, *rules):
        inside |= each
    return Family(
        title=f"transformers' {title}",
        config=DecoderConfig,
        model_types=(model_type,),
        prefix="model.",
        without_prefix=re.compile(r"lm_head\..*"),
        outside={"token_embedding": "embed_tokens", "final_norm": "norm", "head": "lm_head"},
        block="layers.{}.",
        inside=inside,
        ignored=re.compile(rf"{re.escape(HEAD)}|.*rotary_emb\.inv_freq"),
        copies=lambda config: {HEAD: "embed_tokens.weight"} if config.tied_embeddings else {},
        keys=keys,
        known_keys=IGNORED_KEYS,
        architecture=lambda config: f"{classes}ForCausalLM",
        written=lambda config, known: {"eos_token_id": known.end_of_text_id, **FP32_TEXT},
        **more,
    )


LLAMA_FAMILY = _decoder(
    "llama", "Llama", "Llama",
    (*LLAMA_KEYS, DENSE, *BIASES, *same("mlp_bias")),
)  # fmt: skip
MISTRAL_FAMILY = _decoder(
    "mistral", "Mistral", "Mistral",
    (*LLAMA_KEYS, DENSE, window()),
)  # fmt: skip
QWEN2_FAMILY = _decoder(
    "qwen2", "Qwen2", "Qwen2",
    (*LLAMA_KEYS, DENSE, window(is_optional=True), constant(attention_bias=True),
     Key({}, reads=("attention_bias", "qkv_bias"))),  # the library ignores both
)  # fmt: skip
QWEN3_FAMILY = _decoder(
    "qwen3", "Qwen3", "Qwen3",
    (*LLAMA_KEYS, DENSE, window(is_optional=True), *HEAD_NORMS, *BIASES),
)  # fmt: skip
OLMOE_FAMILY = _decoder(
    "olmoe", "OLMoE", "Olmoe",
    (*LLAMA_KEYS, *_sparse("num_experts"), NORMALIZED, *BIASES,
     constant(query_key_norm="all"), implied(use_qk_norm=True),
     field("clip_qkv", "query_key_value_clip")),
    ROUTED, other_form=FUSED,
)  # fmt: skip
MIXTRAL_FAMILY = _decoder(
    "mixtral", "Mixtral", "Mixtral",
    (*LLAMA_KEYS, *_sparse("num_local_experts"), *SUM_TO_ONE, window()),
    MIXTRAL, other_form={"feed_forward.router.score": "mlp.gate", **FUSED},
)  # fmt: skip
QWEN2_MOE_FAMILY = _decoder(
    "qwen2_moe", "Qwen2-MoE", "Qwen2Moe",
    (*LLAMA_KEYS, *QWEN_EXPERTS,
     field("shared_expert_intermediate_size", "feed_forward.shared_hidden_size"),
     constant(feed_forward__shared_gate=True),
     field("qkv_bias", "attention_bias")),
    ROUTED, _shared("mlp.shared_expert"), other_form=FUSED,
)  # fmt: skip
QWEN3_MOE_FAMILY = _decoder(
    "qwen3_moe", "Qwen3-MoE", "Qwen3Moe",
    (*LLAMA_KEYS, *QWEN_EXPERTS, Key({}, reads=("num_local_experts",)), *HEAD_NORMS, *BIASES),
    ROUTED, other_form=FUSED,
)  # fmt: skip
_GRANITE = (
    *LLAMA_KEYS, *_sparse("num_local_experts"), *SUM_TO_ONE, *BIASES,
    implied(position_embedding_type="rope", normalization_function="rmsnorm"),
    *same("embedding_multiplier", "residual_multiplier"),
    field("attention_multiplier", "attention_scale"),
    field("logits_scaling", "logits_divisor"),
)  # fmt: skip
_GRANITE_FORM = {
    "feed_forward.router.score": "block_sparse_moe.router",
    **_experts("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
}
GRANITE_FAMILY = _decoder(
    "granitemoe", "GraniteMoE", "GraniteMoe", _GRANITE, GRANITE, other_form=_GRANITE_FORM
)
GRANITE_SHARED_FAMILY = _decoder(
    "granitemoeshared", "GraniteMoE with a shared expert", "GraniteMoeShared",
    (*_GRANITE,
     field("shared_intermediate_size", "feed_forward.shared_hidden_size",
           lambda value: value or None, lambda value: value or 0)),
    GRANITE, other_form=_GRANITE_FORM,
)  # fmt: skip


def _v2_groups(tree: Tree) -> dict[str, Any]:
    method = supported("topk_method", tree["topk_method"], "greedy", "group_limited_greedy")
    one = {"feed_forward.num_groups": 1, "feed_forward.top_groups": 1}
    return one if method == "greedy" else {}


DEEPSEEK_V2_FAMILY = _decoder(
    "deepseek_v2", "DeepSeek-V2", "DeepseekV2",
    (*DEEPSEEK, rope(dtype="fp32", is_latent=True),
     constant(feed_forward__combine="scores"),
     only(scoring_func="softmax"),
     Key({}, _v2_groups,
         lambda config: {"topk_method": "greedy" if config.feed_forward.num_groups == 1
                         else "group_limited_greedy"},
         reads=("topk_method", "norm_topk_prob"))),
    ROUTED, _shared("mlp.shared_experts"), LATENT, other_form=FUSED,
)  # fmt: skip
DEEPSEEK_V3_FAMILY = _decoder(
    "deepseek_v3", "DeepSeek-V3", "DeepseekV3",
    (*DEEPSEEK, rope(is_latent=True), NORMALIZED,
     constant(feed_forward__score_function="sigmoid", feed_forward__selection_bias=True,
              feed_forward__group_score="best_two"),
     only(scoring_func="sigmoid", topk_method="noaux_tc")),
    ROUTED, _shared("mlp.shared_experts"), LATENT, other_form=FUSED, extra_blocks=True,
)  # fmt: skip
GPT_OSS_FAMILY = _decoder(
    "gpt_oss", "gpt-oss", "GptOss",
    (*SHAPE, *HEADS, rope(scales=True),
     *_sparse("num_local_experts"), *SUM_TO_ONE, window(), *BIASES,
     constant(feed_forward__activation="clamped_swiglu", mlp_bias=True, attention_sinks=True,
              norm="rms_rounded_last"),
     field("swiglu_alpha", "feed_forward.swiglu_alpha"),
     field("swiglu_limit", "feed_forward.swiglu_limit"),
     Key({}, reads=("experts_per_token", "initial_context_length"))),
    GPT_OSS, quantized="mxfp4",
)  # fmt: skip


DECODERS = (
    LLAMA_FAMILY, MISTRAL_FAMILY, QWEN2_FAMILY, QWEN3_FAMILY, OLMOE_FAMILY, MIXTRAL_FAMILY,
    QWEN2_MOE_FAMILY, QWEN3_MOE_FAMILY, GRANITE_FAMILY, GRANITE_SHARED_FAMILY,
    DEEPSEEK_V2_FAMILY, DEEPSEEK_V3_FAMILY, GPT_OSS_FAMILY,
)  # fmt: skip
