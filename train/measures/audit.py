"""`polyad experts audit`: whether statistics predict which of a token's experts matter to it.

See `experts/ranked.py`. The atlas ranks a layer's experts over all tokens; here the experts of one
token are compared with each other, as in the causal audit (2606.10703).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyad.model.decoder import Decoder
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action, How, experts_of_a_token
from polyad.train.experts.knockout import may_drop
from polyad.train.experts.probing import EVERY, RoutedLayer, choose_layers, routed_layers
from polyad.train.experts.ranked import (
    AUDITED,
    CONTROLS,
    WAYS,
    PairedTest,
    RankedAblation,
    RouterLogits,
    chosen_places,
)
from polyad.train.measures.measure import Examination, Result
from polyad.train.reading import Evaluated, MomentsReader, Reader, Reading, read
from polyad.train.results import aligned
from polyad.train.tasks.samples import TextSamples, losses

POSITIONS = 200
"""Number of positions audited in each layer, as in the paper."""
TOKENS = 65_536
SIGNIFICANCE = 0.05
DDOF = {"described": 1, "coded": 0}
"""Degrees of freedom: the paper's script uses the population standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Audit(Result):
    """Change of the loss without the highest and without the lowest of a token's experts."""

    how: How
    tokens: int
    positions: int
    layers: Mapping[str, Tensor]
    """Changes of the loss [ways, positions, statistics, 2], in nats, by layer title."""
    off: float
    """Difference of a loss from the first one, after all experts were restored."""

    def threshold(self, name: str) -> float:
        """A statistic counts as predictive in a layer if its p is below this."""
        cells = len(self.layers) * (1 if name in CONTROLS else len(AUDITED))
        return SIGNIFICANCE / max(1, cells)

    def tests(self) -> dict[str, dict[str, dict[str, PairedTest]]]:
        """The test of each layer, statistic and way."""
        return {
            layer: {
                name: {
                    way: PairedTest.of(change_WNC2[number, :, column], DDOF[way])
                    for number, way in enumerate(WAYS)
                }
                for column, name in enumerate((*AUDITED, *CONTROLS))
            }
            for layer, change_WNC2 in self.layers.items()
        }

    def predicts(self, name: str, tested: PairedTest) -> bool:
        """Whether a statistic ranks the experts of a token as the loss does."""
        return tested.p is not None and tested.p < self.threshold(name) and tested.high > tested.low

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        tests = self.tests()
        return {
            "how": self.how,
            "tokens_read": self.tokens,
            "positions": self.positions,
            "threshold": {name: self.threshold(name) for name in (*AUDITED, *CONTROLS)},
            "predicts_in": {
                name: {
                    way: sum(self.predicts(name, each[name][way]) for each in tests.values())
                    for way in WAYS
                }
                for name in (*AUDITED, *CONTROLS)
            },
            "layers": tests,
            "baseline_off_by": self.off,
        }

    def amount(self) -> str:
        """The number of tokens, in words."""
        return f": {self.tokens:,} tokens, of which {self.positions:,} are audited in each layer"

    def facts(self) -> list[tuple[str, str]]:
        """How experts were removed."""
        return [
            (
                "removal",
                f'{self.how}, only at the audited token; "as coded": contribution, at every token',
            )
        ]

    def rows(self) -> list[str]:
        """A line for each layer and statistic."""
        heads = ("layer", "ranked by", "without the highest", "lowest", "d", "p", "Wilcoxon")
        table: list[tuple[str, ...]] = [(*heads, "", "as coded: d", "p")]
        for layer, of_layer in self.tests().items():
            for name, ways in of_layer.items():
                here, coded = (ways[way] for way in WAYS)
                table.append((
                    *(layer, name.replace("_", " "), f"{here.high:+.4f}", f"{here.low:+.4f}"),
                    *(_number(here.d, "+.3f"), _number(here.p, ".2g")),
                    _number(here.p_wilcoxon, ".2g"),
                    "predicts" if self.predicts(name, here) else "",
                    *(_number(coded.d, "+.3f"), _number(coded.p, ".2g")),
                ))  # fmt: skip
                layer = ""
        return [
            "",
            "change in a token's loss, in nats, without its highest- or lowest-ranked expert; a "
            "statistic is predictive if",
            f"the first is larger with p < {self.threshold(AUDITED[0]):.2g} "
            f"({' and '.join(each.replace('_', ' ') for each in CONTROLS)}: "
            f"{self.threshold(CONTROLS[0]):.2g}), which is 0.05 corrected for the number of tests",
            *aligned(table, "<<>>>>><>"),
        ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What to audit."""

    how: How = "contribution"
    positions: int = POSITIONS
    layers: Sequence[str] = (EVERY,)
    tokens: int = TOKENS
    """Approximate number of tokens for the statistics."""
    seed: int = 0
    """Seeds the choice of positions and of random experts."""


class Audited(Examination):
    """Removes the highest and the lowest of a token's experts."""

    name = "experts audit"
    doing = "removing experts of single tokens"
    needs_whole = "without an expert all blocks behind it run again"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> AuditOptions:
        """The fields of `AuditOptions`."""
        opened.text(cls.name)
        return AuditOptions(**options)

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: AuditOptions,
        model: nn.Module,
        world: comm.World,
    ) -> Audit:
        """Reads the text twice: for the statistics, and for the changes in loss."""
        layers = auditable(model, str(opened.weights.folder), asked.layers)
        text = TextSamples(opened.text(cls.name), split, asked.tokens)

        def summed(values: Tensor) -> Tensor:
            return comm.sum_over_samples(values, world)

        def lowest(values: Tensor) -> Tensor:
            return -comm.max_over_ranks(-values.to(world.device)).cpu()

        moments, logits = MomentsReader(layers), RouterLogits(layers)

        def read_with(readers: Sequence[Reader], told: str) -> None:
            size = opened.batch_size
            read(model, layers, text, readers, batch_size=size, world=world, told=told)

        with logits.reading(model):
            read_with((moments, logits), "read experts")
        scored = torch.zeros(text.rows, text.length, dtype=torch.float64)
        for number_B, scored_BP in logits.scored:
            scored[number_B] = scored_BP.double()
        scored = summed(scored.to(world.device)).cpu() > 0
        places_N2 = chosen_places(scored, asked.positions, asked.seed)
        of_layer = moments.moments.result(summed)
        taken = [
            RankedAblation(
                *(model, layer, of_layer[layer.name]),
                logits=_on_cpu(
                    logits.means(
                        layer,
                        experts_of_a_token(model, layer),
                        lambda values: summed(values.to(world.device)),
                        lowest,
                    )
                ),
                places_N2=places_N2,
                action=Action(how=asked.how),
                seed=asked.seed,
            )
            for layer in layers
        ]
        read_with((_Reader(model, taken),), "take away experts")
        found = {each.layer.title: each.result(summed) for each in taken}
        return Audit(
            how=asked.how,
            tokens=int(scored.sum()),
            positions=len(places_N2),
            layers={title: change for title, (change, _) in found.items()},
            off=max(off for _, off in found.values()),
        )


def _on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in values.items()}


def auditable(model: nn.Module, place: str, blocks: Sequence[str]) -> list[RoutedLayer]:
    """Returns the layers of blocks, each of which must select several experts per token.

    Args:
        model: a decoder.
        place: place of its weights, for errors.
        blocks: see `choose_layers`.

    Raises:
        ConfigError: a token's experts cannot be ranked, or cannot be removed one by one.
    """
    routed = routed_layers(model)
    if not routed:
        raise ConfigError(f"{place}: its model has no experts")
    assert isinstance(model, Decoder)
    layers = choose_layers(routed, blocks)
    for layer in layers:
        if layer.shares:
            raise ConfigError(
                f"experts audit: in {layer.title} every token uses all experts; only layers that "
                "select experts can be audited"
            )
        if experts_of_a_token(model, layer) < 2:
            raise ConfigError(
                f"experts audit: {layer.title} gives each token only one expert, so there is "
                "nothing to rank; a top_k of at least 2 is needed"
            )
    if may_drop(model):
        raise ConfigError(
            "experts audit: with a capacity, dropped tokens depend on the rest of the batch; "
            "model.feed_forward.capacity_factor: null is needed"
        )
    return layers


class _Reader:
    """Passes batches to the layers."""

    def __init__(self, model: nn.Module, layers: Sequence[RankedAblation]) -> None:
        self._model, self._layers = model, layers
        self.blocks = [each.layer.block for each in layers]

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        loss_BP = losses(self._model, reading.output, reading.batch)
        for each in self._layers:
            x_BTD, name = reading.entering[each.layer.block], each.layer.name
            decision = reading.of_all_tokens[name]
            each.add(x_BTD, reading.batch, loss_BP, decision)
