"""`routing.py`: what a graph of tokens adds to a sparse mixture of experts.

In one GPT-2 block (attention and experts) and in a whole model with its loss, forward and backward
on one sequence of T tokens: the router without a graph, and with each graph. What counts is the
ratio to the plain router's.

All variants have the same weights, in the same memory. Experts are given: an untrained graph may
send all tokens to the same two, and the block would be timed with another load, not another graph.
Every router still scores, mixes and selects before that.

Shapes: B batch, T tokens in a sequence, N = B T, D width, E experts, K experts of a token, A heads,
H width of one head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from polyad.launch.command import Json, NonNegative, Positive, results
from polyad.model.attention import AttentionTrace
from polyad.model.build import build_model, initial_value, initial_values, place
from polyad.model.decoder import Decoder, GPT2Config
from polyad.model.feedforward import NOTHING_ELSE, BlockInput
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.graph import Graph, Mixed, MixingGraph
from polyad.model.smoe.router import Selected, TopK
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.random_input import flops_of_unit
from tests.benchmarks.comparison import (
    Compile,
    Device,
    Numbers,
    PrecisionOption,
    Repeats,
    Threads,
    TimedLayer,
    benchmark,
    check,
    compare,
    on_device,
    precisions,
    say,
    setting,
    start,
    table,
)

CHECKED = 512
"""Tokens of a sequence that are compared before the clock counts: in float64, with a matrix."""


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
        """The head of the graph that this one copies."""
        return self._head

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """S times the scores, without measures."""
        if given.attention is None:
            s_BTT = self._similarity(u_BTD.to(scores_BTE.dtype))
        else:
            s_BTT = self._posterior(given.attention, scores_BTE.dtype)
        return Mixed(s_BTT @ scores_BTE)

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
        """The given experts, with their scores as weights that sum to 1."""
        selected = super().forward(scores_NE)
        weights_NK = scores_NE.gather(-1, self.ids_NK)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        # Uses the selection's result without effect, so that the compiler keeps it.
        return Selected.of(weights_NK + 0 * selected.weights_NK, self.ids_NK, self.num_experts)


def make_variants(
    config: GPT2Config, tokens: int, precision: str, device: str
) -> tuple[dict[str, Decoder], dict[str, GPT2Config]]:
    """The model with each graph, and their configurations; all have the weights of the plain one.

    Args:
        config: The plain model's.
        tokens: N of a batch, whose experts are drawn at random.
        precision: Of the weights.
        device: Where they are.
    """
    sparse = config.feed_forward
    generator = torch.Generator().manual_seed(0)
    ids_NK = torch.rand(tokens, sparse.num_experts, generator=generator).topk(sparse.top_k).indices
    models: dict[str, Decoder] = {}
    configs = {}
    for name, keys in ({"plain": {}} | graphs_of(config.hidden_size)).items():
        feed_forward = sparse.model_copy(update=keys)
        configs[name] = config.model_copy(update={"feed_forward": feed_forward})
        model = build_model(configs[name])
        if models:
            values = {n: p.detach() for n, p in models["plain"].named_parameters()}
            values |= {n: initial_value(model, n, seed=0) for n, _ in model.named_buffers()}
            place(model, values.items(), torch.device(device), DTYPES[precision])
        else:
            place(model, initial_values(model, 0), torch.device(device), DTYPES[precision])
        for block in model.blocks:
            router: Any = block.get_submodule("feed_forward.router")
            router.selection = GivenExperts(sparse, ids_NK.to(device))
        models[name] = model
    return models, configs


def check_graph(name: str, block: nn.Module, x_BTD: Tensor, precision: str) -> None:
    """Compares a block's graph with the materialized one in float64, on the block's own tokens."""
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
    check(name, ours, exact, precision)


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


def compare_at(
    where: str, config: GPT2Config, precision: str, device: str, compiled: bool, repeats: int
) -> dict[str, Any]:
    """The rows of the variants of one block, or of the whole model with its loss."""
    length, width = config.sequence_length, config.hidden_size
    models, configs = make_variants(config, length, precision, device)
    generator = torch.Generator().manual_seed(1)
    if where == "block":
        x_BTD, gradient = (
            torch.randn(1, length, width, generator=generator).to(device, DTYPES[precision])
            for _ in range(2)
        )
        for name in graphs_of(width):
            check_graph(name, models[name].blocks[0], x_BTD[:, :CHECKED], precision)
        layers = {name: _block_of(model) for name, model in models.items()}
        rows = compare(
            layers, x_BTD.requires_grad_(), gradient, repeats, "plain", compiled=compiled
        )
    else:
        ids_BT = torch.randint(config.number("vocab_size"), (1, length + 1), generator=generator)
        ids_BT = ids_BT.to(device)
        layers = {name: _with_loss(model, ids_BT[:, 1:]) for name, model in models.items()}
        rows = compare(layers, ids_BT[:, :-1], None, repeats, "plain", compiled=compiled)
    for name, row in rows.items():
        row["flops_ratio"] = flops_of_unit(configs[name]) / flops_of_unit(config)
    return rows


def _block_of(model: Decoder) -> TimedLayer:
    block = model.blocks[0]

    def call(x_BTD: Tensor) -> Tensor:
        output: Tensor = block(x_BTD)[0]
        return output

    return TimedLayer(block, call)


def _with_loss(model: Decoder, labels_BT: Tensor) -> TimedLayer:
    labels_BT = labels_BT.contiguous()
    return TimedLayer(model, lambda ids_BT: cross_entropy(model(ids_BT).logits, labels_BT).mean())


@benchmark(
    "routing", "--tokens 512 2048 --precision bf16 --json routing.json", "--tokens 8192 --layers 0"
)
def routing(
    *,
    tokens: Numbers = (512, 2048, 8192),
    model_tokens: Numbers = (512,),
    layers: NonNegative = 12,
    width: Positive = 768,
    heads: Positive = 12,
    experts: Positive = 16,
    top_k: Positive = 2,
    hidden: Positive | None = None,
    precision: PrecisionOption = None,
    repeats: Repeats = 5,
    threads: Threads = None,
    device: Device = "cpu",
    compile: Compile = False,
    json: Json = None,
) -> None:
    """Times what a graph of tokens adds to a sparse mixture of experts.

    Args:
        tokens (T): tokens of the block's one sequence, one length after the other; default 512 2048
            8192.
        model_tokens (T): tokens of the whole model's one sequence; default 512.
        layers (L): blocks of the whole model; 0: no whole model; default 12, which takes 8 GiB in
            fp32.
        width (D): width of a token; default 768.
        heads (A): heads of attention; default 12.
        experts (E): number of experts; default 16.
        top_k (K): experts of a token; default 2.
        hidden (F): inner width of one expert; default 4 D.
    """
    if top_k > experts:
        raise ConfigError(f"--top-k: {top_k} is more than --experts: {experts}")
    if width % heads:
        raise ConfigError(f"--width: {width} is not a multiple of --heads: {heads}")
    sparse = SparseMoEConfig(
        num_experts=experts, top_k=top_k, expert_hidden_size=hidden or 4 * width
    )
    places = {"block": (1, 2, tokens)} | (
        {"model": (layers, 50257, model_tokens)} if layers else {}
    )
    shape = {"width": width, "heads": heads, "experts": experts, "top_k": top_k}
    with on_device(device, threads) as about, results(json) as show:
        result: dict[str, Any] = {**shape, **about, "repeats": repeats, "precisions": {}}
        lines = [f"width {width}, {experts} experts of which {top_k}; {setting(result)}"]
        for each in precisions(precision):
            rows = result["precisions"][each] = {}
            for where, (blocks, vocabulary, lengths) in places.items():
                for length in lengths:
                    name = f"{where}, {length} tokens"
                    say(f"{each}, {name}")
                    config = GPT2Config(
                        num_layers=blocks, hidden_size=width, num_heads=heads,
                        sequence_length=length, vocab_size=vocabulary, feed_forward=sparse,
                    )  # fmt: skip
                    rows[name] = compare_at(where, config, each, device, compile, repeats)
                    lines += ["", f"{each}, {name}", table(rows[name], "plain")]
                    flops = (f"{key} {row['flops_ratio']:.3f}" for key, row in rows[name].items())
                    lines += [f"by FLOPs: {', '.join(flops)}"]
        show(result, "\n".join(lines))


if __name__ == "__main__":
    start(routing)
