"""`polyad experts atlas`: what every expert of every layer is for, found by removing it.

The change of the loss without each expert is shown beside statistics that are said to predict it,
with their rank correlation: a causal audit found that none of them does (2606.10703). Since the
joint effect of experts does not follow from single ones, the lowest quarter and half of a layer by
each statistic are removed, too, and compared with random sets of equal size.

Shapes: E experts of a layer, S of all levels side by side, D width, V vocabulary.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.decoder import Decoder
from polyad.model.heads import UntiedHead
from polyad.parallel import comm
from polyad.parallel.streamed import Streamed, parts_of
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action, How, check_action, experts_of_a_token
from polyad.train.experts.information import Summed
from polyad.train.experts.knockout import LayerWithout
from polyad.train.experts.moments import STATISTICS, Moments
from polyad.train.experts.probing import EVERY, RoutedLayer
from polyad.train.measures.knockout import (
    LEAD,
    KnockedOut,
    KnockOuts,
    Options,
    chosen_experts,
    layer_rows,
)
from polyad.train.measures.measure import Examination, Result, Subject
from polyad.train.reading import Evaluated, MomentsReader, read
from polyad.train.results import aligned
from polyad.train.tasks.samples import TextSamples
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


class Raised(NamedTuple):
    """A token that an expert promotes."""

    token: int
    text: str
    effect: float
    """Effect on its logit, in standard deviations above the mean over the vocabulary."""


class Correlation(NamedTuple):
    """Spearman's rank correlation of a statistic with the change of the loss, over experts."""

    rho: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Together:
    """Increase of the loss without several experts of a layer at once, in nats per token."""

    size: int
    lowest: Mapping[str, float]
    """Without the experts that each statistic ranks lowest."""
    at_random: Sequence[float]
    """Without random experts."""


@dataclass(frozen=True, kw_only=True)
class LayerAtlas:
    """The experts of a layer."""

    without: LayerWithout
    moments: Moments
    together: Sequence[Together]
    unembedded: Sequence[Sequence[Raised]] | None = None
    """The tokens that each removed expert promotes most; None: not requested."""

    def statistics(self) -> dict[str, list[float]]:
        """The statistics of the removed experts."""
        rows = [experts[0] for experts in self.without.sets]
        return {name: each_S[rows].tolist() for name, each_S in self.moments.statistics().items()}

    def correlations(self) -> dict[str, dict[str, Correlation | None]]:
        """The rank correlation of each statistic with each change; None where undefined."""
        changes = {
            "change": self.without.by_class["all"].change_3EC[0, :, 0],
            "own_change": self.without.by_class["all"].own_change_3EC[0, :, 0],
        }
        return {
            name: {target: _correlation(np.array(values), changes[target]) for target in TARGETS}
            for name, values in self.statistics().items()
        }

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        correlations = {
            name: {target: each and each._asdict() for target, each in both.items()}
            for name, both in self.correlations().items()
        }
        unembedded = {} if self.unembedded is None else {"unembedded": self.unembedded}
        return self.without.to_json() | {
            "statistics": self.statistics(),
            "correlations": correlations,
            "together": self.together,
            **unembedded,
        }


def _correlation(
    statistic_E: "np.ndarray[Any, Any]", change_E: "np.ndarray[Any, Any]"
) -> Correlation | None:
    from scipy.stats import spearmanr

    known_E = np.isfinite(change_E)  # an unused expert has no own change
    statistic_E, change_E = statistic_E[known_E], change_E[known_E]
    varies = len(set(statistic_E.tolist())) > 1 and len(set(change_E.tolist())) > 1
    if len(change_E) < FEWEST_EXPERTS or not varies:
        return None
    rho, p = spearmanr(statistic_E, change_E)
    return Correlation(float(rho), float(p))


@dataclass(frozen=True, kw_only=True)
class AtlasOfExperts(Result):
    """What every expert is for, and which statistics predict it without removing the expert."""

    knocked: KnockedOut
    how: How
    """How experts were removed."""
    layers: Sequence[LayerAtlas]

    @property
    def threshold(self) -> float:
        """A correlation counts as predictive if its p is below this."""
        return SIGNIFICANCE / max(1, len(STATISTICS) * len(self.layers))

    def predicting(self, name: str, target: str) -> tuple[int, int]:
        """The number of layers in which a statistic predicts a change, and of all layers."""
        found = [layer.correlations()[name][target] for layer in self.layers]
        known = [each for each in found if each is not None]
        return sum(each.p < self.threshold for each in known), len(known)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        told = {
            name: {
                target: dict(zip(("layers", "of"), self.predicting(name, target), strict=True))
                for target in TARGETS
            }
            for name in STATISTICS
        }
        rest = {k: v for k, v in self.knocked.to_json().items() if k not in ("layers", "steering")}
        return rest | {
            "how": self.how,
            "layers": {each.without.layer.name: each for each in self.layers},
            "threshold": self.threshold,
            "predicting": told,
        }

    def amount(self) -> str:
        """The number of tokens, in words."""
        return self.knocked.amount()

    def facts(self) -> list[tuple[str, str]]:
        """The loss of the unchanged model."""
        return [*self.knocked.facts(), ("removal", self.how)]

    def rows(self) -> list[str]:
        """Tables of each layer's experts, of the statistics' correlations, and of sets of
        experts."""
        lines = [*LEAD]
        for layer in self.layers:
            lines += ["", *layer_rows(layer.without)]
        lines += ["", *self._correlation_rows()]
        if any(layer.together for layer in self.layers):
            lines += ["", *self._together_rows()]
        return [*lines, *self._unembedded_rows()]

    def _unembedded_rows(self) -> list[str]:
        table: list[tuple[str, ...]] = []
        for layer in self.layers:
            if layer.unembedded is None:
                continue
            title, names = layer.without.layer.title, layer.without.experts()
            for name, tokens in zip(names, layer.unembedded, strict=True):
                said = "  ".join(f"{each.text!r} {each.effect:+.1f}" for each in tokens)
                table.append((title, f"expert {name}", said or "no token uses it"))
                title = ""
        if not table:
            return []
        return [
            "",
            "tokens that each expert's mean output promotes most, in standard deviations over the "
            "vocabulary; the effect through later blocks is not included",
            *aligned(table, "<><"),
        ]

    def _correlation_rows(self) -> list[str]:
        table: list[tuple[str, ...]] = [("layer", *(name.replace("_", " ") for name in STATISTICS))]
        for layer in self.layers:
            found = layer.correlations()
            cells = (self._cell(found[name]["change"]) for name in STATISTICS)
            table.append((layer.without.layer.title, *cells))
        counts = (self.predicting(name, "change") for name in STATISTICS)
        table.append(("predictive in", *(f"{layers} of {of}" for layers, of in counts)))
        return [
            "rank correlation of each statistic with the change in loss over all tokens; * "
            f"significant at p < {self.threshold:.2g} (0.05 corrected for all tests shown)",
            *aligned(table, "<" + ">" * len(STATISTICS)),
        ]

    def _cell(self, each: Correlation | None) -> str:
        if each is None:
            return "-"
        return f"{each.rho:+.2f}{' *' if each.p < self.threshold else '  '}"

    def _together_rows(self) -> list[str]:
        heads = ("layer", "without", *(name.replace("_", " ") for name in STATISTICS), "random")
        table: list[tuple[str, ...]] = [heads]
        for layer in self.layers:
            for each in layer.together:
                low, high = min(each.at_random), max(each.at_random)
                mean = sum(each.at_random) / len(each.at_random)
                table.append(
                    (
                        layer.without.layer.title,
                        f"{each.size} experts",
                        *(f"{each.lowest[name]:+.3f}" for name in STATISTICS),
                        f"{mean:+.3f} ({low:+.3f} to {high:+.3f})",
                    )
                )
        return [
            "change in loss without several experts at once: those that a statistic ranks lowest, "
            f"and {RANDOM_SETS} random sets (mean, lowest to highest)",
            *aligned(table, "<<" + ">" * (len(STATISTICS) + 1)),
        ]


@dataclass(frozen=True, kw_only=True)
class AtlasOptions(Options):
    """Which experts to remove, and how."""

    layers: Sequence[str] = (EVERY,)
    how: How = "contribution"
    unembed: int | None = None
    """How many of the tokens that each expert promotes are listed."""


class Atlas(Examination):
    """Removes every expert, one after the other, and sets of them."""

    name = "atlas"
    doing = "removing experts"
    needs_whole = None

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> AtlasOptions:
        """Options by the fields of `AtlasOptions`."""
        if (refusal := KnockOuts.refusal(opened)) is not None:
            raise ConfigError(f"{cls.name}: {refusal}")
        return AtlasOptions(**options)

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: AtlasOptions,
        model: nn.Module,
        world: comm.World,
    ) -> AtlasOfExperts:
        """Reads the text twice: for the statistics, and for the changes in loss."""
        chosen = chosen_experts(model, str(opened.weights.folder), asked)
        layers, columns = [layer for layer, _ in chosen], [each for _, each in chosen]
        for layer in layers:
            check_action(layer, Action(how=asked.how), f"--how {asked.how}")
            if asked.unembed is not None and (layer.shares or not isinstance(model, Decoder)):
                raise ConfigError(
                    f"--unembed: {asked.unembed} is not allowed with {layer.title}; allowed with: "
                    "sparse experts of a model that predicts the next token"
                )
        assert isinstance(opened.task, TextTask)
        text = TextSamples(opened.task, split, asked.tokens, hidden=True)
        subject = Subject(model, layers, text, opened.batch_size)

        def summed(values: Any) -> Any:
            return comm.sum_over_samples(values.to(world.device), world)

        moments = _moments(subject, world, summed)
        sets = [_sets(model, layer, moments[layer.name], asked) for layer in layers]
        actions = [Action(how=asked.how, mean_SD=moments[each.name].mean_SD) for each in layers]
        measure = KnockOuts(
            *(subject, columns),
            actions=actions,
            sets=[each.all for each in sets],
        )
        measure.read(world)
        found = measure.result(summed)

        def raised(without: LayerWithout, of_layer: Moments) -> list[list[Raised]] | None:
            if asked.unembed is None:
                return None
            assert isinstance(model, Decoder)
            rows, tokenizer = [experts[0] for experts in without.sets], text.tokenizer
            return raised_tokens(
                *(model, of_layer.mean_SD[rows], asked.unembed),
                lambda token: tokenizer.text_within(token) or tokenizer.decode([token]),
            )

        end = model.part(*parts_of(model)[-1]) if isinstance(model, Streamed) else nullcontext()
        with end:
            unembedded = [raised(each, moments[each.layer.name]) for each in found.layers]
        of_layers = zip(found.layers, found.together, sets, unembedded, strict=True)
        return AtlasOfExperts(
            knocked=found,
            how=asked.how,
            layers=[
                LayerAtlas(
                    without=without,
                    moments=moments[without.layer.name],
                    together=of_sets.together(lost),
                    unembedded=tokens,
                )
                for without, lost, of_sets, tokens in of_layers
            ],
        )


def _moments(subject: Subject, world: comm.World, summed: Summed) -> Mapping[str, Moments]:
    model, layers, samples, batch_size = subject
    reader = MomentsReader(layers)
    read(
        *(model, layers, samples, (reader,)),
        batch_size=batch_size,
        world=world,
        told="read experts",
    )
    return reader.moments.result(summed)


@dataclass(frozen=True, kw_only=True)
class _Sets:
    """Distinct sets of a layer's experts to remove together."""

    all: list[tuple[int, ...]]
    lowest: dict[int, dict[str, tuple[int, ...]]]
    """Sets by size and statistic."""
    at_random: dict[int, list[tuple[int, ...]]]

    def together(self, lost: LayerWithout) -> list[Together]:
        """The losses without these sets."""
        change_E = lost.by_class["all"].change_3EC[0, :, 0]
        of_set = {each: float(change_E[row]) for row, each in enumerate(self.all)}
        return [
            Together(
                size=size,
                lowest={name: of_set[each] for name, each in of_size.items()},
                at_random=[of_set[each] for each in self.at_random[size]],
            )
            for size, of_size in self.lowest.items()
        ]


def _sets(model: nn.Module, layer: RoutedLayer, moments: Moments, asked: AtlasOptions) -> _Sets:
    """The lowest quarter and half of experts by each statistic, and random sets."""
    lowest: dict[int, dict[str, tuple[int, ...]]] = {}
    at_random: dict[int, list[tuple[int, ...]]] = {}
    experts = layer.num_experts
    if asked.experts or len(layer.levels) > 1:  # a set in one level is not a share of a layer
        return _Sets(all=[], lowest={}, at_random={})
    for share in SHARES:
        size = experts // share
        left_over = asked.how == "prune" and experts - size < experts_of_a_token(model, layer)
        if size < 2 or left_over:
            continue
        lowest[size] = {
            name: tuple(sorted(each_S.argsort(stable=True)[:size].tolist()))
            for name, each_S in moments.statistics().items()
        }
        chance = random.Random(f"{layer.name} {size}")
        at_random[size] = [
            tuple(sorted(chance.sample(range(experts), size))) for _ in range(RANDOM_SETS)
        ]
    known = {each for of_size in lowest.values() for each in of_size.values()}
    known |= {each for of_size in at_random.values() for each in of_size}
    return _Sets(all=sorted(known), lowest=lowest, at_random=at_random)


@torch.inference_mode()
def raised_tokens(
    model: Decoder, mean_SD: Tensor, count: int, text_of: Callable[[int], str]
) -> list[list[Raised]]:
    """Returns the tokens whose logits each expert's mean output raises most.

    Direct logit attribution. With v the mean output, gamma the final norm's scale and W the rows of
    the head:

        direct effect on logits = W (gamma * (v - mean v)) / s    (RMSNorm: v for v - mean v)

    s, the deviation of the residual stream, differs between tokens but multiplies all logits alike,
    so effects are given in standard deviations over the vocabulary, which do not depend on s.
    Effects through later blocks are ignored, so results are most reliable in the last blocks.

    Args:
        model: a language model, whole on this process.
        mean_SD: mean outputs; 0 for unused experts.
        count: number of tokens.
        text_of: the text of a token.

    Returns:
        Tokens for each expert, the highest first; none for unused experts.
    """
    norm, head = model.final_norm, model.head
    weight_VD = head.weight if isinstance(head, UntiedHead) else model.token_embedding.weight
    direction_SD = mean_SD.to(weight_VD.device, torch.float32)
    if isinstance(norm, nn.LayerNorm):
        direction_SD = direction_SD - direction_SD.mean(-1, keepdim=True)
    assert isinstance(norm.weight, Tensor)
    effect_SV = (direction_SD * norm.weight.float()) @ weight_VD.float().T
    spread_S1 = effect_SV.std(-1, keepdim=True)
    effect_SV = (effect_SV - effect_SV.mean(-1, keepdim=True)) / spread_S1
    found = []
    for used, effect_V in zip((spread_S1[:, 0] > 0).tolist(), effect_SV, strict=True):
        best, tokens = effect_V.topk(min(count, len(effect_V)))
        pairs = zip(tokens.tolist(), best.tolist(), strict=True)
        raised = [Raised(token, text_of(token), effect) for token, effect in pairs]
        found.append(raised if used else [])
    return found
