"""`polyad experts probe`: which classes of tokens a few hidden units of an expert reveal.

See `experts/ksparse.py`. Every layer has equally many candidates, and every probe equally many
tokens, half of them of the class. Each window is entirely in the training, selection or test set.

Shapes: F hidden units.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from polyad.model.feedforward import DenseFeedForward
from polyad.model.mxd.layer import SparseTable
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel import comm
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.experts.ksparse import (
    OF_A_CLASS,
    Choice,
    Hidden,
    Place,
    Probe,
    Routes,
    best,
    one_thread,
    probe,
)
from polyad.train.experts.probing import EVERY, MOST_LAYERS, routed_layers
from polyad.train.experts.token_classes import labellings
from polyad.train.measures.measure import Examination, Result, needs_one_process, needs_text
from polyad.train.reading import Evaluated, read
from polyad.train.results import aligned
from polyad.train.tasks.samples import TextSamples
from polyad.train.tasks.text import TextTask

FEED_FORWARD = re.compile(r"blocks\.\d+\.feed_forward")


@dataclass(frozen=True, kw_only=True)
class KSparseOptions:
    """What to probe."""

    layers: Sequence[str] = ()
    """Blocks by number, or `all`; empty: the first, the middle and the last."""
    units: Sequence[str] = ("1", "8")
    samples: int = 400
    """Tokens per probe, half of them of the class."""
    candidates: int = 8
    """Number of random experts to probe in each layer."""
    tokens: int = 65_536
    """Approximate number of tokens to read."""
    seed: int = 0
    """Seeds the choice of experts and tokens."""


class Found(NamedTuple):
    """The probes of a class, a layer and a number of units, one per candidate."""

    experts: tuple[int, ...]
    """The candidates; empty for a dense layer."""
    probes: tuple[Probe, ...]
    by_chance: tuple[Probe, ...]
    """The same with shuffled labels."""

    def to_json(self) -> dict[str, Any]:
        """JSON values: F1 on test tokens."""
        number = best(self.probes)
        return {
            "expert": self.experts[number] if self.experts else None,
            "units": self.probes[number].units,
            "f1": self.probes[number].test,
            "f1_validation": self.probes[number].validation,
            "f1_mean": fmean(each.test for each in self.probes),
            "f1_shuffled": self.by_chance[best(self.by_chance)].test,
            "candidates": len(self.probes),
        }


@dataclass(frozen=True, kw_only=True)
class Probed(Result):
    """How well hidden units reveal classes of tokens."""

    tokens: int
    samples: int
    candidates: int
    units: Sequence[int]
    found: Mapping[str, Mapping[str, Mapping[int, Found]]]
    """Probes by layer title, class, and k."""
    left_out: Mapping[str, Mapping[str, int]]
    """By layer and class, candidates with too few tokens of the class, or of others."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "tokens_read": self.tokens,
            "samples": self.samples,
            "candidates": self.candidates,
            "units": list(self.units),
            "layers": {
                layer: {name: {str(k): found for k, found in by_k.items()}
                        for name, by_k in classes.items()}
                for layer, classes in self.found.items()
            },
            "left_out": self.left_out,
        }  # fmt: skip

    def amount(self) -> str:
        """The number of tokens, in words."""
        return f": {self.tokens:,} tokens"

    def facts(self) -> list[tuple[str, str]]:
        """The size of a probe."""
        return [
            (
                "per probe",
                f"{self.samples} tokens, half of them in the class; half are used for training",
            ),
            ("candidates", f"{self.candidates} experts per layer; a dense layer counts as one"),
        ]

    def rows(self) -> list[str]:
        """A line for each layer and class."""
        heads = ("best", "mean", "shuffled")
        table: list[tuple[str, ...]] = [("layer", "class", "candidates", "expert",
                  *(f"{head} k={k}" for k in self.units for head in heads))]  # fmt: skip
        for layer, classes in self.found.items():
            for name, by_k in classes.items():
                told = [found.to_json() for found in by_k.values()]
                expert, cells = told[0]["expert"], []
                for each in told:
                    cells += [f"{each[f'f1{key}']:.3f}" for key in ("", "_mean", "_shuffled")]
                where = "-" if expert is None else f"{expert}"
                table.append((layer, name, f"{told[0]['candidates']}", where, *cells))
                layer = ""
        lines = [
            "",
            "F1 on test tokens with k hidden units: of the candidate that is best on validation "
            "tokens, the mean of all candidates,",
            "and of the best with shuffled labels; a class can be read off where the first is far "
            "above the last",
            *aligned(table, "<<>"),
        ]
        missing = [
            f"{name} ({layer})"
            for layer, classes in self.left_out.items()
            for name in classes
            if name not in self.found[layer]
        ]
        if missing:
            lines += ["", f"too few tokens for a probe: {', '.join(missing)}"]
        return lines


class KSparse(Examination):
    """Probes hidden units for classes of tokens."""

    name = "experts probe"
    doing = "probing hidden units"
    needs_whole = "hidden units are read by hooks on a whole model"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> KSparseOptions:
        """The fields of `KSparseOptions`."""
        needs_text(cls.name, opened)
        asked = KSparseOptions(**options)
        for each in asked.units:
            if not (each.isascii() and each.isdecimal() and int(each)):
                raise ConfigError(f"--units: {each!r} is not a whole number of at least 1")
        if asked.samples % OF_A_CLASS:
            raise ConfigError(f"--samples: {asked.samples} is not a multiple of {OF_A_CLASS}")
        return asked

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        asked: KSparseOptions,
        model: nn.Module,
        world: comm.World,
    ) -> Probed:
        """Reads the text twice: for the experts of tokens, and for their hidden units."""
        needs_one_process(cls.name, world)
        ks = [int(each) for each in asked.units]
        places = _places(model, str(opened.weights.folder), asked.layers, max(ks))
        assert isinstance(opened.task, TextTask)
        text = TextSamples(opened.task, split, asked.tokens)
        ways = labellings(text.tokenizer, text.stream, text.length)
        routes = Routes(places, ways, text)
        layers = [each for each in routed_layers(model) if each.name in routes.used]
        read(model, layers, text, (routes,), batch_size=opened.batch_size, told="read experts")
        choice = Choice(
            *(places, ways, routes),
            samples=asked.samples,
            candidates=asked.candidates,
            seed=asked.seed,
        )
        hidden = Hidden(model, choice.tokens, text)
        with hidden.reading():
            read(model, [], text, (hidden,), batch_size=opened.batch_size, told="read units")
        return Probed(
            tokens=int((routes.label_JM[0] >= 0).sum()),
            samples=asked.samples,
            candidates=asked.candidates,
            units=ks,
            found=_probed(choice, hidden, ks, asked.seed),
            left_out=choice.left_out,
        )


def _places(
    model: nn.Module, place: str, blocks: Sequence[str], most_units: int
) -> dict[str, Place]:
    """Returns the feed-forwards of blocks by module name.

    Raises:
        ConfigError: a block has no units that belong to an expert or to all tokens, or too few.
    """
    there: dict[str, Place] = {}
    for name, module in model.named_modules():
        if FEED_FORWARD.fullmatch(name) is None:
            continue
        block = name.split(".")[1]
        if isinstance(module, SelectingMoE):
            there[block] = Place(name, module.config.num_experts, module.experts.stacked().up)
        elif isinstance(module, DenseFeedForward):
            there[block] = Place(name, 0, module.up.weight.T)
        elif isinstance(module, SparseTable):  # its units are its expert weights
            there[block] = Place(name, 0, module.table.T)
    if not there:
        raise ConfigError(
            f"{place}: no block can be probed: dense feed-forwards, layers that select experts, "
            f"transcoders and mixtures of decoders can"
        )
    for block in () if list(blocks) == [EVERY] else blocks:
        if block not in there:
            raise ConfigError(
                f"--layers: {block} is not allowed: blocks that can be probed are "
                f"{', '.join(there)}"
            )
    chosen = list(there) if list(blocks) == [EVERY] else list(blocks)
    if not chosen:
        every = list(there)
        chosen = (
            every if len(every) <= MOST_LAYERS else [every[0], every[len(every) // 2], every[-1]]
        )
    for block in chosen:
        if (size := there[block].up.shape[-1]) < most_units:
            raise ConfigError(
                f"--units: {most_units} is more than the {size} hidden units in block {block}"
            )
    return {there[block].name: there[block] for block in there if block in chosen}


def _probed(
    choice: Choice, hidden: Hidden, ks: Sequence[int], seed: int
) -> dict[str, dict[str, dict[int, Found]]]:
    """All probes by layer title, class, and k."""
    found: dict[str, dict[str, dict[int, Found]]] = {
        place.title: {} for place in choice.places.values()
    }
    total = sum(map(len, choice.probes.values()))
    report, done = Progress("probe", total, "probes"), 0
    with one_thread():
        for (name, title), some in choice.probes.items():
            place, chance = choice.places[name], np.random.default_rng([seed, len(found), done])
            parts = [hidden.parts(name, expert, tokens) for expert, tokens in some]
            shuffled = [each.shuffled(chance) for each in parts]
            found[place.title][title] = {
                k: Found(
                    experts=tuple(expert for expert, _ in some) if place.experts else (),
                    probes=tuple(probe(each, k) for each in parts),
                    by_chance=tuple(probe(each, k) for each in shuffled),
                )
                for k in ks
            }
            done += len(some)
            report(done / total)
    return found
