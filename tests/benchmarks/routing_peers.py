"""Variants of `routing.py`: one block or model with different graphs of tokens.

All have the same weights, and the same memory for them. Experts are given: an untrained graph may
send all tokens to the same two, and the block would be timed with another load, not another graph.
Every router still scores, mixes and selects before that.

Shapes: B batch, T tokens in a sequence, N = B T, D width, E experts, K experts of a token, A heads,
H width of one head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.attention import AttentionTrace
from polyad.model.build import build_model, initial_value, initial_values, place
from polyad.model.decoder import Decoder
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import NOTHING_ELSE, BlockInput
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.graph import Graph, Mixed, MixingGraph
from polyad.model.smoe.router import Selected, TopK
from polyad.parallel.zero import DTYPES

PLAIN = "plain"
MATERIALIZED = "T x T "


def graphs_of(width: int) -> dict[str, dict[str, Any]]:
    """The keys of each graph, with temperatures at which S is neither the identity nor even.

    Args:
        width: D, the squared length of a normalized token.
    """
    return {
        "similarity": {"graph": "similarity", "tau": width / 4},
        "cosine": {"graph": "similarity", "similarity": "cosine", "tau": 0.25},
        "attention": {"graph": "attention", "sigma": 10.0},
    }


class MaterializedGraph(MixingGraph):
    """A graph's mixture as the paper writes it, with the matrix S [B, T, T] in memory.

    Args:
        like: Ours, whose configuration this has; of an attention graph the first head is taken,
            which is ours as long as nothing was learned.
    """

    def __init__(self, like: MixingGraph) -> None:
        super().__init__(like.config, like.context)
        self._head = like.attention_head()

    def attention_head(self) -> Tensor | None:
        """See `Graph.attention_head`."""
        return self._head

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """See `Graph.forward`; no measures."""
        if given.attention is None:
            s_BTT = self._similarity(u_BTD.to(scores_BTE.dtype))
        else:
            s_BTT = self._posterior(given.attention, scores_BTE.dtype)
        return Mixed(s_BTT @ scores_BTE, None, None)

    def _similarity(self, u_BTD: Tensor) -> Tensor:
        if self.config.similarity == "cosine":
            u_BTD = u_BTD / u_BTD.norm(dim=-1, keepdim=True)
        return self._masked(u_BTD @ u_BTD.mT / self.config.tau).softmax(-1)

    def _posterior(self, attention: AttentionTrace, dtype: torch.dtype) -> Tensor:
        o_BTD, weight_DM = attention.output_BTD.to(dtype), attention.output_weight_DM.to(dtype)
        if attention.output_bias_D is not None:
            o_BTD = o_BTD - attention.output_bias_D.to(dtype)
        q_BTH, k_BTH, v_BTH = attention.of_head_BT3H.to(dtype).unbind(2)
        heads, size = attention.qkv_BT3AH.shape[3:]
        prior_BTT = self._masked(q_BTH @ k_BTH.mT / size**0.5).log_softmax(-1)
        factor = heads if self.config.head_mean else 1
        m_BTD = factor * v_BTH @ weight_DM[:, :size].T
        squares_BTT = o_BTD.square().sum(-1)[:, :, None] + m_BTD.square().sum(-1)[:, None, :]
        distance_BTT = squares_BTT - 2 * o_BTD @ m_BTD.mT
        return (prior_BTT - distance_BTT / (2 * self.config.sigma**2)).softmax(-1)

    def _masked(self, logits_BTT: Tensor) -> Tensor:
        unseen_TT = torch.ones(logits_BTT.shape[1:], dtype=torch.bool, device=logits_BTT.device)
        return logits_BTT.masked_fill(unseen_TT.triu_(1), -torch.inf)


class GivenExperts(TopK):
    """Runs the selection, but returns given experts.

    Args:
        config: Of the layer.
        ids_NK: The experts of each token.
    """

    ids_NK: Tensor

    def __init__(self, config: SparseMoEConfig, ids_NK: Tensor) -> None:
        super().__init__(config)
        self.register_buffer("ids_NK", ids_NK)

    def forward(self, scores_NE: Tensor, logits_NE: Tensor | None = None) -> Selected:
        """See `TopK.forward`."""
        selected = super().forward(scores_NE)
        weights_NK = scores_NE.gather(-1, self.ids_NK)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        # Uses the selection's result without effect, so that the compiler keeps it.
        return Selected.of(weights_NK + 0 * selected.weights_NK, self.ids_NK, self.num_experts)


def make_plain(config: GPT2Config, precision: str, device: torch.device) -> Decoder:
    """A model without a graph, with its initial weights.

    Args:
        config: The model's.
        precision: Of the weights.
        device: Where it is.
    """
    model = build_model(config)
    assert isinstance(model, Decoder)
    place(model, initial_values(model, 0), device, DTYPES[precision])
    return model


def make_variants(
    plain: Decoder, tokens: int, precision: str, *, materialized: bool
) -> dict[str, Decoder]:
    """The model with each graph: weights are the plain one's, in the same memory.

    Args:
        plain: From `make_plain`.
        tokens: N of a batch, whose experts are drawn at random.
        precision: Of the weights.
        materialized: Whether each graph comes a second time, as `MaterializedGraph`.
    """
    graphs = graphs_of(plain.config.hidden_size)
    variants = {PLAIN: _with_graph(plain, {}, precision)}
    variants |= {name: _with_graph(plain, keys, precision) for name, keys in graphs.items()}
    if materialized:
        for name, keys in graphs.items():
            model = variants[MATERIALIZED + name] = _with_graph(plain, keys, precision)
            for layer in routed(model):
                layer.router.graph = MaterializedGraph(layer.router.graph)
    feed_forward = plain.config.feed_forward
    assert isinstance(feed_forward, SparseMoEConfig)
    generator = torch.Generator().manual_seed(0)
    draws_NE = torch.rand(tokens, feed_forward.num_experts, generator=generator)
    ids_NK = draws_NE.topk(feed_forward.top_k).indices.to(plain.token_embedding.weight.device)
    for model in variants.values():
        for layer in routed(model):
            layer.router.selection = GivenExperts(feed_forward, ids_NK)
    return variants


def routed(model: Decoder) -> list[Any]:
    """The sparse feed-forwards of a model."""
    return [block.get_submodule("feed_forward") for block in model.blocks]


def _with_graph(plain: Decoder, keys: dict[str, Any], precision: str) -> Decoder:
    feed_forward = plain.config.feed_forward.model_copy(update=keys)
    model = build_model(plain.config.model_copy(update={"feed_forward": feed_forward}))
    assert isinstance(model, Decoder)
    values = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for name, _ in model.named_buffers():
        values[name] = initial_value(model, name, seed=0)
    place(model, values.items(), plain.token_embedding.weight.device, DTYPES[precision])
    return model


def difference(block: nn.Module, x_BTD: Tensor) -> float:
    """How far a block's graph is from the materialized one in float64, on the block's own tokens.

    Args:
        block: With a graph.
        x_BTD: Its input.

    Returns:
        The largest of the mixture's and its gradients' differences, as shares of their norms.
    """
    layer: Any = block.get_submodule("feed_forward")
    with torch.no_grad():
        normalized_BTD = block.get_submodule("attention_norm")(x_BTD)
        attended_BTD, trace = block.get_submodule("attention")(
            normalized_BTD, traced_head=layer.attention_head()
        )
        u_BTD = block.get_submodule("feed_forward_norm")(x_BTD + attended_BTD)
        scores_NE = layer.router.score(u_BTD.flatten(0, 1)).softmax(-1)
    graph: MixingGraph = layer.router.graph
    scores_BTE = scores_NE.unflatten(0, u_BTD.shape[:2])
    read = [scores_BTE, u_BTD] if trace is None else [scores_BTE, *trace]
    ours = _mixture_and_gradients(graph, read)
    exact = _mixture_and_gradients(MaterializedGraph(graph), [x.double() for x in read])
    apart: list[float] = [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)
    ]
    return max(apart)


def _mixture_and_gradients(graph: Graph, read: list[Tensor]) -> tuple[Tensor, ...]:
    """The mixture, and gradients of scores and of tokens or of what attention did."""
    inputs = [x.detach().requires_grad_() for x in read]
    scores_BTE, *others = inputs
    if graph.attention_head() is None:
        mixed_BTE = graph(scores_BTE, *others).scores_BTE
    else:
        trace = AttentionTrace(*others)
        mixed_BTE = graph(scores_BTE, scores_BTE, BlockInput(attention=trace)).scores_BTE
        inputs = [x for x in inputs if x is not trace.qkv_BT3AH]  # no way for gradients
    generator = torch.Generator().manual_seed(1)
    gradient_BTE = torch.randn(mixed_BTE.shape, generator=generator).to(mixed_BTE)
    return mixed_BTE, *torch.autograd.grad(mixed_BTE, inputs, gradient_BTE)
