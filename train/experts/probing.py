"""Reads routing decisions of all or some layers from a model in evaluation.

In training only their means are returned. Here hooks on the gates of a muMoE or a mixture of
networks, and on the selection of sparse experts, yield the decisions of one forward pass, and the
outputs of single experts on its tokens, wherever the router sent them.

Shapes: M tokens of a forward pass, or some of them, N experts of a level, S experts of all levels
side by side, K experts of a token, D width of an output.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.emoe import EmergentMoE
from polyad.model.mixture import Mixture, MixtureGate, Shares
from polyad.model.mumoe.gating import Gate
from polyad.model.mumoe.layer import MuMoE, MuMoEHead
from polyad.model.mxd import SparseGate, SparseTable
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.smoe.router import Router, Selected, spread
from polyad.train.errors import ConfigError

MOST_LAYERS = 3
"""The default blocks: the first, the middle and the last."""
EVERY = "all"
"""All blocks, in place of block numbers."""
Outputs = Callable[[int, int, Tensor], Tensor]
"""Maps a level, the number of one of its experts, and rows [M] to its outputs [M, D]."""


@dataclass(frozen=True, kw_only=True)
class RoutedLayer:
    """One feed-forward with experts."""

    name: str
    """The module's name, as in parameter names: blocks.3.feed_forward, or head."""
    levels: tuple[int, ...]
    """Number of experts per level; sparse experts have one level."""
    shares: bool = False
    """Whether tokens weight every expert, as in a muMoE, a mixture of networks or, mostly with
    weight 0, a mixture of decoders."""

    @property
    def block(self) -> int:
        """Its block's number."""
        return int(next(filter(str.isdigit, self.name.split("."))))

    @property
    def in_block(self) -> bool:
        """Whether it is part of a block, not of the head."""
        return any(map(str.isdigit, self.name.split(".")))

    @property
    def title(self) -> str:
        """The layer's title: block 3, in a Mixer also which of the block's two layers; or the
        head."""
        if not self.in_block:
            return self.name
        which = self.name.rsplit(".", 1)[-1].removesuffix("feed_forward").rstrip("_")
        return f"block {self.block}, {which}s" if which else f"block {self.block}"

    @property
    def num_experts(self) -> int:
        """The number of experts over all levels."""
        return sum(self.levels)

    @functools.cached_property
    def columns(self) -> list[slice]:
        """The columns of each level's experts, of all levels side by side."""
        ends = list(itertools.accumulate(self.levels, initial=0))
        return [slice(*each) for each in itertools.pairwise(ends)]

    def expert_name(self, column: int) -> str:
        """An expert's name on the command line: its number, or LEVEL.NUMBER with several levels."""
        level, number = self.place(column)
        return str(column) if len(self.levels) == 1 else f"{level}.{number}"

    def place(self, column: int) -> tuple[int, int]:
        """An expert's level, and its number in it."""
        level = next(level for level, own in enumerate(self.columns) if column < own.stop)
        return level, column - self.columns[level].start

    def named(self, column: int) -> dict[str, Any]:
        """The columns of a table that name an expert."""
        level, expert = self.place(column)
        return {"module": self.name, "level": level, "expert": expert}


def every_layer(model: nn.Module) -> list[RoutedLayer]:
    """Returns all layers with experts, in the model's order, with the head of a classifier.

    Args:
        model: any model.
    """
    layers = []
    for name, module in model.named_modules():
        for part in module.children():
            if isinstance(part, Router):
                levels: tuple[int, ...] = (part.selection.num_experts,)
            elif isinstance(part, Gate):
                levels = tuple(part.norm.num_experts)
            elif isinstance(part, SparseGate):
                levels = (part.num_experts,)
            elif isinstance(module, Mixture) and part is module.gate:
                levels = (module.config.num_experts,)
            else:
                continue
            shares = not isinstance(part, Router)
            layers.append(RoutedLayer(name=name, levels=levels, shares=shares))
    return layers


def routed_head(model: nn.Module) -> RoutedLayer | None:
    """Returns the last layer of a classifier, if it has experts.

    Args:
        model: any model.
    """
    for layer in every_layer(model):
        if isinstance(model.get_submodule(layer.name), MuMoEHead):
            return layer
    return None


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """Returns the layers with experts other than a head.

    Args:
        model: any model.
    """
    head = routed_head(model)
    return [layer for layer in every_layer(model) if layer != head]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decisions of one layer for the tokens of a forward pass."""

    levels: list[Tensor]
    """[M, N] for each level: coefficients of a muMoE, shares of networks, weights of a sparse gate,
    or scores before top-K."""
    selected: Selected | None
    """The selected experts of a sparse mixture; None for others."""
    outputs: Outputs | None = None
    """Outputs of single experts on the tokens."""

    def output(self, level: int, expert: int, rows_M: Tensor) -> Tensor:
        """Returns an expert's output on some tokens, wherever the router sent them.

        Args:
            level: the level's number.
            expert: the expert's number in the level.
            rows_M: indices of the tokens.

        Returns:
            [M, D]; for a muMoE with the expert's coefficient at 1 and others of its level at 0.
        """
        assert self.outputs is not None
        return self.outputs(level, expert, rows_M)

    def of(self, rows_M: Tensor) -> "Decision":
        """Returns the decisions for some of the tokens.

        Args:
            rows_M: their indices.
        """
        outputs, selected = self.outputs, self.selected
        if selected is not None:
            some = (selected.weights_NK[rows_M], selected.expert_ids_NK[rows_M])
            selected = Selected.of(*some, len(selected.counts_E))
        return Decision(
            levels=[scores_MN[rows_M] for scores_MN in self.levels],
            selected=selected,
            outputs=outputs and (lambda level, expert, at: outputs(level, expert, rows_M[at])),
        )

    def probabilities(self) -> list[Tensor]:
        """The levels, normalized so that rows sum to 1, in float64 [M, N].

        Sigmoids do not sum to 1, nor do scores after an intervention that removes experts: the
        score of an expert that cannot be chosen is -inf.
        """
        levels = [scores_MN.double().clamp_min(0) for scores_MN in self.levels]
        return [p_MN / p_MN.sum(-1, keepdim=True).clamp_min(1e-300) for p_MN in levels]

    def coefficients(self) -> Tensor:
        """The weight of each expert for every token [M, S], in fp32.

        For sparse experts the weight of the expert's output, 0 if it was not selected.
        """
        if self.selected is None:
            return torch.cat(self.levels, dim=-1).float()
        weights_MK = self.selected.weights_NK.float()
        a_MS = weights_MK.new_zeros(weights_MK.shape[0], self.levels[0].shape[-1])
        return a_MS.scatter(1, self.selected.expert_ids_NK, weights_MK)

    def by_row(self, rows: int) -> Tensor:
        """The same for each of a number of texts or images with equally many tokens [B, T, S]."""
        a_MS = self.coefficients()
        return a_MS.view(rows, -1, a_MS.shape[-1])


@contextmanager
def deciding(model: nn.Module, layers: Sequence[RoutedLayer]) -> Iterator[dict[str, Decision]]:
    """Yields a dictionary that each forward pass fills with each layer's decision, by layer name.

    Inside the context compiled blocks run uncompiled, since compiled code ignores later hooks.

    Args:
        model: in evaluation mode, on any number of processes.
        layers: the model's layers to read.
    """
    seen: dict[str, Decision] = {}

    def keep(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        selected = None
        if isinstance(module, SparseGate):
            levels = [spread(output, module.num_experts)]
        elif isinstance(output, Selected):
            levels, selected = [arguments[0]], output
        elif isinstance(output, Shares):
            levels = [output.log_p_BM.exp()]
        else:
            levels = output.coefficients
        seen[name] = Decision(levels=levels, selected=selected)

    def keep_outputs(
        name: str, outputs: Callable[..., Tensor], module: nn.Module, arguments: Any, output: Any
    ) -> None:
        seen[name] = replace(seen[name], outputs=functools.partial(outputs, arguments))

    with ExitStack() as hooks:
        for layer in layers:
            module = model.get_submodule(layer.name)
            for part in module.children():
                if isinstance(part, Gate | SparseGate | Router | MixtureGate):
                    gate = part.selection if isinstance(part, Router) else part
                    hook = functools.partial(keep, layer.name)
                    hooks.enter_context(gate.register_forward_hook(hook))
            inside, outputs = _parts(module)
            hook = functools.partial(keep_outputs, layer.name, outputs)
            hooks.enter_context(inside.register_forward_hook(hook))
        hooks.enter_context(uncompiled(model))
        yield seen


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which compiled blocks run uncompiled, since compiled code ignores later hooks.

    Args:
        model: any model.
    """
    # set_stance imports the compiler, which takes seconds, so it is called only if it is needed.
    compiled = any(part._compiled_call_impl is not None for part in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def choose_layers(routed: list[RoutedLayer], blocks: Sequence[str]) -> list[RoutedLayer]:
    """Returns the layers of blocks.

    Args:
        routed: all layers with experts.
        blocks: block numbers, or `all`; empty: the first, middle and last block that routes.

    Raises:
        ConfigError: a block has no experts, or does not exist.
    """
    if not blocks:
        if len(routed) <= MOST_LAYERS:
            return routed
        return [routed[0], routed[len(routed) // 2], routed[-1]]
    if list(blocks) == [EVERY] and routed:
        return routed
    in_blocks = [layer for layer in routed if layer.in_block]  # no whole networks, and no head
    allowed = dict.fromkeys(str(layer.block) for layer in in_blocks)
    for block in blocks:
        if block not in allowed:
            names = f"blocks with experts are {', '.join(allowed)}"
            there = names if allowed else "no block of this run has experts"
            raise ConfigError(f"--layers: {block} is not allowed: {there}")
    return [layer for layer in in_blocks if str(layer.block) in blocks]


def check_experts(layers: Sequence[RoutedLayer], experts: Sequence[str]) -> None:
    """Checks that every layer has the experts.

    Args:
        layers: the layers.
        experts: names of experts in each of them; see `RoutedLayer.expert_name`.

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
    """Returns the columns of experts, in order.

    Args:
        layer: their layer.
        experts: names of experts; empty: all.
    """
    every = range(layer.num_experts)
    return [column for column in every if not experts or layer.expert_name(column) in experts]


def _parts(layer: nn.Module) -> tuple[nn.Module, Callable[..., Tensor]]:
    """The module with the experts' inputs, and a function from its arguments, a level, an expert
    and rows to the expert's outputs."""
    # Parts are called through `forward`, which does not run hooks again.
    if isinstance(layer, SelectingMoE):
        return layer.dispatcher, functools.partial(_sparse, layer)
    if isinstance(layer, MuMoE):
        return layer.up, functools.partial(_multilinear, layer)
    if isinstance(layer, SparseTable):
        return layer.gate, functools.partial(_scaled, layer)
    if isinstance(layer, MuMoEHead):
        return layer.layer, functools.partial(_of_head, layer)
    assert isinstance(layer, Mixture)
    return layer, functools.partial(_network, layer)


def _sparse(layer: SelectingMoE, read: Any, level: int, expert: int, rows_M: Tensor) -> Tensor:
    """An expert's output with its own bias; a split feed-forward's single bias belongs to none."""
    tokens_MD = read[0][rows_M]
    weights_M1 = tokens_MD.new_ones(len(tokens_MD), 1)
    ids_M1 = torch.full_like(weights_M1, expert, dtype=torch.int64)
    alone = Selected.of(weights_M1, ids_M1, layer.config.num_experts)
    y_MD, _ = layer.dispatcher.forward(tokens_MD, alone, layer.experts)
    if layer.output_bias is None or isinstance(layer, EmergentMoE):
        return y_MD
    return layer.add_bias(y_MD, alone)


def _with_one(read: Any, level: int, expert: int, rows_M: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Inputs of factorized experts with one coefficient set to 1; other levels are unchanged."""
    coefficients = [a_NE[rows_M] for a_NE in read[1]]
    alone_ME = torch.zeros_like(coefficients[level])
    alone_ME[:, expert] = 1
    coefficients[level] = alone_ME
    return read[0][rows_M], coefficients


def _multilinear(layer: MuMoE, *place: Any) -> Tensor:
    x_MD, coefficients = _with_one(*place)
    inner_MF = layer.up.forward(x_MD, coefficients)
    if layer.up_gate is not None:
        inner_MF = layer.combine(layer.up_gate.forward(x_MD, coefficients), inner_MF)
    return layer.down.forward(inner_MF, coefficients)


def _of_head(head: MuMoEHead, *place: Any) -> Tensor:
    return head.layer.forward(*_with_one(*place))


def _scaled(layer: SparseTable, read: Any, level: int, expert: int, rows_M: Tensor) -> Tensor:
    """The contribution of one expert of weight 1: its row, times what it scales, without the
    bias."""
    x_MD = read[0][rows_M]
    row_D = layer.row(expert).to(x_MD.dtype)
    if layer.dense is None:
        return row_D.expand(len(x_MD), -1)
    y_1MD, _ = layer.dense.forward(x_MD.unsqueeze(0), x_MD.unsqueeze(0))
    return row_D * y_1MD.squeeze(0)


def _network(mixture: Mixture, read: Any, level: int, expert: int, rows_M: Tensor) -> Tensor:
    """A network's class probabilities, or its logits if those are mixed."""
    logits_MK: Tensor = mixture.experts[expert](read[0][rows_M])[1]
    return logits_MK.softmax(-1)
