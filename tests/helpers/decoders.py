"""Tiny random decoders from transformers, and the same models opened by Polyad."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from polyad.data.text.prepare import prepare
from polyad.model.build import build_model, place
from polyad.parallel.families import FamilyWeights
from tests.helpers.prepared import jsonl

WORDS = 101
IDS = 300
"""Ids of the tokenizer that `hub_folder` writes."""
BEGIN, END = "<|begin|>", "<|return|>"
"""Its tokens before and after a document; it has another one that is known to end documents."""
SHAPE = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 48,
}  # fmt: skip
ODD = SHAPE | {
    "hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
    "intermediate_size": 36, "num_hidden_layers": 4,
}  # fmt: skip
TOP_2 = {"num_experts_per_tok": 2}
QWEN = TOP_2 | {"num_experts": 8, "moe_intermediate_size": 24}
LATENT = TOP_2 | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
GRANITE = TOP_2 | {
    "num_local_experts": 6, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.1, "logits_scaling": 6.0,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", ODD | {
        "hidden_size": 42, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "llama linear": ("llama", SHAPE | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama yarn": ("llama", SHAPE | {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "mistral": ("mistral", SHAPE | {"sliding_window": 5}),
    "qwen2": ("qwen2", SHAPE | {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", ODD | {"use_sliding_window": True, "sliding_window": 6,
                              "max_window_layers": 2}),
    "olmoe": ("olmoe", SHAPE | TOP_2 | {"num_experts": 8, "clip_qkv": 0.7}),
    "olmoe normalized": ("olmoe", SHAPE | {
        "num_experts_per_tok": 3, "num_experts": 7, "norm_topk_prob": True,
        "num_key_value_heads": 4, "intermediate_size": 20}),
    "mixtral": ("mixtral", SHAPE | TOP_2 | {"num_local_experts": 6}),
    "mixtral window": ("mixtral", ODD | {
        "num_experts_per_tok": 1, "num_local_experts": 5, "sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", SHAPE | QWEN | {
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    "qwen2_moe window": ("qwen2_moe", SHAPE | QWEN | {
        "shared_expert_intermediate_size": 16, "qkv_bias": False, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", ODD | QWEN | {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3_moe window": ("qwen3_moe", SHAPE | QWEN | {
        "use_sliding_window": True, "sliding_window": 6, "attention_bias": True}),
    "granitemoe": ("granitemoe", SHAPE | GRANITE | {"tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", SHAPE | GRANITE | {"shared_intermediate_size": 40}),
    "granitemoeshared none": ("granitemoeshared", SHAPE | GRANITE),
    "deepseek_v2": ("deepseek_v2", SHAPE | LATENT | {
        "n_shared_experts": 2, "q_lora_rank": None, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}),
    "deepseek_v2 yarn": ("deepseek_v2", SHAPE | LATENT | {
        "n_shared_experts": 1, "q_lora_rank": 20, "num_experts_per_tok": 3,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}}),
    "deepseek_v3": ("deepseek_v3", SHAPE | LATENT | {
        "n_shared_experts": 1, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
    "deepseek_v3 yarn": ("deepseek_v3", SHAPE | LATENT | {
        "n_shared_experts": 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "rope_interleave": False, "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt_oss": ("gpt_oss", SHAPE | TOP_2 | {
        "num_local_experts": 6, "head_dim": 8, "sliding_window": 7,
        "rope_parameters": YARN | {"truncate": False}}),
    "gpt_oss odd": ("gpt_oss", ODD | {
        "num_experts_per_tok": 3, "num_local_experts": 5, "sliding_window": 30,
        "swiglu_limit": 0.5, "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"] * 2}),
}  # fmt: skip
"""Model types and settings of `transformers`."""
ROUTED = [name for name, (kind, _) in CASES.items() if kind not in ("llama", "mistral", "qwen2",
                                                                   "qwen3")]  # fmt: skip


class InDouble(TorchFunctionMode):
    """Replaces every fp32 in transformers by fp64: in norms, tables and softmaxes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the function with fp64 for fp32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        in_double = {
            key: torch.float64 if each is torch.float32 else each
            for key, each in (kwargs or {}).items()
        }
        changed = (torch.float64 if each is torch.float32 else each for each in args)
        return func(*changed, **in_double)


def theirs(
    case: str,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str | None = None,
    experts: str = "eager",
    **more: Any,
) -> Any:
    """A random model of transformers.

    Args:
        case: A name of `CASES`.
        dtype: Its precision; fp64 without islands of fp32.
        attention: Its implementation; None: fused where the family has it.
        experts: Their implementation.
        more: Further settings.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, settings = CASES[case]
    config = CONFIG_MAPPING[kind](**(settings | more))
    config._experts_implementation = experts
    attention = attention or ("eager" if kind == "gpt_oss" else "sdpa")
    with InDouble() if dtype == torch.float64 else nullcontext():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        rates = model.model.rotary_emb.inv_freq
        model = model.to(dtype).eval()
    model.model.rotary_emb.inv_freq = rates  # `from_pretrained` leaves it as it is
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 1:
            noise = 0.3 * noise + ("norm" in name and "bias" not in name)
        elif "embed" not in name or config.tie_word_embeddings:
            noise = noise * 1.3 / math.sqrt(config.hidden_size)
        tensor.data.copy_(noise)
    return model


def hub_folder(
    folder: Path, case: str, settings: dict[str, Any] | None = None, **about: Any
) -> Any:
    """Writes a folder as on the hub, with a tokenizer of fewer ids than the model has rows.

    Args:
        folder: The folder.
        case: See `theirs`.
        settings: Of the model in place of the case's.
        about: Keys of tokenizer_config.json.

    Returns:
        The model of transformers.
    """
    model = theirs(case, vocab_size=IDS + 20, **(settings or {}))
    model.save_pretrained(folder)
    write_tokenizer(folder, **about)
    return model


def commands_on(folder: Path, data: str, block: int) -> list[list[Any]]:
    """Commands that read an opened mixture.

    Args:
        folder: The mixture.
        data: Prepared text.
        block: One that routes.
    """
    steered = ["--intervene", f"layer={block},expert=1,how=steer,value=2"]
    few = ["--data", data, "--tokens", "64"]
    return [
        ["experts", "atlas", folder, *few, "--layers", block],
        ["experts", "specialize", folder, "--data", data],
        ["experts", "steer", folder, *few, *steered],
        ["experts", "trace", folder, *few, "--output", f"{data}-trace.parquet", "--with", "norm"],
        ["generate", folder, "--prompt", "def ", "--max-tokens", "5", *steered],
        ["report", folder, *few, "--knockout"],
    ]


def write_tokenizer(folder: Path, **about: Any) -> None:
    """Writes a tokenizer of `IDS` tokens, those special ones first.

    Args:
        folder: Where it goes.
        about: Keys of tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=IDS,
        special_tokens=[BEGIN, "<|endoftext|>", END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(known | about))


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder, with its weights."""
    weights = FamilyWeights(folder)
    model = build_model(weights.config)
    place(model, values_of(weights, model), dtype=dtype)
    return model.eval()


def values_of(weights: FamilyWeights, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers of a folder, by our names."""
    for name, _ in model.named_parameters():
        yield name, weights.whole(name)
    for name, _ in model.named_buffers():
        yield name, weights.buffer(name)


def tokens(length: int = 23, batch: int = 3) -> Tensor:
    """Token ids [batch, length]."""
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(5))


class Chosen:
    """The experts that a model of transformers chose, layer by layer."""

    def __init__(self, model: Any) -> None:
        self.inputs: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.ids: list[Tensor] = []
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._keep)

    def _keep(self, _: Any, inputs: Any, outputs: Any) -> None:
        self.inputs.append(inputs[0])
        self.weights.append(outputs[1])
        self.ids.append(outputs[2])


class Choices:
    """The experts that a model of ours chose, layer by layer."""

    def __init__(self, model: Any) -> None:
        self.ids: list[Tensor] = []
        for block in model.blocks:
            if (router := getattr(block.feed_forward, "router", None)) is not None:
                router.register_forward_hook(lambda m, i, o: self.ids.append(o[0].expert_ids_NK))


def in_double(case: str, folder: Path) -> tuple[float, list[tuple[str, Tensor, Tensor]]]:
    """A forward and a backward pass of both in fp64.

    Args:
        case: A name of `CASES`.
        folder: An empty one, for the weights and the gradients.

    Returns:
        The largest difference of logits; of each parameter of ours the name, its gradient, and
        that of transformers, which went through the same kind of files as the weights, in fp32.
    """
    theirs(case).save_pretrained(folder / "weights")
    model, ids = theirs(case, torch.float64), tokens()
    ours = opened(folder / "weights", torch.float64)
    with InDouble():
        wanted = model(ids, use_cache=False).logits
    found = ours(ids).logits
    for logits in (wanted, found):
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    model.float().save_pretrained(folder / "gradients")
    gradients = [
        (
            name,
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad,
            gradient.detach(),
        )
        for (name, parameter), gradient in zip(
            ours.named_parameters(),
            opened(folder / "gradients", torch.float64).parameters(),
            strict=True,
        )
    ]
    return (wanted - found).abs().max().item(), gradients


TEXTS = [f"def number_{n}(x):\n    return {n} * x + {n * n}\n" * (2 + n % 3) for n in range(24)]


def prepared_for(folder: Path, tmp_path: Path) -> Path:
    """Prepares some texts with the tokenizer of a folder from `hub_folder`."""
    data = tmp_path / "data"
    prepare(jsonl(tmp_path / "texts.jsonl", TEXTS), str(folder), data, validation_fraction=0.5)
    return data


def hub_with_text(root: Path, case: str, **about: Any) -> tuple[Any, Path]:
    """`hub_folder` in `hub`, and text that is prepared with its tokenizer.

    Returns:
        The model of transformers, and the prepared text.
    """
    model = hub_folder(root / "hub", case, **about)
    return model, prepared_for(root / "hub", root)


def in_four_bits(folder: Path) -> None:
    """Gives the folder of a gpt-oss other experts, which are stored as on the hub (MXFP4).

    Args:
        folder: Of a model whose widths are multiples of 32.
    """
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(2)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        shape = experts, out, width // 32
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 126, shape, generator=generator, dtype=torch.uint8
        )
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
