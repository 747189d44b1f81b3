"""Reads the decisions of routers from a model in evaluation, of all layers or of those asked for.

Training returns only means of them. Here hooks on the gates of a muMoE or of a mixture of networks,
and on the selection of sparse experts, yield the decisions of one forward pass, and what single
experts make of its tokens, whichever the router sent where.

Shapes: M tokens of a forward pass, or some of them, N experts of a level, S experts of all levels
side by side, K experts of a token, D width of an output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyad.model.emoe.layer import EmergentMoE
from polyad.model.feedforward import FeedForward
from polyad.model.mixture import Mixture, MixtureGate, Shares
from polyad.model.mumoe.gating import Gate
from polyad.model.mumoe.head import MuMoEHead
from polyad.model.mumoe.layer import MuMoE
from polyad.model.mxd.gate import SparseGate
from polyad.model.mxd.layer import SparseTable
from polyad.model.smoe.layer import Router, SelectingMoE
from polyad.model.smoe.selection import Selected, spread
from polyad.train.errors import ConfigError

MOST_LAYERS = 3
"""Whose experts are looked at, unless they are named: the first, the middle and the last."""
EVERY = "all"
"""In place of numbers of blocks."""
Outputs = Callable[[int, int, Tensor], Tensor]
"""From a level, the number of one of its experts, and rows [M], what it makes of them [M, D]."""


@dataclass(frozen=True, kw_only=True)
class RoutedLayer:
    """One feed-forward with experts."""

    name: str
    """The module's name, as in names of parameters: blocks.3.feed_forward, or head."""
    levels: tuple[int, ...]
    """Experts of each level; of sparse experts one level."""
    shares: bool = False
    """Whether a token gets a share of every expert, as in a muMoE, a mixture of networks or, with
    shares of 0 for most, a mixture of decoders."""

    @property
    def block(self) -> int:
        """The number of its block."""
        return int(next(part for part in self.name.split(".") if part.isdigit()))

    @property
    def in_block(self) -> bool:
        """Whether it is part of a block, and not of the head."""
        return any(part.isdigit() for part in self.name.split("."))

    @property
    def title(self) -> str:
        """The layer for people: block 3, and in a Mixer which of the block's two; or the head."""
        if not self.in_block:
            return self.name
        which = self.name.rsplit(".", 1)[-1].removesuffix("feed_forward").rstrip("_")
        return f"block {self.block}, {which}s" if which else f"block {self.block}"

    @property
    def num_experts(self) -> int:
        """The number of experts of all levels."""
        return sum(self.levels)

    def expert_name(self, column: int) -> str:
        """An expert as a user writes it: its number, or LEVEL.NUMBER where there are several."""
        level, number = self.place(column)
        return str(column) if len(self.levels) == 1 else f"{level}.{number}"

    def place(self, column: int) -> tuple[int, int]:
        """The level of an expert, and its number there."""
        level = 0
        while column >= self.levels[level]:
            column -= self.levels[level]
            level += 1
        return level, column

    def anchor(self, expert: str) -> str:
        """An expert in a link: b3e2, with levels b3l1e2; of the two layers of a Mixer's block
        b3-token-e2, of a head head-e2.

        Args:
            expert: its name.
        """
        level, _, number = expert.rpartition(".")
        if not self.in_block:
            place = f"{self.name.replace('.', '-')}-"
        else:
            which = self.name.rsplit(".", 1)[-1].removesuffix("feed_forward").rstrip("_")
            place = f"b{self.block}" + (f"-{which}-" if which else "")
        return f"{place}{f'l{level}' if level else ''}e{number}"


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """The layers with experts, in the order of the model.

    Args:
        model: of any kind.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            for part in module.children():
                if isinstance(part, Gate):
                    levels = tuple(part.norm.num_experts)
                    layers.append(RoutedLayer(name=name, levels=levels, shares=True))
                elif isinstance(part, SparseGate):
                    levels = (part.num_experts,)
                    layers.append(RoutedLayer(name=name, levels=levels, shares=True))
                elif isinstance(part, Router):
                    experts = part.selection.num_experts
                    layers.append(RoutedLayer(name=name, levels=(experts,)))
        elif isinstance(module, Mixture):
            levels = (module.config.num_experts,)
            layers.append(RoutedLayer(name=name, levels=levels, shares=True))
    return layers


def routed_head(model: nn.Module) -> RoutedLayer | None:
    """The last layer of a classifier, if it has experts.

    Args:
        model: of any kind.
    """
    for name, module in model.named_modules():
        if isinstance(module, MuMoEHead):
            levels = tuple(module.gate.norm.num_experts)
            return RoutedLayer(name=name, levels=levels, shares=True)
    return None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decisions of one layer for the tokens of a forward pass."""

    levels: list[Tensor]
    """[M, N] of each level: the coefficients of a muMoE, the shares of networks, the weights of a
    sparse gate, or the scores that top-K sees."""
    selected: Selected | None
    """The selected experts of a sparse mixture; None in others."""
    outputs: Outputs | None = None
    """What single experts make of the tokens."""

    def output(self, level: int, expert: int, rows_M: Tensor) -> Tensor:
        """What an expert makes of some of the tokens, wherever the router sent them.

        Args:
            level: of the layer.
            expert: its number in the level.
            rows_M: of the tokens.

        Returns:
            [M, D]; of a muMoE with the expert's coefficient at 1 and its level's others at 0.
        """
        assert self.outputs is not None
        return self.outputs(level, expert, rows_M)

    def probabilities(self) -> list[Tensor]:
        """The levels with rows that sum to 1, in float64, [M, N].

        Sigmoids do not, nor does what is left where an intervention took experts away: the score of
        one that cannot be chosen is -inf.
        """
        levels = [scores_MN.double().clamp_min(0) for scores_MN in self.levels]
        return [p_MN / p_MN.sum(-1, keepdim=True).clamp_min(1e-300) for p_MN in levels]

    def coefficients(self) -> Tensor:
        """How much of each expert every token gets, [M, S], in fp32.

        Of sparse experts the weight of the expert's output, 0 if it was not selected.
        """
        if self.selected is None:
            return torch.cat(self.levels, dim=-1).float()
        weights_MK = self.selected.weights_NK.float()
        a_MS = weights_MK.new_zeros(weights_MK.shape[0], self.levels[0].shape[-1])
        return a_MS.scatter(1, self.selected.expert_ids_NK, weights_MK)


@contextmanager
def deciding(model: nn.Module, layers: Sequence[RoutedLayer]) -> Iterator[dict[str, Decision]]:
    """Yields a dictionary that each forward pass fills: the decision of each layer, by its name.

    Inside the context compiled blocks run uncompiled, since compiled code ignores later hooks.

    Args:
        model: in evaluation mode, on any number of processes.
        layers: of the model.
    """
    seen: dict[str, Decision] = {}

    def hook(layer: RoutedLayer) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(module, SparseGate):
                weights_MN = spread(output, module.num_experts)
                seen[layer.name] = Decision(levels=[weights_MN], selected=None)
            elif isinstance(output, Selected):
                seen[layer.name] = Decision(levels=[arguments[0]], selected=output)
            elif isinstance(output, Shares):
                seen[layer.name] = Decision(levels=[output.log_p_BM.exp()], selected=None)
            else:
                seen[layer.name] = Decision(levels=output.coefficients, selected=None)

        return keep

    def keep_outputs(layer: RoutedLayer) -> Callable[[Outputs], None]:
        def keep(outputs: Outputs) -> None:
            seen[layer.name] = replace(seen[layer.name], outputs=outputs)

        return keep

    handles = [
        (part.selection if isinstance(part, Router) else part).register_forward_hook(hook(layer))
        for layer in layers
        for part in model.get_submodule(layer.name).children()
        if isinstance(part, Gate | SparseGate | Router | MixtureGate)
    ]
    handles += [
        watch_inputs(model.get_submodule(layer.name), keep_outputs(layer)) for layer in layers
    ]
    try:
        with uncompiled(model):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which compiled blocks run uncompiled: compiled code ignores later hooks.

    Args:
        model: of any kind.
    """
    # set_stance imports the compiler, which takes seconds, so it is called only if it is needed.
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def choose_layers(routed: list[RoutedLayer], blocks: Sequence[str]) -> list[RoutedLayer]:
    """The layers of blocks.

    Args:
        routed: all layers with experts.
        blocks: numbers of blocks, or `all`; none: the first, the middle and the last that routes.

    Raises:
        ConfigError: a block has no experts, or is not there.
    """
    if not blocks:
        if len(routed) <= MOST_LAYERS:
            return routed
        return [routed[0], routed[len(routed) // 2], routed[-1]]
    by_block: dict[str, list[RoutedLayer]] = {}
    for layer in routed:
        if not layer.in_block:  # a whole network of experts, or a head
            continue
        by_block.setdefault(str(layer.block), []).append(layer)
    if list(blocks) == [EVERY] and routed:
        return routed
    for block in blocks:
        if block not in by_block:
            known = f"blocks with experts are {', '.join(by_block)}"
            there = known if by_block else "no block of this run has experts"
            raise ConfigError(f"--layers: {block} is not allowed: {there}")
    return [layer for block, each in by_block.items() if block in blocks for layer in each]


def check_experts(layers: Sequence[RoutedLayer], experts: Sequence[str]) -> None:
    """Checks that every layer has the experts.

    Args:
        layers: that are looked at.
        experts: by name, in each of them; see `RoutedLayer.expert_name`.

    Raises:
        ConfigError: one does not.
    """
    if experts and not layers:
        raise ConfigError(f"--experts: {experts[0]} is not allowed: the run has no experts")
    for layer in layers:
        names = [layer.expert_name(column) for column in range(layer.num_experts)]
        for expert in experts:
            if expert not in names:
                form = " (LEVEL.EXPERT)" if len(layer.levels) > 1 else ""
                raise ConfigError(
                    f"--experts: {expert} is not allowed: {layer.title} has {names[0]} to "
                    f"{names[-1]}{form}"
                )


def columns_of(layer: RoutedLayer, experts: Sequence[str]) -> list[int]:
    """The columns of experts, in order.

    Args:
        layer: that has them.
        experts: by name; none: all.
    """
    every = range(layer.num_experts)
    return [column for column in every if not experts or layer.expert_name(column) in experts]


def watch_inputs(layer: nn.Module, seen: Callable[[Outputs], None]) -> RemovableHandle:
    """Hooks a layer with experts, in evaluation and whole on this process.

    Args:
        layer: of any kind that routes.
        seen: gets what gives outputs, after the layer's router in each forward pass.
    """
    read, outputs = _parts(layer)

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        seen(lambda level, expert, rows_M: outputs(arguments, level, expert, rows_M))

    return read.register_forward_hook(hook)


def _parts(layer: nn.Module) -> tuple[nn.Module, Callable[[Any, int, int, Tensor], Tensor]]:
    """The module that reads what experts do, and their outputs from its arguments."""
    # Parts are called by their `forward`, which runs no hooks again.
    if isinstance(layer, SelectingMoE):
        return layer.dispatcher, lambda read, level, expert, rows_M: _sparse(
            layer, read[0][rows_M], expert
        )
    if isinstance(layer, MuMoE):
        return layer.up, lambda read, level, expert, rows_M: _multilinear(
            layer, *_with_one(read, level, expert, rows_M)
        )
    if isinstance(layer, SparseTable):
        return layer.gate, lambda read, level, expert, rows_M: _scaled(
            layer, read[0][rows_M], expert
        )
    if isinstance(layer, MuMoEHead):
        return layer.layer, lambda read, level, expert, rows_M: layer.layer.forward(
            *_with_one(read, level, expert, rows_M)
        )
    assert isinstance(layer, Mixture)
    return layer, lambda read, level, expert, rows_M: _network(layer, read[0][rows_M], expert)


def _sparse(layer: SelectingMoE, tokens_MD: Tensor, expert: int) -> Tensor:
    """An expert's output with its own bias; the one bias of a split feed-forward is no expert's."""
    weights_M1 = tokens_MD.new_ones(len(tokens_MD), 1)
    ids_M1 = torch.full_like(weights_M1, expert, dtype=torch.int64)
    alone = Selected.of(weights_M1, ids_M1, layer.config.num_experts)
    y_MD = layer.dispatcher.forward(tokens_MD, alone, layer.experts).y_ND
    if layer.output_bias is None or isinstance(layer, EmergentMoE):
        return y_MD
    return layer.add_bias(y_MD, alone)


def _with_one(read: Any, level: int, expert: int, rows_M: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What factorized experts read where one has the whole coefficient; those of other levels
    stay."""
    coefficients = [a_NE[rows_M] for a_NE in read[1]]
    alone_ME = torch.zeros_like(coefficients[level])
    alone_ME[:, expert] = 1
    coefficients[level] = alone_ME
    return read[0][rows_M], coefficients


def _multilinear(layer: MuMoE, x_MD: Tensor, coefficients: list[Tensor]) -> Tensor:
    inner_MF = layer.up.forward(x_MD, coefficients)
    if layer.up_gate is not None:
        inner_MF = layer.combine(layer.up_gate.forward(x_MD, coefficients), inner_MF)
    return layer.down.forward(inner_MF, coefficients)


def _scaled(layer: SparseTable, x_MD: Tensor, expert: int) -> Tensor:
    """What one expert of weight 1 adds: its row, times what it scales, without the output bias."""
    row_D = layer.row(expert).to(x_MD.dtype)
    if layer.dense is None:
        return row_D.expand(len(x_MD), -1)
    y_1MD, _ = layer.dense.forward(x_MD.unsqueeze(0), x_MD.unsqueeze(0))
    return row_D * y_1MD.squeeze(0)


def _network(mixture: Mixture, images_MCHW: Tensor, expert: int) -> Tensor:
    """The probabilities that a network gives the classes, or the logits if those are mixed."""
    logits_MK: Tensor = mixture.experts[expert](images_MCHW).output_BO
    return logits_MK.softmax(-1) if mixture.config.gives_log_probabilities() else logits_MK
