"""Variants of `layer.py --kind mumoe`: ours, the textbook form.

Shapes: N tokens, D width, E experts, F inner width, I and O input and output width of one layer,
R rank, P and Q ring ranks before and after the experts' mode.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mumoe.config import FactorizationName, MuMoEConfig
from polyad.model.mumoe.factorizations import Factorized
from polyad.model.mumoe.gating import EPSILON, entmax15
from polyad.model.mumoe.layer import MuMoE
from polyad.train.errors import ConfigError
from tests.benchmarks.timed_layer import TimedLayer, context_of, start

FACTORIZATIONS: tuple[FactorizationName, ...] = ("cp", "tr")
INITIAL = 0.02
"""Standard deviation of weights that have no initializer."""


def package_entmax() -> Callable[[Tensor], Tensor] | None:
    """Entmax-1.5 of the `entmax` package over the last dimension; None where it is not."""
    if importlib.util.find_spec("entmax") is None:
        return None
    from entmax import entmax15 as theirs

    def activation(scores: Tensor) -> Tensor:
        result: Tensor = theirs(scores, dim=-1)
        return result

    # torch.compile cannot follow it.
    opaque: Callable[[Tensor], Tensor] = torch.compiler.disable(activation)  # type: ignore[no-untyped-call]
    return opaque


def config_of(factorization: FactorizationName, experts: int, shape: dict[str, int]) -> MuMoEConfig:
    """The layer whose parameters match the dense MLP's.

    Args:
        factorization: Its name.
        experts: E.
        shape: width and hidden.

    Raises:
        ConfigError: No rank is small enough.
    """
    config = MuMoEConfig(
        factorization=factorization, num_experts=(experts,), hidden_size=shape["hidden"]
    )
    try:
        return config.of_model(width=shape["width"], bias=True)
    except ValueError:
        dense = DenseFeedForwardConfig(hidden_size=shape["hidden"])
        raise ConfigError(
            f"--experts: {experts} is not allowed: no rank of {factorization} is as small as a "
            f"dense MLP of {dense.parameters(shape['width'], bias=True):,} parameters (--width "
            f"{shape['width']}, --hidden {shape['hidden']})"
        ) from None


def make_ours(config: MuMoEConfig, width: int, like: Tensor) -> MuMoE:
    """Our layer, with random gate weights in place of its initial zeros.

    Args:
        config: Its own.
        width: D.
        like: Of the weights' device and dtype.
    """
    module: MuMoE = start(MuMoE, config, context_of(width), like)
    _normal(module.gate.weight, seed=1)
    return module


def _normal(weight: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator) * INITIAL)


class Einsum(nn.Module):
    """Gate and both layers as the paper writes them: einsums of factors, and a one appended.

    Args:
        ours: Whose weights these are, copied.
        entmax: The activation of the gate.
    """

    def __init__(self, ours: MuMoE, entmax: Callable[[Tensor], Tensor] = entmax15) -> None:
        super().__init__()
        self.entmax = entmax
        self.gate = nn.Parameter(ours.gate.weight.detach().clone())
        self.factorization = ours.config.factorization
        self.up, self.down = _factors(ours.up), _factors(ours.down)

    def forward(self, tokens_ND: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        scores_NE = linear(tokens_ND, self.gate)
        scores_NE = scores_NE.to(torch.promote_types(scores_NE.dtype, torch.float32))
        scores_NE = layer_norm(scores_NE, scores_NE.shape[-1:], eps=EPSILON)
        a_NE = self.entmax(scores_NE).to(tokens_ND.dtype)
        layer = {"cp": _cp, "tr": _tr}[self.factorization]
        return layer(self.down, gelu(layer(self.up, tokens_ND, a_NE)), a_NE)


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


def timed(module: nn.Module) -> TimedLayer:
    """A peer as a variant."""
    return TimedLayer(module, lambda tokens_ND: module(tokens_ND))
