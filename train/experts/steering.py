"""Steering: shifts the residual stream towards what one expert works on.

    x <- x + sum of strength * g        x: input of a block, at every token, including the prompt

g is the expert's column of that block's gate, not normalized, so that a strength of 1 adds the
column itself. A gate that reads the residual stream then gives the expert strength * |g|^2 more
score and every other expert strength * (its column . g) more, before normalization, apart from
effects through the block's attention. Negative strengths steer away.

With linear and random scores of a sparse mixture g is the row of the score's weight; with a cosine
score g is the expert's direction mapped back through the projection.

On held-out text two effects are measured: the change of the loss by class of token, which shows
where a steered model is worse; and the probability of the classes of the next token, which shows
what it would write.

Source: Oldfield et al. 2024, appendix G.2, which adds the same vectors ("cluster centers") to every
token's activations before a muMoE layer.

Shapes: D width, N experts of a level, B windows, P predicted tokens, V vocabulary, K classes of all
labelings of the next token, G groups of windows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from polyad.model.block import Block
from polyad.model.decoder import Decoder
from polyad.train.errors import ConfigError
from polyad.train.experts.class_changes import (
    Change,
    ChangeSums,
    ClassChanges,
    mean_of,
)
from polyad.train.experts.information import GroupedSums, Matrix, Summed, intervals
from polyad.train.experts.interventions import finite, whole
from polyad.train.experts.token_classes import ClassColumns, classes_of_vocabulary, slices_of
from polyad.train.tasks.samples import Passages, TextSamples, embedded, losses, through

_FORM = "layer=N,expert=N,strength=X, and level=N of a hierarchy"


@dataclass(frozen=True, kw_only=True)
class Steering:
    """An expert, and how far to steer towards it."""

    layer: int
    """Number of the block, from 0."""
    expert: int
    """Number of the expert in its level, from 0."""
    strength: float
    """Factor of the expert's column that is added."""
    level: int = 0
    """The level of a hierarchy of experts, from 0."""

    def __str__(self) -> str:
        """The text that `parse_steering` reads."""
        level = f"level={self.level}," if self.level else ""
        return f"layer={self.layer},{level}expert={self.expert},strength={self.strength:g}"


def parse_steering(text: str) -> Steering:
    """Reads `layer=5,expert=37,strength=8`, with `level=1` of a hierarchy.

    Raises:
        ConfigError: a key is missing, unknown or given twice, or a value is not a valid number.
    """
    keys, values = [field.name for field in fields(Steering)], dict[str, Any]()
    for part in text.split(","):
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise ConfigError(f"--steer {text}: {part!r} is not key=value; needed: {_FORM}")
        if key not in keys:
            near = "".join(f"; the nearest is {name}" for name in get_close_matches(key, keys, 1))
            raise ConfigError(f"--steer {text}: unknown key {key!r}{near}; needed: {_FORM}")
        if key in values:
            raise ConfigError(f"--steer {text}: {key} is given twice")
        read = finite if key == "strength" else whole
        values[key] = read(value, f"--steer {text}", key)
    if lacking := [key for key in ("layer", "expert", "strength") if key not in values]:
        raise ConfigError(f"--steer {text}: {lacking[0]} is missing; needed: {_FORM}")
    return Steering(**values)


@contextmanager
def steered(model: nn.Module, steerings: Sequence[Steering]) -> Iterator[None]:
    """Steers a model's forward passes as long as the context is open.

    Args:
        model: a GPT-2 on one device.
        steerings: any number of steerings; those of the same block are summed.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """
    shifts: dict[int, Tensor] = {}
    for steering in steerings:
        g_D = gate_column(model, steering)
        shift_D = steering.strength * g_D
        shifts[steering.layer] = shifts.get(steering.layer, torch.zeros_like(g_D)) + shift_D
    blocks = _blocks(model)
    hooks = [
        blocks[layer].register_forward_pre_hook(_adding(shift_D))
        for layer, shift_D in shifts.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gate_column(model: nn.Module, steering: Steering) -> Tensor:
    """Returns the vector that a strength of 1 adds.

    Args:
        model: a GPT-2.
        steering: which expert.

    Returns:
        [D], at least fp32.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """
    gates = [block.feed_forward.gate_columns() for block in _blocks(model)]
    gated = [layer for layer, levels in enumerate(gates) if levels]
    if not gated:
        raise ConfigError(f"--steer {steering}: the model is dense: no layer has experts")
    if steering.layer >= len(gates):
        allowed = _range(len(gates))
        raise ConfigError(f"--steer {steering}: layer {steering.layer}: the model has {allowed}")
    levels = gates[steering.layer]
    if not levels:
        raise ConfigError(
            f"--steer {steering}: layer {steering.layer} is dense; with experts: "
            f"{', '.join(map(str, gated))}"
        )
    if steering.level >= len(levels):
        allowed = _range(len(levels))
        raise ConfigError(
            f"--steer {steering}: level {steering.level}: layer {steering.layer} has {allowed}"
        )
    g_ND = levels[steering.level]
    if steering.expert >= len(g_ND):
        where = f"level {steering.level} of " if len(levels) > 1 else ""
        raise ConfigError(
            f"--steer {steering}: expert {steering.expert}: {where}layer {steering.layer} has "
            f"{_range(len(g_ND))}"
        )
    g_D = g_ND[steering.expert].detach()
    return g_D.to(torch.promote_types(g_D.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True)
class Load:
    """Effect of a steering on its expert's share of routing in its level."""

    steering: Steering
    column_length: float
    load: float
    load_unsteered: float

    def to_json(self) -> dict[str, Any]:
        """JSON values: the keys of the steering, too."""
        found = dict(vars(self))
        return asdict(found.pop("steering")) | found

    def __str__(self) -> str:
        """A line for the console."""
        one = self.steering
        level = f"level {one.level}, " if one.level else ""
        return (
            f"steered: layer {one.layer}, {level}expert {one.expert}: {one.strength:g} times its "
            f"gate's column, of length {self.column_length:.3g}; load on these tokens "
            f"{self.load:.3f}, without {self.load_unsteered:.3f}"
        )


@torch.inference_mode()
def loads_of(model: nn.Module, steerings: Sequence[Steering], ids: Sequence[int]) -> list[Load]:
    """Measures the effect of steering on routing: the same tokens with all steerings and with none.

    Args:
        model: a GPT-2 in evaluation mode.
        steerings: as in `steered`.
        ids: tokens, at most the model's `sequence_length`.
    """
    ids_BT = torch.tensor([list(ids)], device=next(model.parameters()).device)
    before = {stats.name: stats for stats in model(ids_BT).routing}
    with steered(model, steerings):
        after = {stats.name: stats for stats in model(ids_BT).routing}
    results = []
    for steering in steerings:
        name = f"blocks.{steering.layer}.feed_forward"
        # The levels of a hierarchy are concatenated.
        expert = sum(before[name].levels[: steering.level]) + steering.expert
        results.append(
            Load(
                steering=steering,
                column_length=gate_column(model, steering).norm().item(),
                load=after[name].load_E[expert].item(),
                load_unsteered=before[name].load_E[expert].item(),
            )
        )
    return results


def _adding(shift_D: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, *others = args
        return x_BTD + shift_D.to(x_BTD.dtype), *others

    return hook


def _blocks(model: nn.Module) -> list[Block]:
    assert isinstance(model, Decoder)
    return [block for block in model.blocks if isinstance(block, Block)]


def _range(count: int) -> str:
    return "0 alone" if count == 1 else f"0 to {count - 1}"


@dataclass(frozen=True, kw_only=True)
class ClassMass:
    """The probability of classes of the next token, for one labeling of tokens."""

    classes: Sequence[str]
    before_K: Matrix
    """Mean probability of each class without steering."""
    change_3K: Matrix
    """Its change under steering, and the ends of the interval."""

    def change(self, column: int) -> Change:
        """The change of a class."""
        return Change(*self.change_3K[:, column].tolist())


@dataclass(frozen=True, kw_only=True)
class SteeringEffect:
    """The joint effect of steerings."""

    steerings: Sequence[Steering]
    by_class: Mapping[str, ClassChanges]
    """Changes of the loss; one row."""
    mass: Mapping[str, ClassMass]
    """The probability of the classes of the next token."""

    def frames(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of tables: changes of the loss (`steering`), of probabilities (`next_tokens`)."""
        losses = [
            {"by": by, **row}
            for by, each in self.by_class.items()
            for row in each.rows(0, own=False)
        ]
        masses = [
            {
                "by": by,
                "class": name,
                "probability": float(mass.before_K[column]),
                **mass.change(column).columns("change"),
            }
            for by, mass in self.mass.items()
            for column, name in enumerate(mass.classes)
        ]
        return {"steering": losses, "next_tokens": masses}


class SteeredReading:
    """Accumulates the effects of steering.

    Args:
        model: a GPT-2 in evaluation mode, on one device.
        steerings: all at once.
        text: the text to read.
        classes: classes of its tokens.

    Raises:
        ConfigError: a block, level or expert that the model does not have.
    """

    def __init__(
        self,
        model: Decoder,
        steerings: Sequence[Steering],
        text: TextSamples,
        classes: ClassColumns,
    ) -> None:
        for steering in steerings:
            gate_column(model, steering)
        self._model, self._steerings, self._windows = model, steerings, text.rows
        device = next(model.parameters()).device
        self._losses = ChangeSums(1, classes.classes, text.rows, device)
        vocabulary = classes_of_vocabulary(text.tokenizer, text.stream)
        self._mass_classes = {name: classes for name, (classes, _) in vocabulary.items()}
        tables = [one_hot(class_V, len(classes)) for classes, class_V in vocabulary.values()]
        self._class_VK = torch.cat(tables, -1).float().to(device)
        width = 2 * self._class_VK.shape[1] + 1
        self._masses = GroupedSums(text.rows, [width], device)

    @torch.inference_mode()
    def add(self, passages: Passages, label_JBP: Tensor, x_BTD: Tensor, loss_BP: Tensor) -> None:
        """Adds a batch.

        Args:
            passages: the windows.
            label_JBP: class columns; -1: the token is not counted.
            x_BTD: output of the last block of the unchanged model.
            loss_BP: loss of the unchanged model.
        """
        with steered(self._model, self._steerings):
            y_BTD = through(self._model, embedded(self._model, passages))
        change_BP = losses(self._model, y_BTD, passages).double() - loss_BP.double()
        number_B, counted_BP = passages.number_B, passages.scored_BP
        self._losses.add_whole(label_JBP, number_B, loss_BP)
        row_B = torch.zeros_like(number_B)
        self._losses.add(label_JBP, number_B, row_B, change_BP, torch.ones_like(counted_BP))
        for window, group in enumerate(self._masses.group_of(number_B).tolist()):
            one = slice(window, window + 1)
            counted_P = counted_BP[window]
            masses = [self._mass(x[one], counted_P) for x in (x_BTD, y_BTD)]
            self._masses.sums_G[group] += torch.cat([*masses, counted_P.sum().view(1).double()])

    def _mass(self, x_1TD: Tensor, counted_T: Tensor) -> Tensor:
        """Sums the probabilities of each class [K] over one window, since logits take much
        memory."""
        logits_NV = self._model.score(x_1TD)[0][counted_T]
        p_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).softmax(-1)
        # A model may have more tokens than its tokenizer; those have no class.
        known_NV = p_NV[:, : len(self._class_VK)]
        return (known_NV @ self._class_VK.to(p_NV.dtype)).double().sum(0)

    def result(self, summed: Summed = lambda counts: counts) -> SteeringEffect:
        """Returns the result.

        Args:
            summed: sums over processes.

        Raises:
            ConfigError: losses are not finite.
        """
        by_class = self._losses.result("steered", summed)
        mass_G = self._masses.result(summed, "steered: probabilities are not finite")
        columns = self._class_VK.shape[1]

        def change(sums: Matrix) -> Matrix:
            added = sums[..., columns : 2 * columns] - sums[..., :columns]
            return mean_of(added, sums[..., [-1]])

        change_3K = intervals(change, mass_G, self._windows)
        total = mass_G.sum(0)
        found = {
            name: ClassMass(
                classes=self._mass_classes[name],
                before_K=mean_of(total[part], total[-1]),
                change_3K=change_3K[:, part],
            )
            for name, part in slices_of(self._mass_classes).items()
        }
        return SteeringEffect(steerings=self._steerings, by_class=by_class, mass=found)
