"""Classes of tokens that need no tagger: by characters, position and frequency.

Shapes: W windows of a split, B of a batch, T tokens of a window, V tokens of the vocabulary, P
labels: the true ones first, then shifted ones; for predicted tokens P of a window, J labelings.
"""

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyad.data.text.dataset import TokenStream
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.train.tasks.samples import Passages, TextSamples

BINS = 8
"""Number of classes of positions, and of frequencies."""
CHARACTERS = ("letters", "digits", "punctuation", "space or newline", "other")
FREQUENCIES = ("most frequent eighth", *(f"eighth {n}" for n in range(2, BINS)), "rarest eighth")
AT_ONCE = 1 << 22
"""Number of tokens counted at a time."""


class Labelling(NamedTuple):
    """A labeling of tokens."""

    classes: Sequence[str]
    of: Callable[[Tensor], Tensor]
    """Maps token ids [B, T], on the CPU, to class numbers [B, T]."""


def character_class(text: str) -> int:
    """The index in `CHARACTERS` of the first character that is not white space, if any.

    Combining marks belong to letters and mathematical signs to punctuation; pictographs, control
    characters and incomplete characters are `other`.

    Args:
        text: a token's text.
    """
    inner = text.strip()
    if not inner:
        return CHARACTERS.index("space or newline" if text else "other")
    category = unicodedata.category(inner[0])
    if category == "So" or category[0] == "C":
        return CHARACTERS.index("other")
    return {"L": 0, "M": 0, "N": 1, "P": 2, "S": 2}.get(category[0], len(CHARACTERS) - 1)


def labellings(tokenizer: Tokenizer, stream: TokenStream, length: int) -> dict[str, Labelling]:
    """Returns all labelings of the tokens of a split, by name.

    Args:
        tokenizer: the tokenizer of the ids.
        stream: the split from which frequencies are counted.
        length: T.
    """
    by_token = {
        name: Labelling(classes, class_V.__getitem__)
        for name, (classes, class_V) in classes_of_vocabulary(tokenizer, stream).items()
    }
    return by_token | {"position": Labelling(_position_names(length), _by_position)}


def classes_of_vocabulary(
    tokenizer: Tokenizer, stream: TokenStream
) -> dict[str, tuple[Sequence[str], Tensor]]:
    """Returns the classes that depend only on the token, and the class of every token [V].

    Args:
        tokenizer: the tokenizer of the ids; its end of text is of the characters `other`.
        stream: the split from which frequencies are counted.
    """
    texts = map(tokenizer.text_within, range(tokenizer.vocab_size))
    character_V = torch.tensor(list(map(character_class, texts)))
    character_V[tokenizer.end_of_text_id] = CHARACTERS.index("other")
    bin_V = torch.from_numpy(equal_mass(frequencies(stream, tokenizer.vocab_size)))
    return {"characters": (CHARACTERS, character_V), "frequency": (FREQUENCIES, bin_V)}


def frequencies(stream: TokenStream, vocab_size: int) -> npt.NDArray[np.int64]:
    """Counts how often each token occurs in a split [V].

    Args:
        stream: the split.
        vocab_size: V.
    """
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, stream.num_tokens, AT_ONCE):
        ids = stream.read(first, min(stream.num_tokens, first + AT_ONCE))
        counts_V += np.bincount(ids, minlength=vocab_size)[:vocab_size]
    return counts_V


def equal_mass(counts_V: npt.NDArray[np.int64], bins: int = BINS) -> npt.NDArray[np.int64]:
    """Sorts tokens by frequency into bins with about equally many tokens of the text.

    Args:
        counts_V: how often each token occurs.
        bins: number of bins.

    Returns:
        The bin of each token [V], 0 for the most frequent; a token belongs to the bin that contains
        the middle of its occurrences.
    """
    order = np.argsort(-counts_V, kind="stable")
    middles = np.cumsum(counts_V[order]) - counts_V[order] / 2
    bin_V = np.zeros(len(counts_V), dtype=np.int64)
    bin_V[order] = np.minimum(bins - 1, bins * middles // max(1, counts_V.sum()))
    return bin_V


class Shifts:
    """The chance level: labels rotated within each window, by a different distance per window.

    Runs of equal labels stay intact, like runs of experts; only their association is lost.

    Args:
        windows: W.
        length: T.
        shuffles: P - 1.
    """

    def __init__(self, windows: int, length: int, shuffles: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._by_PW = torch.randint(length, (shuffles, windows), generator=generator)

    def __call__(self, label_BT: Tensor, number_B: Tensor) -> Tensor:
        """Returns the labels and rotated ones [P, B, T]; -1 where either is missing.

        Args:
            label_BT: -1: the token is not counted.
            number_B: the windows' numbers.
        """
        by_PB1 = self._by_PW[:, number_B].unsqueeze(-1)
        from_PBT = (torch.arange(label_BT.shape[1]) - by_PB1) % label_BT.shape[1]
        moved_PBT = label_BT.expand(len(from_PBT), -1, -1).gather(-1, from_PBT)
        moved_PBT = moved_PBT.where(label_BT >= 0, -1)
        return torch.cat([label_BT.unsqueeze(0), moved_PBT])


class ClassColumns:
    """The classes of tokens, all labelings side by side.

    A position is labeled by its predicted token, to which the loss belongs, and by its input token,
    which the router sees: `predicted characters` and `read characters`.

    Args:
        text: the text to read.
    """

    def __init__(self, text: TextSamples) -> None:
        by_name = labellings(text.tokenizer, text.stream, text.length)
        self._of: dict[str, tuple[str, Labelling]] = {}
        for side in ("predicted",) if text.predicts_both_ways else ("predicted", "read"):
            for name in ("characters", "frequency"):
                self._of[f"{side} {name}"] = side, by_name[name]
        self._of["position"] = "read", by_name["position"]
        self.classes: dict[str, list[str]] = {"all": ["all"]}
        """The classes of each labeling; the first has all tokens in one class."""
        self.classes |= {name: list(each.classes) for name, (_, each) in self._of.items()}

    def __call__(self, passages: Passages) -> Tensor:
        """Returns the column of each predicted token in each labeling [J, B, P]; -1: not counted.

        Args:
            passages: a batch.
        """
        scored_BP, places_BP = passages.scored_BP.cpu(), passages.places_BP.cpu()
        ids_BT, target_BP = passages.ids_BT.cpu(), passages.target_BP.cpu()
        first, columns = len(self.classes["all"]), [torch.zeros_like(places_BP)]
        for side, labelling in self._of.values():
            if side == "predicted":
                class_BP = labelling.of(target_BP)
            else:
                class_BP = labelling.of(ids_BT).gather(1, places_BP)
            columns.append(first + class_BP)
            first += len(labelling.classes)
        return torch.stack(columns).where(scored_BP, -1).to(passages.ids_BT.device)


def _by_position(ids_BT: Tensor) -> Tensor:
    length = ids_BT.shape[1]
    return (torch.arange(length) * BINS // length).expand_as(ids_BT)


def _position_names(length: int) -> list[str]:
    edges = [-(-length * number // BINS) for number in range(BINS + 1)]
    return [
        f"{first} to {last - 1}" if first < last else "none"
        for first, last in itertools.pairwise(edges)
    ]
