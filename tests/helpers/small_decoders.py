"""Small decoders of sizes that nothing divides by chance, each with what a family has."""

from typing import Any

from polyad.model.build import read_model_config
from polyad.model.decoder import DecoderConfig

SMALL: dict[str, Any] = {
    "kind": "decoder", "num_layers": 2, "hidden_size": 36, "num_heads": 4, "sequence_length": 17,
    "vocab_size": 61, "pad_id": 3,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "kind": "smoe", "num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "activation": "swiglu",
    "router_dtype": "model",
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "grouped": {"num_key_value_heads": 2, "query_key_norm": "head", "head_size": 10,
                "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "one head of keys": {"num_key_value_heads": 1, "query_key_norm": "all", "head_size": 10,
                         "attention_bias": True, "tied_embeddings": True},
    "norm over heads": {"num_key_value_heads": 4, "query_key_norm": "all", "head_size": 10,
                        "query_key_value_clip": 0.5,
                        "feed_forward": EXPERTS | {"combine": "scores"}},
    "latent": {"latent_attention": {"key_value_rank": 12, "query_rank": 14, "plain_size": 6,
                                    "rotated_size": 4, "value_size": 5},
               "attention_bias": True,
               "rotary": {"pairs": "neighbours", "dtype": "fp32"},
               "feed_forward": EXPERTS | {
                   "score_function": "sigmoid", "combine": "sum_to_one",
                   "routed_scaling_factor": 2.5,
                   "num_groups": 2, "top_groups": 1, "group_score": "best_two",
                   "balancing_rate": 0.001, "shared_hidden_size": 16, "placement": [1],
                   "dense_hidden_size": 20}},
    "latent without rank": {"latent_attention": {"key_value_rank": 12, "plain_size": 6,
                                                 "rotated_size": 4, "value_size": 8}},
    "sinks": {"num_key_value_heads": 2, "head_size": 10, "attention_sinks": True,
              "sliding_window": 5, "sliding_window_blocks": [0], "mlp_bias": True,
              "norm": "rms_rounded_last",
              "feed_forward": EXPERTS | {"activation": "clamped_swiglu", "swiglu_limit": 0.1}},
    "multipliers": {"head_size": 10, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                    "attention_scale": 0.3, "logits_divisor": 2.0, "head_bias": True,
                    "feed_forward": EXPERTS | {"shared_hidden_size": 16, "shared_gate": True,
                                               "combine": "sum_to_one"}},
    "graph": {"num_key_value_heads": 1, "head_size": 10,
              "feed_forward": EXPERTS | {"graph": "attention"}},
    "units in groups": {"head_size": 10, "mlp_bias": True, "feed_forward": {
        "kind": "emoe", "num_experts": 4, "top_k": 2, "hidden_size": 40}},
    "grouped units": {"head_size": 10, "feed_forward": {
        "kind": "emoe", "num_experts": 4, "top_k": 2, "hidden_size": 40, "score": "linear"}},
    "factorized": {"num_key_value_heads": 2, "head_size": 10, "feed_forward": {
        "kind": "mumoe", "num_experts": [5], "rank": 8, "hidden_size": 24, "activation": "swiglu"}},
    "learned": {"rotary": None, "activation": "gelu_tanh", "norm": "layer"},
}  # fmt: skip
"""Keys of `kind: decoder` beside those of `SMALL`."""


def small_decoder(name: str) -> DecoderConfig:
    """The configuration of a decoder.

    Args:
        name: Of `DECODERS`.
    """
    return read_model_config(SMALL | DECODERS[name])
