"""Every mixture of transformers in tiny form, and what of it is verified: `docs/open-models.md`.

python -m tests.helpers.mixtures            # the table, written into the page
python -m tests.helpers.mixtures glm4_moe   # the row of one
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.families.keys import WeightsError
from polyad.model.foreign import TheirModel, built
from polyad.parallel.foreign import TheirWeights, write_with_fewer
from polyad.train.experts.interventions import intervened, parse_intervention

PAGE = Path(__file__).parents[2] / "docs" / "open-models.md"
EXPERTS, LARGEST = 8, 12_000_000
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2,
    "moe_topk": 2, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 64, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "sliding_window": 8, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "num_dense_layers": 1, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "expert_layer_period": 1,
    "expert_layer_offset": 0,
}  # fmt: skip
PIXELS: dict[str, Any] = {
    "depth": 1, "num_hidden_layers": 1, "num_layers": 1, "hidden_size": 32, "embed_dim": 32,
    "num_heads": 4, "num_attention_heads": 4, "intermediate_size": 48, "out_hidden_size": 32,
    "num_key_value_heads": 4, "vocab_size": 97, "mlp_dim": 48, "output_channels": 32,
    "deepstack_visual_indexes": [0], "d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "output_dim": 32, "downsample_hidden_size": 8, "depths": [1],
    "hidden_sizes": [8], "patch_sizes": [4],
}  # fmt: skip
"""Sizes of what reads pictures and sound."""
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": SPARSE | {"num_expert_group": 1, "linear_head_dim": 8, "linear_num_heads": 4},
    "beam": SPARSE,
    "deepseek_v32": SPARSE,
    "dots3_note_text": SPARSE | {"per_layer_config": {}, "head_dim": 16},
    "gemma4_text": {
        "enable_moe_block": True, "top_k_experts": 2, "per_layer_config": {},
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97,
    },
    "glm5_next": SPARSE | {"index_topk": 16, "qk_rope_head_dim": 0},
    "glm_moe_dsa": SPARSE | {"indexer_types": ["full"] * 3},
    "deepseek_ocr2": SPARSE,
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 16], "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                      "mrope_section": [1, 1, 0]}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "muse_spark": {"moe_hidden_size": 32, "out_hidden_size": 32, "projector_hidden_size": 32},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Further keys of a type's language model."""


def kinds() -> list[str]:
    """The types whose experts transformers calls by its common interface, one for each file."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named: dict[str, str] = {}
    for table in (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        for kind, classes in table.items():
            named |= dict.fromkeys([classes] if isinstance(classes, str) else classes, kind)
    found = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = file.read_text("utf-8")
        if "use_experts_implementation" in text:
            own = [
                named[each] for each in re.findall(r"^class (\w+)\(", text, re.M) if each in named
            ]
            found.append(own[0] if own else file.parent.name)
    return found


def tiny(kind: str, **more: Any) -> Any:
    """A small configuration of a type, with other values of some keys."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    return cls(**_sized(cls(), SIZES | OWN.get(kind, {}) | more))


def _sized(default: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration with small sizes, and of those in it."""
    keys = _known(default, sizes)
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            keys[name] = type(part)(
                **_sized(part, sizes if name == "text_config" else PIXELS)
            ).to_dict()
    return keys


def _known(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a configuration has; lists with a value for each layer are cut."""
    tree = config.to_dict()
    keys = {key: value for key, value in sizes.items() if key in tree}
    if "kv_lora_rank" in keys:
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    layers = getattr(config, "num_hidden_layers", None)
    for key, value in tree.items():
        if isinstance(value, list) and len(value) == layers and key not in keys:
            keys[key] = value[: sizes["num_hidden_layers"]]
    return keys


def random_model(kind: str, **more: Any) -> Any:
    """A model of a type with random weights, in float32; `more` as for `tiny`."""
    torch.manual_seed(0)
    tree = tiny(kind, **more).to_dict()
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in built(tree).parameters())
    assert count < LARGEST, f"{kind}: {count:,} parameters are not tiny"
    theirs = built(tree).eval().float()
    for name, value in theirs.named_parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=0.2)
        elif "norm" not in name:
            nn.init.normal_(value, std=0.02)
    return theirs


@torch.inference_mode()
def logits_of(model: TheirModel, *interventions: str) -> Tensor:
    """Logits of a few tokens."""
    ids_BT = torch.arange(3, 27).view(2, 12)
    with intervened(model, [parse_intervention(each) for each in interventions]):
        return model(ids_BT).logits


COLUMNS = ("layers", "scores of all experts", "knock-out", "prune")
_START, _END = "<!-- every mixture -->", "<!-- end -->"


def rows_of(page: str) -> dict[str, tuple[str, ...]]:
    """The rows of the page's table, by type."""
    table = page.partition(_START)[2].partition(_END)[0]
    lines = (line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|`"))
    return {kind.strip("`"): tuple(cells) for kind, *cells in lines}


def verify(kind: str) -> tuple[str, ...]:
    """Opens a type, compares an intervention with changed weights, and loads a pruned model back.

    Returns:
        What was found, by column.
    """
    try:
        theirs = random_model(kind)
        model = TheirWeights.of_model(theirs).load("cpu", "fp32")
    except Exception as error:  # of any class: each kind of fault there has its own
        if len(sys.argv) > 1:
            print(kind, " ".join(str(error).split())[:300])
        is_known = isinstance(error, WeightsError)
        return ("not opened" if is_known else "not tried", "", "", "")
    whole = logits_of(model)
    routed = [n for n, block in enumerate(model.blocks) if hasattr(block, "feed_forward")]
    layer: Any = model.blocks[routed[-1]].feed_forward
    expert = int(layer.router.selection.own.expert_ids_NK.flatten().mode().values)
    without = logits_of(model, f"layer={routed[-1]},expert={expert},how=zero")
    with torch.inference_mode():
        layer.experts.down_proj[expert] = 0
        if (bias := getattr(layer.experts, "down_proj_bias", None)) is not None:
            bias[expert] = 0
    assert not torch.equal(without, whole)
    scores = "no" if layer.scored is None else layer.scored.__name__.strip("_")
    return (str(len(routed)), scores, _within(without, logits_of(model)), _pruned(kind))


def _pruned(kind: str) -> str:
    """Compares a model written without some experts with the intervention that removes them."""
    weights = TheirWeights.of_model(random_model(kind))
    model = weights.load("cpu", "fp32")
    routed = [n for n, block in enumerate(model.blocks) if hasattr(block, "feed_forward")]
    stay = [{expert: 1.0} for expert in range(EXPERTS) if expert not in (1, 4)]
    with tempfile.TemporaryDirectory() as folder:
        smaller = Path(folder) / "smaller"
        try:
            expected = logits_of(model, *(f"layer={n},expert=1+4,how=prune" for n in routed))
            groups = {f"blocks.{n}.feed_forward": stay for n in routed}
            write_with_fewer(weights, groups, smaller)
            found = logits_of(TheirWeights(smaller).load("cpu", "fp32"))
        except WeightsError:
            return "refused"
    return _within(found, expected, 1e-4)


def _within(found: Tensor, expected: Tensor, most: float = 0.0) -> str:
    return "equal" if (error := float((found - expected).abs().max())) <= most else f"{error:.0e}"


def main() -> None:
    """Writes the table, or prints rows."""
    if sys.argv[1:]:
        for kind in sys.argv[1:]:
            print(kind, verify(kind))
        return
    lines = ["", f"|{'|'.join(('type', *COLUMNS))}|", "|---|---:|---|---|---|"]
    for kind in kinds():
        lines.append(f"|`{kind}`|{'|'.join(verify(kind))}|")
        print(lines[-1], flush=True)
    page = PAGE.read_text("utf-8")
    before, after = page.partition(_START)[0], page.partition(_END)[2]
    PAGE.write_text(f"{before}{_START}{chr(10).join([*lines, '', _END])}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
