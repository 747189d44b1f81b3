"""The experts of every token of one text, as tensors, as rows, and as a table.

Shapes: T tokens of the text, S experts of a layer (of all its levels, side by side), K of them that
a token is shown with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers
from polyad.train.results import aligned


class ExpertRow(NamedTuple):
    """One expert of one token in one layer."""

    position: int
    """The place of the token in the text, from 0."""
    token: str
    layer: str
    """The name of the layer's module."""
    expert: str
    """Its number, or LEVEL.NUMBER where there are several levels."""
    weight: float
    """The weight of the expert's output: see `LayerExperts.weights`."""
    score: float
    """What the choice was made by: see `LayerExperts.scores`."""


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """The experts of every token in one layer; all tensors are on the CPU."""

    layer: RoutedLayer
    experts: Tensor
    """[T, K] int64. The experts that the router selected, the highest score first; of a muMoE those
    with the largest coefficients, as many of each level, numbered over the levels side by side."""
    weights: Tensor
    """[T, K] fp32. The weight of the expert's output; of a muMoE its coefficient."""
    scores: Tensor
    """[T, S] fp32. The scores of all experts that top-K saw, after a graph if there is one, each
    row summing to 1; of a muMoE the coefficients, each level summing to 1."""


@dataclass(frozen=True, kw_only=True)
class TextExperts:
    """The experts of every token of a text."""

    tokens: list[str]
    """The text of each token."""
    token_ids: Tensor
    """[T] int64."""
    layers: dict[str, LayerExperts]
    """The layers with experts, by the name of their module, in the order of the model."""

    def rows(self) -> list[ExpertRow]:
        """Lists every expert of every token, as `pandas.DataFrame` takes it."""
        return [
            ExpertRow(
                position=position,
                token=token,
                layer=name,
                expert=each.layer.expert_name(expert),
                weight=float(each.weights[position, k]),
                score=float(each.scores[position, expert]),
            )
            for name, each in self.layers.items()
            for position, token in enumerate(self.tokens)
            for k, expert in enumerate(each.experts[position].tolist())
        ]

    def __str__(self) -> str:
        """A table for people: a line for each token, a column for each layer."""
        columns = [["", *(repr(token)[1:-1] for token in self.tokens)]]
        for each in self.layers.values():
            cells = [
                ", ".join(
                    f"{each.layer.expert_name(expert)} {weight:.2f}"
                    for expert, weight in zip(experts, weights, strict=True)
                )
                for experts, weights in zip(
                    each.experts.tolist(), each.weights.tolist(), strict=True
                )
            ]
            columns.append([each.layer.title, *cells])
        return "\n".join(aligned(zip(*columns, strict=True), "<"))


def experts_of(
    model: nn.Module, token_ids: Sequence[int], tokens: Sequence[str], top: int
) -> TextExperts:
    """Reads a text and keeps what the routers decide.

    Args:
        model: a GPT-2 or BERT in evaluation mode, whole on one device.
        token_ids: of the text, at most as many as the model reads.
        tokens: the text of each.
        top: experts of a token that are shown of each level of a muMoE.
    """
    layers = [layer for layer in routed_layers(model) if layer.in_block]
    input_ids_1T = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    with deciding(model, layers) as decisions, torch.inference_mode():
        model(input_ids_1T)
    return TextExperts(
        tokens=list(tokens),
        token_ids=input_ids_1T[0].cpu(),
        layers={layer.name: _of_layer(layer, decisions[layer.name], top) for layer in layers},
    )


def _of_layer(layer: RoutedLayer, decision: Decision, top: int) -> LayerExperts:
    scores_TS = torch.cat(decision.levels, dim=-1).float().cpu()
    if decision.selected is not None:
        experts_TK = decision.selected.expert_ids_NK.cpu()
        weights_TK = decision.selected.weights_NK.float().cpu()
        return LayerExperts(layer=layer, experts=experts_TK, weights=weights_TK, scores=scores_TS)
    chosen, first = [], 0
    for level_TN in torch.split(scores_TS, list(layer.levels), dim=-1):
        chosen.append(level_TN.topk(min(top, level_TN.shape[-1]), dim=-1).indices + first)
        first += level_TN.shape[-1]
    experts_TK = torch.cat(chosen, dim=-1)
    return LayerExperts(
        layer=layer,
        experts=experts_TK,
        weights=scores_TS.gather(1, experts_TK),
        scores=scores_TS,
    )
