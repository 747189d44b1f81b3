"""The experts of every token as a table: a row for each token, layer and chosen expert.

Columns of integers have -1 for missing values, since pandas would turn nulls into floats.

Shapes: N tokens, M of them in a table, K experts written per token (all levels side by side), S
experts of a layer (all levels side by side).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.output import ModelOutput, entropy
from polyad.parallel.weights import device_of
from polyad.train.errors import ConfigError
from polyad.train.experts.information import not_finite
from polyad.train.experts.probing import Decision, RoutedLayer, deciding, routed_layers

FORMAT = "polyad trace 1"
"""`format` in a file's metadata."""
METADATA = b"polyad"
"""The key of a file's metadata, whose value is JSON."""
TOP = 4
"""Number of experts written per token and level, if tokens weight all experts."""
EXTRA = ("score", "entropy", "norm", "loss")
"""Optional columns."""
COLUMNS: Mapping[str, str] = {
    "window": "int32",
    "image": "int32",
    "file": "str",
    "position": "int32",
    "document": "int32",
    "choice": "int32",
    "offset": "int32",
    "token_id": "int32",
    "layer": "int16",
    "module": "str",
    "level": "int16",
    "slot": "int16",
    "expert": "int32",
    "weight": "float32",
    "score": "float32",
    "entropy": "float32",
    "norm": "float32",
    "loss": "float32",
}
"""Types of all columns, in their order; `docs/experts/python.md` explains them."""


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """The experts of every token in one layer; all tensors are on the CPU."""

    layer: RoutedLayer
    experts: Tensor
    """[N, K] int64. The experts that the router selected, the highest score first; for a muMoE
    those with the largest coefficients, equally many per level, numbered over all levels side by
    side."""
    weights: Tensor
    """[N, K] fp32. The weight of the expert's output; for a muMoE its coefficient."""
    scores: Tensor
    """[N, S] fp32. The scores of all experts before top-K, after a graph if there is one; rows sum
    to 1 unless they are sigmoids. For a muMoE the coefficients; each level sums to 1."""


def experts_of(layer: RoutedLayer, decision: Decision, top: int) -> LayerExperts:
    """Returns the experts of the tokens of a layer.

    Args:
        layer: the layer.
        decision: its decision in a forward pass.
        top: number of experts per level, if tokens weight every expert.
    """
    scores_NS = torch.cat(decision.levels, dim=-1).float().cpu()
    if decision.selected is not None:
        experts_NK = decision.selected.expert_ids_NK.cpu()
        weights_NK = decision.selected.weights_NK.float().cpu()
    else:
        chosen = [
            scores_NS[:, own].topk(min(top, own.stop - own.start), dim=-1).indices + own.start
            for own in layer.columns
        ]
        experts_NK = torch.cat(chosen, dim=-1)
        weights_NK = scores_NS.gather(1, experts_NK)
    return LayerExperts(layer=layer, experts=experts_NK, weights=weights_NK, scores=scores_NS)


@torch.inference_mode()
def read_experts(
    model: nn.Module, token_ids: Sequence[int], top: int
) -> tuple[dict[str, LayerExperts], ModelOutput]:
    """Reads a text; returns the experts by layer name, in the model's order, and the output.

    Args:
        model: in evaluation mode, whole on one device.
        token_ids: at most as many tokens as it reads.
        top: number of experts per level, if tokens weight every expert.
    """
    layers = [layer for layer in routed_layers(model) if layer.in_block]
    input_ids_1T = torch.tensor([list(token_ids)], device=device_of(model))
    with deciding(model, layers) as decisions:
        output = model(input_ids_1T)
    experts = {layer.name: experts_of(layer, decisions[layer.name], top) for layer in layers}
    return experts, output


def norms(decision: Decision, experts: LayerExperts, row_M: Tensor) -> Tensor:
    """Returns the L2 norms of the experts' outputs [N, K], on the CPU.

    Args:
        decision: the decision of a forward pass.
        experts: the experts of its N tokens.
        row_M: the tokens to use, on the CPU; the norms of others are 0.
    """
    norm_NK = torch.zeros_like(experts.weights)
    experts_MK, layer = experts.experts[row_M], experts.layer
    for column in range(layer.num_experts):
        at_M, slot_M = (experts_MK == column).nonzero(as_tuple=True)
        if len(at_M):
            rows = row_M[at_M]
            on_device = rows.to(decision.levels[0].device)
            y_MD = decision.output(*layer.place(column), on_device)
            norm_NK[rows, slot_M] = y_MD.float().norm(dim=-1).cpu()
    return norm_NK


def trace_columns(
    layers: Sequence[RoutedLayer], of_tokens: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """Names the columns of a trace, in order.

    Args:
        layers: the layers to write.
        of_tokens: names of the columns of a token that all layers share.
        extra: columns from `EXTRA`.
    """
    names = {*of_tokens, "layer", "module", "slot", "expert", "weight", *extra}
    if any(len(layer.levels) > 1 for layer in layers):
        names.add("level")
    return [name for name in COLUMNS if name in names]


def trace_schema(
    layers: Sequence[RoutedLayer], columns: Sequence[str], about: Mapping[str, Any]
) -> Any:
    """Returns the schema of a file (`pyarrow.Schema`).

    Args:
        layers: the layers to write.
        columns: names of the columns.
        about: metadata beside the layers; JSON values.
    """
    import pyarrow as pa

    numbers = {
        layer.name: {"layer": _block(layer), "experts": list(layer.levels)} for layer in layers
    }
    types = {"str": pa.dictionary(pa.int32(), pa.string())}
    fields = [
        pa.field(name, types.get(COLUMNS[name], COLUMNS[name]), nullable=name == "loss")
        for name in columns
    ]
    shares = any(layer.shares for layer in layers)
    metadata = {"format": FORMAT, **about, "shares": shares, "layers": numbers}
    return pa.schema(fields, {METADATA: json.dumps(metadata).encode()})


def trace_rows(
    experts: LayerExperts,
    tokens: Mapping[str, Tensor | Sequence[str]],
    row_M: Tensor,
    columns: Sequence[str],
    norm_NK: Tensor | None = None,
) -> Any:
    """Returns the rows of a layer (`pandas.DataFrame`), token by token.

    Args:
        experts: the experts of N tokens.
        tokens: the columns of the tokens by name, each [N], on the CPU; NaN in `loss` means none.
        row_M: the tokens to write.
        columns: names of the columns.
        norm_NK: norms of the experts' outputs.

    Raises:
        ConfigError: weights are not finite.
    """
    import pandas as pd

    layer, weight_MK, expert_MK = experts.layer, experts.weights[row_M], experts.experts[row_M]
    if not weight_MK.isfinite().all():
        raise ConfigError(not_finite(f"the coefficients of {layer.name}"))
    first_L = torch.tensor([0, *layer.levels]).cumsum(0)
    level_MK = torch.searchsorted(first_L[1:], expert_MK, right=True)
    # The number of earlier entries of the same level.
    slot_MK = (level_MK.unsqueeze(-1) == level_MK.unsqueeze(-2)).tril(-1).sum(-1)
    scores_MS = experts.scores[row_M]
    # Scores by sigmoids do not sum to 1, and those of pruned experts are -inf.
    levels = torch.split(scores_MS.clamp_min(0), list(layer.levels), dim=-1)
    entropies = [entropy(p / p.sum(-1, keepdim=True).clamp_min(1e-30)) for p in levels]
    values = {
        "level": level_MK,
        "slot": slot_MK,
        "expert": expert_MK - first_L[level_MK],
        "weight": weight_MK,
        "score": scores_MS.gather(1, expert_MK),
        "entropy": torch.stack(entropies, -1).gather(1, level_MK),
    }
    if norm_NK is not None:
        values["norm"] = norm_NK[row_M]
    rows = {name: each.flatten().numpy() for name, each in values.items()}
    for name, each in tokens.items():
        rows[name] = np.repeat(np.asarray(each)[row_M], expert_MK.shape[1])
    frame = pd.DataFrame(rows).assign(layer=_block(layer), module=layer.name)
    return frame[[*columns]].astype({name: COLUMNS[name] for name in columns})


def _block(layer: RoutedLayer) -> int:
    return layer.block if layer.in_block else -1
