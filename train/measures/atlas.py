"""`polyad experts atlas`: what every expert of every layer is for, found by removing it.

Measures the loss of each class of tokens without the expert. The change of the loss is shown beside
statistics that are said to predict it, with their rank correlation: a causal audit found that none
of them does (2606.10703). Since the joint effect of experts does not follow from single ones, the
lowest quarter and half of a layer by each statistic are removed, too, and compared with random sets
of equal size.

Shapes: E experts of a layer.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from polyad.parallel import comm
from polyad.train.experts.actions import Action, How, check_action, experts_of_a_token
from polyad.train.experts.information import STATISTICS, Moments
from polyad.train.experts.knockout import KnockOut
from polyad.train.experts.probing import (
    EVERY,
    RoutedLayer,
    check_experts,
    choose_layers,
    columns_of,
)
from polyad.train.measures import knockout
from polyad.train.measures.measure import Analysis, layers_of
from polyad.train.reading import TOKENS, EvaluationContext, Subject
from polyad.train.results import Tables
from polyad.train.tasks.text import TextTask

SHARES = (4, 2)
"""A quarter and a half of a layer's experts are removed together."""
RANDOM_SETS = 5
"""Number of random sets of each size."""
SIGNIFICANCE = 0.05
"""Significance level, before division by the number of correlations tested."""
FEWEST_EXPERTS = 4
"""Minimum number of experts for a rank correlation."""
TARGETS = ("change", "own_change")
TITLES = knockout.TITLES | {
    "predictive": "rank correlation of each statistic with the change in loss: its mean over "
    "layers, and in how many it is significant (p < 0.05 corrected for all tests)",
    "together": "change in loss without several experts at once: those that a statistic ranks "
    "lowest, and random sets",
}
"""Lines above tables of a text."""


@dataclass(kw_only=True)
class Atlas(Analysis):
    """Removes every expert, one after the other, and sets of them."""

    name = "atlas"
    doing = "removing experts"
    needs_whole = None

    layers: Sequence[str] = (EVERY,)
    """Blocks whose experts are removed, by number, or `all`."""
    experts: Sequence[str] = ()
    """Experts to remove in each of these; empty: all."""
    how: How = "zero"
    tokens: int = TOKENS
    """Approximate number of tokens to read, in whole windows, spread evenly over the split."""

    def check(self, opened: EvaluationContext) -> None:
        """Refuses a model that does not predict text."""
        opened.need(f"experts {self.name}", TextTask)

    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads the text twice: for the statistics, and for the changes in loss."""
        layers = choose_layers(layers_of(opened, model), self.layers)
        check_experts(layers, self.experts)
        for layer in layers:
            check_action(layer, Action(how=self.how), f"--how {self.how}")
        text = opened.text(self.tokens)
        subject = Subject(model, layers, text, opened.batch_size)
        moments = subject.moments(world)
        columns = [columns_of(layer, self.experts) for layer in layers]
        chosen = [self._sets(model, layer, moments[layer.name]) for layer in layers]
        sets = [
            [*((column,) for column in singles), *sorted({experts for _, experts in together})]
            for singles, together in zip(columns, chosen, strict=True)
        ]
        actions = [Action(how=self.how, mean_SD=moments[each.name].mean_SD) for each in layers]
        without = knockout.knock_out(subject, sets, actions, world)
        tables = knockout.knockout_tables(without, text)
        experts = tables.frames["experts"]
        of_layers = [moments[layer.name].statistics() for layer in layers]
        for name in STATISTICS:
            experts[name] = np.concatenate(
                [each[name][some].numpy() for each, some in zip(of_layers, columns, strict=True)]
            )
        correlations = _correlations(experts)
        frames = {
            **tables.frames,
            "predictive": _predictive(correlations),
            "correlations": correlations,
            **_together(without, chosen),
        }
        return Tables(facts={**tables.facts, "how": self.how}, frames=frames, titles=TITLES)

    def _sets(self, model: nn.Module, layer: RoutedLayer, moments: Moments) -> "_Chosen":
        """The lowest quarter and half of experts by each statistic, and random sets."""
        chosen: _Chosen = []
        experts = layer.num_experts
        if self.experts or len(layer.levels) > 1:  # a set in one level is not a share of a layer
            return chosen
        for share in SHARES:
            size = experts // share
            left_over = self.how == "prune" and experts - size < experts_of_a_token(model, layer)
            if size < 2 or left_over:
                continue
            statistics = moments.statistics()
            for name in STATISTICS:
                lowest = statistics[name].argsort(stable=True)[:size].tolist()
                chosen.append((name, tuple(sorted(lowest))))
            chance = random.Random(f"{layer.name} {size}")
            for _ in range(RANDOM_SETS):
                chosen.append(("random", tuple(sorted(chance.sample(range(experts), size)))))
        return chosen


def _correlations(experts: Any) -> Any:
    """A table of Spearman's rank correlation of each statistic with each change, by layer; NaN
    where it is undefined."""
    import pandas as pd
    from scipy.stats import spearmanr

    rows = []
    for module, of_layer in experts.groupby("module", sort=False):
        for name, target in itertools.product(STATISTICS, TARGETS):
            pairs = of_layer[[name, target]].dropna()  # an unused expert has no own change
            rho = p = math.nan
            if len(pairs) >= FEWEST_EXPERTS and (pairs.nunique() > 1).all():
                rho, p = spearmanr(pairs[name], pairs[target])
            rows.append({"module": module, "statistic": name, "target": target, "rho": rho, "p": p})
    frame = pd.DataFrame(rows)
    threshold = SIGNIFICANCE / max(1, len(STATISTICS) * experts["module"].nunique())
    return frame.assign(significant=frame["p"] < threshold)


def _predictive(correlations: Any) -> Any:
    """A table of the layers in which a statistic predicts a change, of those where it can."""
    defined = correlations.dropna(subset=["rho"])
    return (
        defined.groupby(["statistic", "target"], sort=False)
        .agg(
            mean_rho=("rho", "mean"), significant_in=("significant", "sum"), layers=("rho", "size")
        )
        .reset_index()
    )


def _together(layers: Sequence[KnockOut], chosen: Sequence["_Chosen"]) -> dict[str, Any]:
    """Tables of the change of the loss without several experts of a layer at once: of each set, and
    by statistic beside random sets."""
    import pandas as pd

    rows = []
    for without, of_layer in zip(layers, chosen, strict=True):
        change_of = dict(zip(without.sets, without.of_all(), strict=True))
        for chosen_by, experts in of_layer:
            rows.append(
                {
                    "module": without.layer.name,
                    "size": len(experts),
                    "chosen_by": chosen_by,
                    "experts": list(experts),
                    "change": change_of[experts],
                }
            )
    if not rows:
        return {}
    frame = pd.DataFrame(rows)
    means = frame.pivot_table(
        "change", ["module", "size"], "chosen_by", aggfunc="mean", sort=False
    ).reset_index()
    random = frame[frame["chosen_by"] == "random"].groupby(["module", "size"], sort=False)["change"]
    ends = random.agg(random_lowest="min", random_highest="max").reset_index()
    return {"together": means.merge(ends), "sets": frame}


_Chosen = list[tuple[str, tuple[int, ...]]]
"""Sets of a layer's experts: how each was chosen, by the lowest values of a statistic or `random`,
and its experts."""
