"""Knockouts: what each expert of a language model is for.

Measures the loss of each class of tokens without the expert; with steering also the loss of the
same classes when text is steered towards it, and what the model then predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from polyad.model.decoder import Decoder
from polyad.parallel import comm
from polyad.parallel.streamed import Streamed
from polyad.train.errors import ConfigError
from polyad.train.experts.actions import CONTRIBUTION, Action
from polyad.train.experts.information import Summed
from polyad.train.experts.knockout import KnockOut, LayerWithout
from polyad.train.experts.probing import (
    RoutedLayer,
    check_experts,
    choose_layers,
    columns_of,
    routed_layers,
)
from polyad.train.experts.steering import SteeredReading, Steering, SteeringEffect, gate_column
from polyad.train.experts.token_classes import ClassColumns
from polyad.train.measures.measure import Measure, Subject
from polyad.train.measures.streamed_knockout import StreamedKnockOut
from polyad.train.reading import Evaluated, Reading
from polyad.train.results import Tables
from polyad.train.tasks.samples import TextSamples, losses
from polyad.train.tasks.text import TextTask

TOKENS = 65_536
"""Default for the approximate number of tokens to read."""
TITLES = {
    "experts": "change in loss without each expert, in nats per token, over all tokens and over "
    "its own; * excludes 0",
    "harmed": "token classes whose loss rises beyond noise without the expert",
    "focus": "for how few classes of tokens the experts of a layer are",
    "steering": "change in loss when the text is steered",
    "next_tokens": "change in the probability of classes of the next token",
}
"""Lines above tables of a text."""


@dataclass(frozen=True, kw_only=True)
class KnockedOut:
    """Losses without each expert, and the effect of steering."""

    windows: int
    length: int
    """Number of tokens per window."""
    layers: Sequence[LayerWithout]
    together: Sequence[LayerWithout] = ()
    """The same for sets of experts."""
    steering: SteeringEffect | None
    """None without steering."""

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return int(self.layers[0].by_class["all"].tokens_C[0])

    @property
    def loss(self) -> float:
        """The mean loss of the unchanged model, in nats per token."""
        return float(self.layers[0].by_class["all"].loss_C[0])

    def tables(self) -> Tables:
        """The same as tables."""
        import pandas as pd

        facts: dict[str, Any] = {
            "windows_read": self.windows,
            "sequence_length": self.length,
            "tokens_scored": self.tokens,
            "loss": self.loss,
            "tokens_recomputed": sum(each.windows_again for each in self.layers) * self.length,
        }
        found = [each.frames() for each in self.layers]
        rows = {name: [row for each in found for row in each[name]] for name in found[0]}
        if self.steering is not None:
            facts["steer"] = [str(each) for each in self.steering.steerings]
            rows |= self.steering.frames()
        frames = {name: pd.DataFrame(each) for name, each in rows.items()}
        titles = {name: title for name, title in TITLES.items() if name in frames}
        return Tables(facts=facts, frames=frames, titles=titles)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which experts to remove, and towards which text is steered."""

    tokens: int = TOKENS
    """Approximate number of tokens to read, in whole windows, spread evenly over the split."""
    layers: Sequence[str] = ()
    """Blocks whose experts are removed, by number, or `all`; empty: the first, middle and last
    block that routes, or with steerings the steered ones."""
    experts: Sequence[str] = ()
    """Experts to remove in each of these; empty: all, or with steerings and without layers those
    steered towards."""
    steerings: Sequence[Steering] = ()
    """Steerings whose joint effect is measured on the same tokens."""


class KnockOuts(Measure):
    """Removes experts one by one.

    Args:
        subject: text that a GPT-2 or a BERT reads, and the layers.
        columns: experts to remove, for each layer.
        steerings: applied all at once; empty: steering is not measured.
        actions: what to do to the experts of each layer; empty: remove them.
        sets: further sets of experts of each layer to treat together.
    """

    name = "knockout"
    doing = "removing experts"
    needs_whole = None
    label = "leave out experts"

    def __init__(
        self,
        subject: Subject,
        columns: Sequence[Sequence[int]],
        steerings: Sequence[Steering] = (),
        actions: Sequence[Action] = (),
        sets: Sequence[Sequence[Sequence[int]]] = (),
    ) -> None:
        super().__init__(subject)
        model, layers, text, _ = subject
        assert isinstance(text, TextSamples)
        self._model, self._text, self._columns = model, text, ClassColumns(text)

        def taken(each: Sequence[Sequence[Sequence[int]]]) -> list[KnockOut]:
            return [
                KnockOut(
                    *(model, layer, some, self._columns.classes),
                    windows=text.rows,
                    action=action,
                )
                for layer, some, action in zip(layers, each, actions, strict=True)
            ]

        actions = actions or [CONTRIBUTION] * len(layers)

        self._layers = taken([[(column,) for column in each] for each in columns])
        self._together = taken(sets) if sets else []
        self.blocks = [layer.block for layer in layers]
        self._steered: SteeredReading | None = None
        if steerings and isinstance(model, Streamed):
            raise ConfigError(
                f"--steer {steerings[0]}: is not allowed block by block; more memory is needed"
            )
        if steerings:
            assert isinstance(model, Decoder)
            self._steered = SteeredReading(model, steerings, text, self._columns)

    @classmethod
    def refusal(cls, opened: Evaluated) -> str | None:
        """Rejects data other than text."""
        if isinstance(opened.task, TextTask):
            return None
        return (
            f"is not allowed with data.kind: {opened.config.data.kind}; text and masked_text have "
            f"it, and images --specialization"
        )

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> Options:
        """Options by the fields of `Options`."""
        super().checked(opened, split)
        return Options(**options)

    @classmethod
    def of(cls, opened: Evaluated, split: str, settings: Options, model: nn.Module) -> Self:
        """The measure of `polyad experts knockout`."""
        chosen = chosen_experts(model, str(opened.weights.folder), settings)
        assert isinstance(opened.task, TextTask)
        text = TextSamples(opened.task, split, settings.tokens, hidden=True)
        subject = Subject(model, [layer for layer, _ in chosen], text, opened.batch_size)
        return cls(subject, [columns for _, columns in chosen], settings.steerings)

    def read(self, world: comm.World | None = None) -> None:
        """Reads the text; block by block if the model is larger than memory."""
        model, layers, _, batch_size = self.subject
        if not isinstance(model, Streamed):
            super().read(world)
            return
        by_layer = [[each] for each in self._layers]
        for takers, together in zip(by_layer, self._together, strict=False):
            takers.append(together)
        streamed = StreamedKnockOut(model, layers, by_layer, self._text, self._columns, batch_size)
        streamed.read(self.label)

    def add(self, reading: Reading) -> None:
        """Adds a batch."""
        passages = reading.batch
        loss_BP = losses(self._model, reading.output, passages)
        label_JBP = self._columns(passages)
        for each in (*self._layers, *self._together):
            x_BTD, name = reading.entering[each.layer.block], each.layer.name
            decision = reading.of_all_tokens[name]
            each.add(x_BTD, passages, label_JBP, loss_BP, decision)
        if self._steered is not None:
            self._steered.add(passages, label_JBP, reading.output, loss_BP)

    def found(self, summed: Summed = lambda values: values) -> KnockedOut:
        """Returns the losses without each expert; all processes call this.

        Args:
            summed: sums over processes.
        """
        steering = None if self._steered is None else self._steered.result(summed)
        return KnockedOut(
            windows=self._text.rows,
            length=self._text.length,
            layers=[each.result(summed) for each in self._layers],
            together=[each.result(summed) for each in self._together],
            steering=steering,
        )

    def result(self, summed: Summed = lambda values: values) -> Tables:
        """The result."""
        return self.found(summed).tables()


def chosen_experts(
    model: nn.Module, place: str, settings: Options
) -> list[tuple[RoutedLayer, list[int]]]:
    """Returns the layers, and the columns of the experts to remove in each."""
    routed, steerings, experts = routed_layers(model), settings.steerings, settings.experts
    if not routed:
        raise ConfigError(f"{place}: its model has no experts")
    if steerings and not isinstance(model, Decoder):
        raise ConfigError(f"--steer {steerings[0]}: {place}: only a GPT-2 is steered")
    for steering in steerings:
        gate_column(model, steering)  # raises if it does not exist
    if not steerings or settings.layers or experts:
        layers = choose_layers(routed, settings.layers)
        check_experts(layers, experts)
        return [(layer, columns_of(layer, experts)) for layer in layers]
    by_block = {layer.block: layer for layer in routed}
    chosen: dict[int, set[int]] = {}
    for each in steerings:
        first = sum(by_block[each.layer].levels[: each.level])
        chosen.setdefault(each.layer, set()).add(first + each.expert)
    return [(by_block[block], sorted(columns)) for block, columns in sorted(chosen.items())]
