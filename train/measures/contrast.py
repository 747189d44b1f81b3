"""`polyad experts contrast`: experts that one text uses more than another, forced or avoided.

Delta of an expert is the share of the first text's tokens that use it, minus that of the second
(SteerMoE, 2509.09660). Experts with the largest Delta are forced, those with the smallest avoided,
and the loss of both texts is compared with that for equally many random experts.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.model.decoder import DecoderSettings
from polyad.parallel import comm
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import Action, experts_of_a_token
from polyad.train.experts.interventions import Intervention, check_interventions, intervened
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.experts.steering import Steering, steered
from polyad.train.measures.measure import Examination, Result, needs_one_process, needs_text
from polyad.train.measures.removal import RANDOM_CHOICES, TOKENS, as_in, mean_loss, text_of
from polyad.train.reading import Evaluated, Reading, open_evaluated, read
from polyad.train.results import aligned

MOST_SHOWN = 10
"""Maximum number of experts displayed."""


class Contrasted(NamedTuple):
    """An expert of a layer."""

    layer: int
    expert: int
    first: float
    """Share of the first text's tokens that use it."""
    second: float

    @property
    def delta(self) -> float:
        """The difference of the shares."""
        return self.first - self.second

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return self._asdict() | {"delta": self.delta}


@dataclass(frozen=True, kw_only=True)
class Contrast(Result):
    """Use of experts by two texts, and the texts' losses when experts are forced."""

    other: str
    experts: Sequence[Contrasted]
    """All experts, those with the largest difference first."""
    forced: Sequence[Intervention]
    losses: Mapping[str, tuple[float, float]]
    """Losses of both texts, in nats per token: unchanged, with experts forced or avoided, and
    steered."""
    at_random: Sequence[tuple[float, float]]
    tokens: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "other": self.other,
            "tokens_scored": list(self.tokens),
            "experts": self.experts,
            "moved": self.forced,
            "loss": self.losses,
            "loss_random": self.at_random,
        }

    def amount(self) -> str:
        """The number of tokens, in words."""
        return f": {self.tokens[0]:,} tokens, compared with {self.tokens[1]:,} of {self.other}"

    def facts(self) -> list[tuple[str, str]]:
        """Which experts were forced or avoided."""
        return [("moved", str(each)) for each in self.forced]

    def rows(self) -> list[str]:
        """The experts that differ most, and losses."""
        table: list[tuple[str, ...]] = [("layer", "expert", "first", "second", "delta")]
        for each in self.experts[:MOST_SHOWN]:
            shares = (f"{100 * each.first:.1f}%", f"{100 * each.second:.1f}%")
            table.append((f"{each.layer}", f"{each.expert}", *shares, f"{100 * each.delta:+.1f}%"))
        first, second = self.losses["as_it_is"]
        lines: list[tuple[str, ...]] = [
            ("loss", "first", "change", "second", "change"),
            ("unchanged", f"{first:.4f}", "", f"{second:.4f}", ""),
        ]
        mean = [sum(each) / len(self.at_random) for each in zip(*self.at_random, strict=True)]
        others = [(name, pair) for name, pair in self.losses.items() if name != "as_it_is"]
        for name, (one, two) in (*others, ("random experts", mean)):
            changes = (f"{one - first:+.4f}", f"{two - second:+.4f}")
            lines.append((name, f"{one:.4f}", changes[0], f"{two:.4f}", changes[1]))
        return [
            "",
            "share of the tokens that use each expert, in the first and in the second text",
            *aligned(table, ">"),
            "",
            *aligned(lines),
        ]


@dataclass(frozen=True, kw_only=True)
class ContrastOptions:
    """What to contrast, and how many experts to force or avoid."""

    other: str
    """Prepared data."""
    force: int = 5
    avoid: int = 0
    strength: float | None = None
    """Strength of steering by the same experts' gate columns; None: not measured."""
    tokens: int = TOKENS
    seed: int = 0


class Contrasting(Examination):
    """Compares the use of experts in two texts."""

    name = "experts contrast"
    doing = "contrasting the use of experts"
    needs_whole = "experts are forced in a whole model"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> ContrastOptions:
        """The fields of `ContrastOptions`."""
        needs_text(cls.name, opened)
        asked = ContrastOptions(**options)
        if asked.strength is not None and not isinstance(opened.config.model, DecoderSettings):
            raise ConfigError(f"--strength: {asked.strength:g}: only a GPT-2 or decoder is steered")
        return asked

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: ContrastOptions,
        model: nn.Module,
        world: comm.World,
    ) -> Contrast:
        """Reads both train splits for the use of experts, and the split for losses."""
        needs_one_process(cls.name, world)
        layers = [each for each in routed_layers(model) if each.in_block and not each.shares]
        if not layers:
            raise ConfigError(f"{opened.weights.folder}: no layer selects experts")
        both = (
            opened,
            open_evaluated(opened.weights.folder, asked.other, as_in(opened), opened.choice),
        )
        for each in both:
            for needed in ("train", split):
                each.task.check_split(needed)
        shares = [_shares(model, layers, each, asked.tokens) for each in both]
        experts = [
            Contrasted(layer.block, expert, *(float(each[layer.name][expert]) for each in shares))
            for layer in layers
            for expert in range(layer.num_experts)
        ]
        experts.sort(key=lambda each: -abs(each.delta))
        top_k = {layer.block: experts_of_a_token(model, layer) for layer in layers}
        moved = chosen(experts, top_k, asked.force, asked.avoid)
        check_interventions(model, moved)

        def losses(
            told: str,
            interventions: Sequence[Intervention],
            steerings: Sequence[Steering] = (),
        ) -> list[tuple[float, int]]:
            with intervened(model, interventions), steered(model, steerings):
                samples = (text_of(each, split, asked.tokens) for each in both)
                return [mean_loss(model, each, opened.batch_size, told) for each in samples]

        (first, tokens), (second, others) = losses("unchanged", [])
        at_random = []
        for number in range(RANDOM_CHOICES):
            again = random_ones(experts, top_k, moved, f"{asked.seed} {number}")
            told = f"random experts {number + 1}/{RANDOM_CHOICES}"
            one, two = (loss for loss, _ in losses(told, again))
            at_random.append((one, two))
        found = {"as_it_is": (first, second)}
        one, two = (loss for loss, _ in losses("with experts moved", moved))
        found["moved"] = one, two
        if asked.strength is not None:
            one, two = (loss for loss, _ in losses("steered", [], _towards(moved, asked.strength)))
            found["steered"] = one, two
        return Contrast(
            other=both[1].task.name,
            experts=experts,
            forced=moved,
            losses=found,
            at_random=at_random,
            tokens=(tokens, others),
        )


def chosen(
    experts: Sequence[Contrasted], top_k: Mapping[int, int], force: int, avoid: int
) -> list[Intervention]:
    """Selects the first experts with a positive difference, and the first with a negative one.

    Args:
        experts: experts in order.
        top_k: maximum number of forced experts per layer.
        force: number of experts with a positive difference; fewer if there are fewer.
        avoid: number of experts with a negative difference.
    """
    picked: dict[str, dict[int, list[int]]] = {"force": {}, "avoid": {}}
    left = {"force": force, "avoid": avoid}
    for each in experts:
        how = "force" if each.delta > 0 else "avoid"
        of_layer = picked[how].setdefault(each.layer, [])
        full = how == "force" and len(of_layer) >= top_k[each.layer]
        if each.delta and left[how] and not full:
            of_layer.append(each.expert)
            left[how] -= 1
    return [
        Intervention(layer=layer, experts=tuple(sorted(some)), action=action)
        for action in (Action(how="force"), Action(how="avoid"))
        for layer, some in sorted(picked[action.how].items())
        if some
    ]


def _towards(moved: Sequence[Intervention], strength: float) -> list[Steering]:
    """Steerings towards forced experts, and away from avoided ones."""
    sign = {"force": 1.0, "avoid": -1.0}
    return [
        Steering(layer=each.layer, expert=expert, strength=sign[each.action.how] * strength)
        for each in moved
        for expert in each.experts
    ]


def random_ones(
    experts: Sequence[Contrasted],
    top_k: Mapping[int, int],
    moved: Sequence[Intervention],
    seed: str,
) -> list[Intervention]:
    """Draws random experts, as many forced and avoided as in `moved`, and none both."""
    some = list(experts)
    random.Random(seed).shuffle(some)
    up = [each._replace(first=1.0, second=0.0) for each in some]
    forced = chosen(up, top_k, _count(moved, "force"), 0)
    taken = {(each.layer, expert) for each in forced for expert in each.experts}
    down = [
        each._replace(first=0.0, second=1.0)
        for each in some
        if (each.layer, each.expert) not in taken
    ]
    return [*forced, *chosen(down, top_k, 0, _count(moved, "avoid"))]


def _count(interventions: Sequence[Intervention], how: str) -> int:
    return sum(len(each.experts) for each in interventions if each.action.how == how)


class _Use:
    """Counts the tokens that use each expert."""

    blocks: Sequence[int] = ()

    def __init__(self) -> None:
        self.used: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = {}

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        for name, decision in reading.decisions.items():
            used_MS = decision.coefficients() != 0
            self.used[name] = self.used.get(name, torch.zeros(())) + used_MS.sum(0).cpu()
            self.tokens[name] = self.tokens.get(name, 0) + len(used_MS)


def _shares(
    model: nn.Module, layers: Sequence[RoutedLayer], opened: Evaluated, tokens: int
) -> dict[str, Tensor]:
    """The share of the train split's tokens that use each expert, by layer."""
    use = _Use()
    samples, told = text_of(opened, "train", tokens), f"experts of {opened.task.name}"
    read(model, layers, samples, (use,), batch_size=opened.batch_size, told=told)
    return {name: used_S.double() / use.tokens[name] for name, used_S in use.used.items()}
