"""k-sparse probes: whether a few hidden units reveal a class of tokens (2604.02178).

The k units whose means differ most between tokens of the class and others are chosen on training
tokens, and a logistic regression on them predicts the class, scored by F1. The best of many
candidates is selected on validation tokens and scored on test tokens: if it were selected on its 25
test tokens, the best of 1,024 candidates of pure noise would have an F1 of about 0.8.

Shapes: N tokens of a probe or of an expert, M tokens read, B windows of a batch, J labelings of
tokens, F hidden units, S experts, D width.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from polyad.model.mxd.gate import SparseGate
from polyad.model.mxd.layer import SparseTable
from polyad.model.smoe.layer import SelectingMoE
from polyad.model.smoe.selection import spread
from polyad.train.experts.probing import uncompiled
from polyad.train.experts.token_classes import Labelling
from polyad.train.tasks.samples import TextSamples

Floats = npt.NDArray[np.floating[Any]]
Numbers = npt.NDArray[np.int64]
TokensOfParts = list[tuple[Numbers, npt.NDArray[np.bool_]]]
"""Tokens of each part, and whether they are of the class."""
SHARES = (2, 1, 1)
"""Windows out of four for training, validation and test."""
OF_A_CLASS = 2 * sum(SHARES)
"""A probe's number of tokens is a multiple of this: both kinds in each part."""


class Labelled(NamedTuple):
    """Tokens with labels, to train or test a probe."""

    hidden_NF: Floats
    label_N: npt.NDArray[np.bool_]
    """Whether a token belongs to the class."""


class Parts(NamedTuple):
    """Tokens to train, select and test a probe."""

    train: Labelled
    validation: Labelled
    test: Labelled

    def shuffled(self, chance: np.random.Generator) -> "Parts":
        """The same tokens with shuffled labels, equally many of each in each part."""
        return Parts(*(each._replace(label_N=chance.permutation(each.label_N)) for each in self))


class Probe(NamedTuple):
    """A logistic regression on k units."""

    units: tuple[int, ...]
    """The units, the one whose means differ most first."""
    validation: float
    """F1."""
    test: float


def one_thread() -> AbstractContextManager[object]:
    """A context with one thread, for many small regressions that do not profit from more."""
    from threadpoolctl import threadpool_limits

    found: AbstractContextManager[object] = threadpool_limits(1)
    return found


def probe(parts: Parts, k: int) -> Probe:
    """Chooses k units and fits a probe on them.

    Args:
        parts: the tokens.
        k: number of hidden units, at most F.
    """
    from sklearn.linear_model import LogisticRegression

    hidden_NF, label_N = parts.train
    mean_2F = (hidden_NF[label_N].mean(0), hidden_NF[~label_N].mean(0))
    units = np.argsort(-np.abs(mean_2F[0] - mean_2F[1]), kind="stable")[:k]
    model = LogisticRegression(C=1.0, class_weight="balanced", max_iter=1000)
    model.fit(hidden_NF[:, units], label_N)
    coefficients_k, (bias,) = model.coef_[0], model.intercept_
    validation, test = (
        _f1(each.label_N, each.hidden_NF[:, units] @ coefficients_k + bias > 0)
        for each in parts[1:]
    )
    return Probe(tuple(units.tolist()), validation, test)


def best(probes: Sequence[Probe]) -> int:
    """The best candidate on validation tokens; the first in case of a tie."""
    return max(range(len(probes)), key=lambda number: probes[number].validation)


def _f1(label_N: npt.NDArray[np.bool_], predicted_N: npt.NDArray[np.bool_]) -> float:
    right = int((label_N & predicted_N).sum())
    return 2 * right / max(1, int(label_N.sum()) + int(predicted_N.sum()))


class Place(NamedTuple):
    """A feed-forward to probe."""

    name: str
    experts: int
    """Number of experts; 0: dense, a single candidate."""
    up: Tensor
    """The first layer, or those of all experts [..., F]."""

    @property
    def title(self) -> str:
        """The title of the layer."""
        return f"block {self.name.split('.')[1]}"


class Routes:
    """Collects the classes of all tokens, and the experts that they use.

    Args:
        places: the feed-forwards to probe.
        ways: labelings of tokens.
        text: the text to read.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self, places: Mapping[str, Place], ways: Sequence[Labelling], text: TextSamples
    ) -> None:
        self._ways, self.length, total = ways, text.length, text.rows * text.length
        self.label_JM = np.full((len(ways), total), -1)
        """-1: the token is not counted."""
        self.used = {
            name: np.zeros((total, place.experts), dtype=np.bool_)
            for name, place in places.items()
            if place.experts
        }

    def add(self, reading: Any) -> None:
        """Adds a batch."""
        passages, number_B = reading.batch, reading.number_R.cpu().numpy()
        place_M = (number_B[:, None] * self.length + np.arange(self.length)).reshape(-1)
        counts_M = passages.scored_BP.flatten().cpu().numpy()
        for row, way in enumerate(self._ways):
            class_M = way.of(passages.ids_BT.cpu()).flatten().numpy()
            self.label_JM[row, place_M] = np.where(counts_M, class_M, -1)
        for name, used_MS in self.used.items():
            used_MS[place_M] = (reading.of_all_tokens[name].coefficients() != 0).cpu().numpy()


class Choice:
    """The tokens of each probe.

    Args:
        places: the feed-forwards to probe.
        ways: labelings of tokens.
        routes: classes and experts of the tokens read.
        samples: tokens per probe.
        candidates: number of experts to probe per layer.
        seed: seed of the choice.
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        ways: Sequence[Labelling],
        routes: Routes,
        *,
        samples: int,
        candidates: int,
        seed: int,
    ) -> None:
        self.places = places
        self.probes: dict[tuple[str, str], list[tuple[int, TokensOfParts]]] = {}
        """The candidates and their tokens, by layer and class."""
        self.left_out: dict[str, dict[str, int]] = {}
        window_M = np.arange(routes.label_JM.shape[1]) // routes.length
        part_M = np.repeat(np.arange(len(SHARES)), SHARES)[window_M % sum(SHARES)]
        for number, (name, place) in enumerate(places.items()):
            order = list(range(max(1, place.experts)))
            random.Random(f"{seed} {name}").shuffle(order)
            for row, way in enumerate(ways):
                for column, title in enumerate(way.classes):
                    some: list[tuple[int, TokensOfParts]] = []
                    missing = 0
                    for expert in order:
                        chance = np.random.default_rng([seed, number, expert, row, column])
                        label_M = routes.label_JM[row]
                        if place.experts:
                            label_M = np.where(routes.used[name][:, expert], label_M, -1)
                        tokens = _balanced(label_M, column, part_M, samples, chance)
                        if tokens is None:
                            missing += 1
                        elif len(some) < candidates:
                            some.append((expert, tokens))
                    key = name, f"{way.name}: {title}"
                    if some:
                        self.probes[key] = some
                    if missing:
                        self.left_out.setdefault(place.title, {})[key[1]] = missing
        wanted: dict[tuple[str, int], list[Numbers]] = {}
        for (name, _), each in self.probes.items():
            for expert, tokens in each:
                wanted.setdefault((name, expert), []).extend(token_N for token_N, _ in tokens)
        self.tokens = {key: np.unique(np.concatenate(each)) for key, each in wanted.items()}
        """The tokens whose hidden units are needed, by layer and expert."""


def _balanced(
    label_M: Numbers, column: int, part_M: Numbers, samples: int, chance: np.random.Generator
) -> TokensOfParts | None:
    """Draws random tokens of each part, half of them of a class, with their labels."""
    found = []
    for part, share in enumerate(SHARES):
        size = samples * share // OF_A_CLASS
        kinds = [
            np.flatnonzero((part_M == part) & of_kind_M)
            for of_kind_M in (label_M == column, (label_M >= 0) & (label_M != column))
        ]
        if min(map(len, kinds)) < size:
            return None
        token_N = np.concatenate([chance.choice(each, size, replace=False) for each in kinds])
        found.append((token_N, np.repeat([True, False], size)))
    return found


class Hidden:
    """Collects hidden units of some tokens.

    Args:
        model: in evaluation mode, whole on this process.
        tokens: tokens of each layer and expert, in order.
        text: the text to read.
    """

    blocks: Sequence[int] = ()

    def __init__(
        self, model: nn.Module, tokens: Mapping[tuple[str, int], Numbers], text: TextSamples
    ) -> None:
        self._model, self._tokens = model, tokens
        self._rows, self._length = text.rows, text.length
        self._seen: dict[str, Tensor] = {}
        self._kept: dict[tuple[str, int], npt.NDArray[np.float32]] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which inputs of experts, and units of other layers, are collected."""

        def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
            def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> None:
                if isinstance(module, SparseGate):
                    self._seen[name] = spread(output, module.num_experts)
                else:
                    self._seen[name] = arguments[0].flatten(0, -2)

            return hook

        with ExitStack() as stack:
            stack.enter_context(uncompiled(self._model))
            for name in {name for name, _ in self._tokens}:
                module = self._model.get_submodule(name)
                read_by = {SelectingMoE: "dispatcher", SparseTable: "gate"}
                part = next((p for kind, p in read_by.items() if isinstance(module, kind)), "down")
                handle = module.get_submodule(part).register_forward_hook(keep(name))
                stack.callback(handle.remove)
            yield

    def add(self, reading: Any) -> None:
        """Adds a batch."""
        number_B = reading.number_R.cpu().numpy()
        row_of = np.full(self._rows, -1)
        row_of[number_B] = np.arange(len(number_B))
        for (name, expert), token_N in self._tokens.items():
            row_N = row_of[token_N // self._length]
            here_N = row_N >= 0
            if not here_N.any():
                continue
            flat_N = (row_N * self._length + token_N % self._length)[here_N]
            x_ND = self._seen[name][torch.from_numpy(flat_N).to(self._seen[name].device)]
            module = self._model.get_submodule(name)
            if isinstance(module, SelectingMoE):
                x_ND = module.experts.inner(x_ND, expert)
            values = x_ND.float().cpu().numpy()
            shape = len(token_N), values.shape[1]
            kept = self._kept.setdefault((name, expert), np.zeros(shape, dtype=np.float32))
            kept[here_N] = values

    def parts(self, name: str, expert: int, tokens: TokensOfParts) -> Parts:
        """The tokens of a probe.

        Args:
            name: the layer's name.
            expert: the expert's number.
            tokens: tokens of each part.
        """
        kept, known_N = self._kept[name, expert], self._tokens[name, expert]
        return Parts(
            *(Labelled(kept[np.searchsorted(known_N, each)], label) for each, label in tokens)
        )
