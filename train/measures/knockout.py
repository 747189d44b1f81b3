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
from polyad.train.experts.knockout import ExpertWithout, KnockOut, LayerWithout
from polyad.train.experts.probing import (
    RoutedLayer,
    check_experts,
    choose_layers,
    columns_of,
    routed_layers,
)
from polyad.train.experts.steering import SteeredReading, Steering, SteeringEffect, gate_column
from polyad.train.experts.token_classes import ClassColumns
from polyad.train.measures.measure import Measure, Result, Subject
from polyad.train.measures.streamed_knockout import StreamedKnockOut
from polyad.train.reading import Evaluated, Reading
from polyad.train.results import aligned
from polyad.train.tasks.samples import TextSamples, losses
from polyad.train.tasks.text import TextTask

TOKENS = 65_536
"""Default for the approximate number of tokens to read."""
MOST_EXPERTS = 16
"""Maximum number of rows displayed per layer; the JSON output has all experts."""
MOST_CLASSES = 3
"""Maximum number of classes named per expert."""
NAMED = ("characters", "frequency")
"""Labelings of predicted tokens that are displayed for steering."""

LEAD = (
    "",
    "change in loss without each expert, in nats per token, over all tokens and over the tokens "
    "that use it,",
    "and the token classes whose loss rises most, beyond noise; 95% intervals over windows, * "
    "excludes 0",
)
"""Headings of tables of experts."""

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KnockedOut(Result):
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

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "windows_read": self.windows,
            "sequence_length": self.length,
            "tokens_scored": self.tokens,
            "loss": self.loss,
            "layers": {each.layer.name: each for each in self.layers},
            "steering": self.steering,
        }

    def amount(self) -> str:
        """The number of tokens, in words."""
        return f": {self.tokens:,} tokens in {self.windows:,} windows"

    def facts(self) -> list[tuple[str, str]]:
        """The loss of the unchanged model."""
        return [("loss", f"{self.loss:.4f} nats per token")]

    def rows(self) -> list[str]:
        """A table for each layer, and tables of steering."""
        lines = [*LEAD]
        for layer in self.layers:
            lines += ["", *layer_rows(layer)]
        if self.steering is not None:
            lines += ["", *_steering_rows(self.steering)]
        return lines


def layer_rows(layer: LayerWithout) -> list[str]:
    """Formats the experts of a layer that matter most."""
    every, experts = layer.by_class["all"], list(layer.experts().items())
    order = sorted(range(len(experts)), key=lambda row: -abs(experts[row][1].change.value))
    shown = sorted(order[:MOST_EXPERTS])
    title = (
        f"{layer.layer.name}: {layer.windows_again * layer.length:,} tokens recomputed, "
        f"{100 * layer.share_of_pairs:.1f}% of all token-expert pairs"
    )
    if len(shown) < len(experts):
        title += f"; the {len(shown)} of {len(experts):,} experts that matter most"
    table: list[Row] = [("expert", "tokens", "all", "its own")]
    for row in shown:
        name, without = experts[row]
        share = every.own_EC[row, 0] / max(1, every.tokens_C[0])
        changes = (each.shown() for each in (without.change, without.own_change))
        table.append((name, f"{100 * share:.1f}%", *changes))
    heads, *rows = aligned(table, ">><")
    lines = [title, heads]
    for line, row in zip(rows, shown, strict=True):
        lines += [line, *_most_harmed(experts[row][1])]
    return lines


def _most_harmed(without: ExpertWithout) -> list[str]:
    """The classes that an expert is for, by predicted and by input tokens."""
    lines = []
    for side, classes in without.harmed.items():
        said = [
            f"{one.title} {one.change.value:+.3f} [{one.change.low:+.3f}, {one.change.high:+.3f}]"
            for one in classes[:MOST_CLASSES]
        ]
        lines.append(f"{'':16}{side + ':':10} {', '.join(said) or 'none beyond noise'}")
    return lines


def _steering_rows(steering: SteeringEffect) -> list[str]:
    changes: list[Row] = [("", "class", "tokens", "loss", "its change")]
    for kind in ("all", *(f"predicted {name}" for name in NAMED)):
        each = steering.by_class[kind]
        for column, name in enumerate(each.classes):
            if each.tokens_C[column]:
                numbers = (f"{int(each.tokens_C[column]):,}", f"{each.loss_C[column]:.4f}")
                changes.append((kind, name, *numbers, each.change(0, column).shown()))
    masses: list[Row] = [("", "class", "probability", "its change")]
    for kind, mass in steering.mass.items():
        for column, name in enumerate(mass.classes):
            change = mass.change(column).shown()
            masses.append((f"next {kind}", name, f"{mass.before_K[column]:.4f}", change))
    steered = [f"--steer {each}" for each in steering.steerings]
    return [*steered, "", *aligned(_once(changes), "<"), "", *aligned(_once(masses), "<")]


def _once(table: list[Row]) -> list[Row]:
    """Blanks first cells that repeat the row above."""
    above = ["", *(row[0] for row in table)]
    return [
        ("" if row[0] == before else row[0], *row[1:])
        for row, before in zip(table, above, strict=False)
    ]


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
    told = "leave out experts"

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
                    length=text.length,
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
    def of(cls, opened: Evaluated, split: str, asked: Options, model: nn.Module) -> Self:
        """The measure of `polyad experts knockout`."""
        chosen = chosen_experts(model, str(opened.weights.folder), asked)
        assert isinstance(opened.task, TextTask)
        text = TextSamples(opened.task, split, asked.tokens, hidden=True)
        subject = Subject(model, [layer for layer, _ in chosen], text, opened.batch_size)
        return cls(subject, [columns for _, columns in chosen], asked.steerings)

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
        streamed.read(self.told)

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

    def result(self, summed: Summed = lambda values: values) -> KnockedOut:
        """The result."""
        steering = None if self._steered is None else self._steered.result(summed)
        return KnockedOut(
            windows=self._text.rows,
            length=self._text.length,
            layers=[each.result(summed) for each in self._layers],
            together=[each.result(summed) for each in self._together],
            steering=steering,
        )


def chosen_experts(
    model: nn.Module, place: str, asked: Options
) -> list[tuple[RoutedLayer, list[int]]]:
    """Returns the layers, and the columns of the experts to remove in each."""
    routed, steerings, experts = routed_layers(model), asked.steerings, asked.experts
    if not routed:
        raise ConfigError(f"{place}: its model has no experts")
    if steerings and not isinstance(model, Decoder):
        raise ConfigError(f"--steer {steerings[0]}: {place}: only a GPT-2 is steered")
    for steering in steerings:
        gate_column(model, steering)  # raises if it does not exist
    if not steerings or asked.layers or experts:
        layers = choose_layers(routed, asked.layers)
        check_experts(layers, experts)
        return [(layer, columns_of(layer, experts)) for layer in layers]
    by_block = {layer.block: layer for layer in routed}
    chosen: dict[int, set[int]] = {}
    for each in steerings:
        first = sum(by_block[each.layer].levels[: each.level])
        chosen.setdefault(each.layer, set()).add(first + each.expert)
    return [(by_block[block], sorted(columns)) for block, columns in sorted(chosen.items())]
