"""`layer.py`: one layer of experts beside a dense MLP and peers, forward and backward.

Sparse (`--kind smoe`): a dense MLP of the same active width (K F), so of the same work, the loop
over experts that is our reference, and torchtitan's way; all of the same weights, without biases,
as the shipped configurations have them. With a gate (`--kind swiglu`): also DeepSpeed's AutoEP,
which has no other experts. Factorized (`--kind mumoe`): a dense MLP, ours (CP and tensor ring, of
as many parameters) and the same weights in textbook einsums with the `entmax` package.

On a GPU all is compiled, but for AutoEP, whose kernels are its own.

Shapes: N tokens, D width, E experts, K experts of a token, F inner width of one expert, I and O
input and output width of one factorized layer, R rank, P and Q ring ranks before and after the
experts' mode.
"""

import copy
import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from polyad.launch.command import Json, Positive, UsageError, results
from polyad.model.feedforward import DenseFeedForward, DenseFeedForwardConfig
from polyad.model.mumoe.config import FactorizationName, MuMoEConfig
from polyad.model.mumoe.factorizations import Factorized
from polyad.model.mumoe.gating import EPSILON
from polyad.model.mumoe.layer import MuMoE
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel.zero import DTYPES
from polyad.train.errors import ConfigError
from polyad.train.loop.profiling import allow_tf32
from tests.benchmarks.comparison import (
    Compile,
    Device,
    Numbers,
    PrecisionOption,
    Repeats,
    Threads,
    TimedLayer,
    benchmark,
    build,
    check,
    compare,
    of_ours,
    on_device,
    output_and_gradient,
    precisions,
    say,
    setting,
    start,
    table,
)
from tests.benchmarks.opponents import GroupedLayer, auto_ep
from tests.helpers.definitions import by_definition

LOADS = ("uniform", "skewed")
SKEW = 8.0
"""How far a token's score of the one expert is moved; the scores' standard deviation is 1."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "smoe": {"tokens": 4096, "experts": [16], "top_k": 2, "width": 256, "hidden": 1024},
    "mumoe": {"tokens": 1024, "experts": [64, 256, 2048], "top_k": 1, "width": 768, "hidden": 3072},
}


def make_tokens(number: int, width: int) -> Tensor:
    """Random tokens [N, D] in fp32."""
    return torch.randn(number, width, generator=torch.Generator().manual_seed(1))


def sparse_layers(
    shape: dict[str, Any], tokens_ND: Tensor, router_ED: Tensor
) -> dict[str, TimedLayer]:
    """The dense MLP, and the sparse layer in several forms, of the tokens' device and dtype.

    The router's product is in the precision of the shipped configurations: GPT-2's in fp32, that of
    OLMoE, whose experts have a gate, in the model's.
    """
    gated = shape["kind"] == "swiglu"
    config = SparseMoEConfig(
        num_experts=len(router_ED),
        top_k=shape["top_k"],
        expert_hidden_size=shape["hidden"],
        activation="swiglu" if gated else "gelu_tanh",
        router_dtype="model" if gated else "fp32",
    )
    ours: SparseMoE = build(SparseMoE, config, tokens_ND)
    with torch.no_grad():
        ours.router.score.get_parameter("weight").copy_(router_ED)
    dense = DenseFeedForwardConfig(hidden_size=shape["top_k"] * shape["hidden"])
    layers = {
        "dense": of_ours(build(DenseFeedForward, dense, tokens_ND, config.activation)),
        "polyad": of_ours(ours),
        "loop": by_loop(copy.deepcopy(ours)),
        "grouped_mm": TimedLayer(peer := GroupedLayer(ours), peer),
    }
    if gated:
        layers["autoep"] = of_auto_ep(ours)
        if tokens_ND.is_cuda:
            stack_gate(ours)
    return layers


def by_loop(module: SparseMoE) -> TimedLayer:
    """The reference: the same layer by the definition of every operation."""
    layer = of_ours(module)

    def call(tokens_ND: Tensor) -> Tensor:
        with by_definition():
            return layer.call(tokens_ND)

    return TimedLayer(module, call)


def of_auto_ep(ours: SparseMoE) -> TimedLayer:
    """DeepSpeed's layer as an engine runs it, which does not compile it."""
    module = auto_ep(ours)
    call = torch.compiler.disable(lambda tokens_ND: module(tokens_ND.unsqueeze(0)).squeeze(0))
    return TimedLayer(module, call)


def stack_gate(layer: SparseMoE) -> None:
    """Makes the gate and the first layer of the experts one parameter, as training on a GPU has."""
    experts = layer.experts
    experts.up = nn.Parameter(torch.stack([experts.gate.detach(), experts.up.detach()], 2))
    experts.gate = None


def compare_sparse(
    shape: dict[str, Any], num_experts: int, precision: str, load: str, compiled: bool, repeats: int
) -> dict[str, Any]:
    """The rows of one number of experts and one load, which `skewed` sends half of to one expert.

    Returns:
        `variants`: rows; `busiest`: the largest expert's share of rows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # scores of normal tokens are independent, if E is not above D
        router_ED = nn.init.orthogonal_(torch.empty(num_experts, shape["width"]))
    tokens_ND = make_tokens(shape["tokens"], shape["width"])
    if load == "skewed":
        tokens_ND[0::2] += SKEW * router_ED[0]
        tokens_ND[1::2] -= SKEW * router_ED[0]
    tokens_ND = tokens_ND.to(shape["device"], DTYPES[precision]).requires_grad_()
    layers = sparse_layers(shape, tokens_ND, router_ED)
    reference = output_and_gradient(layers["loop"], tokens_ND)
    for name in layers.keys() - {"dense", "loop"}:
        check(name, output_and_gradient(layers[name], tokens_ND), reference, precision)
    if compiled:
        del layers["loop"]  # one graph an expert: minutes, to time what nobody would use
    module = layers["polyad"].module
    with torch.no_grad():
        ids_NK = module.router(tokens_ND.unsqueeze(0))[0].expert_ids_NK
    rows_E = ids_NK.flatten().bincount(minlength=num_experts)
    gradient_ND = make_tokens(*tokens_ND.shape).to(tokens_ND)
    rows = compare(layers, tokens_ND, gradient_ND, repeats, "dense", compiled=compiled)
    return {"variants": rows, "busiest": (rows_E.max() / rows_E.sum()).item()}


class Einsum(nn.Module):
    """Gate and both layers as the paper writes them: einsums of factors, and a one appended.

    Args:
        ours: Whose weights these are, copied.
    """

    def __init__(self, ours: MuMoE) -> None:
        super().__init__()
        self.gate = nn.Parameter(ours.gate.weight.detach().clone())
        self.factorization = ours.config.factorization
        self.up, self.down = _factors(ours.up), _factors(ours.down)

    def forward(self, tokens_ND: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        scores_NE = linear(tokens_ND, self.gate)
        scores_NE = scores_NE.to(torch.promote_types(scores_NE.dtype, torch.float32))
        scores_NE = layer_norm(scores_NE, scores_NE.shape[-1:], eps=EPSILON)
        a_NE = entmax(scores_NE).to(tokens_ND.dtype)
        layer = {"cp": _cp, "tr": _tr}[self.factorization]
        return layer(self.down, gelu(layer(self.up, tokens_ND, a_NE)), a_NE)


@torch.compiler.disable  # type: ignore[no-untyped-call, untyped-decorator]  # it cannot follow it
def entmax(scores: Tensor) -> Tensor:
    """Entmax-1.5 of the `entmax` package over the last dimension."""
    from entmax import entmax15

    result: Tensor = entmax15(scores, dim=-1)
    return result


def _factors(layer: Factorized) -> nn.ParameterList:
    """The factors of experts, input and output with their modes in the paper's order."""
    factors = (layer.expert_factors()[0], layer.input_factor, layer.output_factor)
    modes: tuple[tuple[int, ...], ...]
    if layer.input_factor.dim() == 2:  # CP: [R, E], [R, I + 1], [R, O]
        modes = ((1, 0), (1, 0), (0, 1))
    else:  # ring: [P, E, Q], [Q, I + 1, R], [R, O, P]
        modes = ((1, 0, 2), (1, 0, 2), (1, 2, 0))
    return nn.ParameterList(
        factor.detach().permute(order).contiguous()
        for factor, order in zip(factors, modes, strict=True)
    )


def _with_one(z_NI: Tensor) -> Tensor:
    return torch.cat([z_NI, torch.ones_like(z_NI[:, :1])], dim=1)


def _cp(factors: nn.ParameterList, z_NI: Tensor, a_NE: Tensor) -> Tensor:
    experts_RE, input_RI, output_RO = factors
    mixed_NR = torch.einsum("ne,re->nr", a_NE, experts_RE)
    inner_NR = torch.einsum("ni,ri->nr", _with_one(z_NI), input_RI)
    return torch.einsum("nr,ro->no", mixed_NR * inner_NR, output_RO)


def _tr(factors: nn.ParameterList, z_NI: Tensor, a_NE: Tensor) -> Tensor:
    experts_PEQ, input_QIR, output_ROP = factors
    mixed_NPQ = torch.einsum("ne,peq->npq", a_NE, experts_PEQ)
    inner_NQR = torch.einsum("ni,qir->nqr", _with_one(z_NI), input_QIR)
    joined_NPR = torch.einsum("npq,nqr->npr", mixed_NPQ, inner_NQR)
    return torch.einsum("npr,rop->no", joined_NPR, output_ROP)


def compare_factorized(
    shape: dict[str, Any], num_experts: int, precision: str, compiled: bool, repeats: int
) -> dict[str, Any]:
    """The rows of one number of experts."""
    tokens_ND = make_tokens(shape["tokens"], shape["width"])
    tokens_ND = tokens_ND.to(shape["device"], DTYPES[precision]).requires_grad_()
    dense = DenseFeedForwardConfig(hidden_size=shape["hidden"])
    layers = {"dense": of_ours(build(DenseFeedForward, dense, tokens_ND))}
    factorizations: tuple[FactorizationName, ...] = ("cp", "tr")
    for name in factorizations:
        config = factorized(name, num_experts, shape)
        ours: MuMoE = build(MuMoE, config, tokens_ND)
        with torch.no_grad():  # in place of its initial zeros
            generator = torch.Generator().manual_seed(1)
            weight = torch.randn(ours.gate.weight.shape, generator=generator) * 0.02
            ours.gate.weight.copy_(weight)
        reference = output_and_gradient(Einsum(ours).double(), tokens_ND.double())
        layers[f"polyad {name}"] = of_ours(ours)
        layers[f"einsum {name}"] = TimedLayer(peer := Einsum(ours), peer)
        for kind in ("polyad", "einsum"):
            tensors = output_and_gradient(layers[f"{kind} {name}"], tokens_ND)
            check(f"{kind} {name}", tensors, reference, precision)
    gradient_ND = make_tokens(*tokens_ND.shape).to(tokens_ND)
    rows = compare(layers, tokens_ND, gradient_ND, repeats, "dense", compiled=compiled)
    return {"variants": rows}


def factorized(name: FactorizationName, num_experts: int, shape: dict[str, Any]) -> MuMoEConfig:
    """The layer whose parameters match the dense MLP's.

    Raises:
        ConfigError: No rank is small enough.
    """
    config = MuMoEConfig(
        factorization=name, num_experts=(num_experts,), hidden_size=shape["hidden"]
    )
    try:
        return config.of_model(width=shape["width"], bias=False)
    except ValueError:
        raise ConfigError(
            f"--experts: {num_experts} is not allowed: no rank of {name} is as small as the dense "
            f"MLP (--width {shape['width']}, --hidden {shape['hidden']})"
        ) from None


@benchmark("layer", "--precision bf16 --json layer.json", "--kind mumoe --experts 256 --threads 1")
def layer(
    *,
    kind: Literal["smoe", "swiglu", "mumoe"] = "smoe",
    tokens: Positive | None = None,
    experts: Numbers | None = None,
    top_k: Positive | None = None,
    width: Positive | None = None,
    hidden: Positive | None = None,
    precision: PrecisionOption = None,
    load: Literal["uniform", "skewed"] | None = None,
    repeats: Repeats = 7,
    threads: Threads = None,
    device: Device = "cpu",
    compile: Compile = False,
    json: Json = None,
) -> None:
    """Times a layer of experts, sparse or factorized, beside a dense MLP and peers.

    Args:
        kind: default smoe.
        tokens: of a forward pass; default 4096; mumoe 1024.
        experts (E): numbers of experts, one after the other; default 16; mumoe 64 256 2048.
        top_k (K): sparse: experts of a token; default 2.
        width (D): width of a token; default 256; mumoe 768.
        hidden (F): inner width of one expert; default 1024; of mumoe's experts together, and of
            their dense MLP, 3072.
        load: sparse: skewed sends half of the tokens to one expert; default: both.
    """
    if kind == "mumoe" and (top_k or load):
        raise UsageError(f"--{'top-k' if top_k else 'load'}: is of sparse kinds, this is mumoe")
    options = {"tokens": tokens, "experts": experts, "top_k": top_k, "width": width}
    options |= {"hidden": hidden}
    shape = DEFAULTS["mumoe" if kind == "mumoe" else "smoe"] | {"kind": kind}
    shape |= {name: value for name, value in options.items() if value is not None}
    shape["device"] = device
    compile |= device == "cuda"
    if shape["top_k"] > min(shape["experts"]):
        raise ConfigError(f"--top-k: {shape['top_k']} is more than --experts: {shape['experts']}")
    loads = ((load,) if load else LOADS) if kind != "mumoe" else (None,)
    with on_device(device, threads) as about, results(json) as show:
        allow_tf32(precision == "bf16", torch.device(device))  # for routers of peers
        result = {**shape, "repeats": repeats, **about, "precisions": {}}
        lines = [f"{shape['tokens']} tokens, {shape['width']}-{shape['hidden']}; {setting(result)}"]
        for each in precisions(precision):
            rows = result["precisions"][each] = {}
            for number, chosen in itertools.product(shape["experts"], loads):
                name = f"{number} experts" + (f", {chosen}" if chosen else "")
                say(f"{each}, {name}")
                if chosen is None:
                    rows[name] = compare_factorized(shape, number, each, compile, repeats)
                else:
                    rows[name] = compare_sparse(shape, number, each, chosen, compile, repeats)
                lines += ["", f"{each}, {name}", table(rows[name]["variants"], "dense")]
                if chosen:
                    lines += [f"the busiest expert has {rows[name]['busiest']:.0%} of rows"]
        show(result, "\n".join(lines))


if __name__ == "__main__":
    start(layer)
