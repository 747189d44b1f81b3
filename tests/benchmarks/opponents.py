"""What others compute, with the weights of ours: layers of sparse experts, and GPT-2.

Shapes: N tokens, D width, E experts, K experts of a token, M = N K rows, F inner width of one
expert, B samples, T tokens of a sample, V vocabulary.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    gelu,
    grouped_mm,
    linear,
    scaled_dot_product_attention,
    silu,
)

from polyad.model.decoder import GPT2Config
from polyad.model.smoe.layer import SparseMoE


class GroupedLayer(nn.Module):
    """Sparse experts as torchtitan has them: sort, `grouped_mm` without padding, scatter.

    Experts have GELU, or SwiGLU where ours have a gate; torchtitan's have the latter. The product
    of the router is in fp32, as there, or in the precision of the model, where ours is.

    Args:
        ours: Whose weights these are, copied.
    """

    def __init__(self, ours: SparseMoE) -> None:
        super().__init__()
        self.top_k, self.router_dtype = ours.config.top_k, ours.config.router_dtype
        self.router = nn.Parameter(ours.router.score.get_parameter("weight").detach().clone())
        experts = ours.experts
        first = [experts.up] if experts.gate is None else [experts.gate, experts.up]
        self.up = nn.Parameter(torch.cat([each.detach() for each in first], 2).mT.contiguous())
        self.down = nn.Parameter(experts.down.detach().mT.contiguous())
        self.gated = experts.gate is not None

    def forward(self, tokens_ND: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        if self.router_dtype == "fp32":
            logits_NE = linear(tokens_ND.float(), self.router.float())
        else:
            logits_NE = linear(tokens_ND, self.router)
        scores_NE = logits_NE.float().softmax(-1)
        ids_NK = scores_NE.topk(self.top_k, dim=-1, sorted=False).indices
        weights_NK = scores_NE.gather(-1, ids_NK)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        counts_E = torch.zeros_like(scores_NE).scatter(-1, ids_NK, 1.0).sum(0)
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        order_M = ids_NK.flatten().argsort(stable=True)
        token_M = order_M // self.top_k
        inner_MF = grouped_mm(tokens_ND[token_M], self.up.mT, offs=offsets_E)
        if self.gated:
            gate_MF, inner_MF = inner_MF.chunk(2, -1)
            inner_MF = silu(gate_MF) * inner_MF
        else:
            inner_MF = gelu(inner_MF, approximate="tanh")
        rows_MD = grouped_mm(inner_MF, self.down.mT, offs=offsets_E)
        weighted_MD = rows_MD.float() * weights_NK.flatten()[order_M].unsqueeze(-1)
        index_MD = token_M.unsqueeze(-1).expand_as(weighted_MD)
        return torch.zeros_like(tokens_ND).scatter_add(0, index_MD, weighted_MD.to(rows_MD.dtype))


def auto_ep(ours: SparseMoE) -> nn.Module:
    """DeepSpeed's AutoEP on one process, in place of a layer of Mixtral: [B, T, D] to [B, T, D].

    Its experts are SwiGLU's alone. On a CPU they run one after the other, as its kernels are a
    GPU's.

    Args:
        ours: Whose weights these are, copied; with a gate, and without biases.
    """
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    experts, router = ours.experts, ours.router.score.get_parameter("weight")
    num_experts, width, hidden = experts.up.shape
    source = nn.Module()
    source.gate = nn.Linear(width, num_experts, bias=False, device=router.device)
    source.gate.weight = nn.Parameter(router.detach())
    source.experts = nn.Module()
    both = torch.cat([experts.gate.detach(), experts.up.detach()], 2).mT.contiguous()
    source.experts.gate_up_proj = nn.Parameter(both)
    source.experts.down_proj = nn.Parameter(experts.down.detach().mT.contiguous())
    spec = MoELayerSpec(
        moe_module_name="", model_family="mixtral", router_name="gate", experts_name="experts",
        expert_storage="fused_3d", expert_w1_name="gate_up_proj", expert_w2_name="down_proj",
        expert_w3_name=None, num_experts=num_experts, top_k=ours.config.top_k, hidden_size=width,
        ffn_hidden_size=hidden, score_func="softmax", score_apply="post", route_norm=True,
        gate_bias=False, return_router_logits=False, router_logits_capture_target="none",
        router_logits_capture_index=None, router_logits_capture_layer_name=None,
        has_shared_experts=False, shared_experts_name="",
    )  # fmt: skip
    config = AutoEPConfig(enabled=True, use_grouped_mm=router.is_cuda)
    return AutoEPMoELayer(spec, source, ep_size=1, ep_rank=0, config=config)


class NanoGPT(nn.Module):
    """GPT-2 in the manner of nanoGPT; its parameters have the names of ours.

    Args:
        config: Ours.
        vocab_size: V, padded as ours is.
    """

    def __init__(self, config: GPT2Config, vocab_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.sequence_length, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, bias=config.bias)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss."""
        positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        x_BTD = self.token_embedding(ids_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.final_norm(x_BTD)
        logits_BTV = linear(x_BTD, self.token_embedding.weight)
        return cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


class _Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.bias
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = _Attention(width, config.num_heads, bias)
        self.feed_forward_norm = nn.LayerNorm(width, bias=bias)
        layers = {
            "up": nn.Linear(width, 4 * width, bias=bias),
            "activation": nn.GELU(approximate="tanh"),
            "down": nn.Linear(4 * width, width, bias=bias),
        }
        self.feed_forward = nn.Sequential(OrderedDict(layers))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        output: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return output


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.projection = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = self.qkv(x_BTD).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q_BATH, k_BATH, v_BATH = heads.unbind(0)
        heads_BATH = scaled_dot_product_attention(q_BATH, k_BATH, v_BATH, is_causal=True)
        output: Tensor = self.projection(heads_BATH.transpose(1, 2).flatten(2))
        return output
