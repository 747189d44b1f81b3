"""Tokens with an expert's highest weights, found in one pass with bounded memory: those of text in
their context, those of images as pictures, with the experts of all patches in a few of them.

Shapes: B windows or images, T tokens of one, G stretches of a window, S experts of all levels side
by side, K tokens kept.
"""

import base64
import functools
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from polyad.model.vision import ImageModelSettings
from polyad.train.errors import ConfigError
from polyad.train.experts.information import not_finite
from polyad.train.experts.probing import RoutedLayer, columns_of
from polyad.train.reading import ForwardPass, Subject
from polyad.train.tasks.samples import ImageSamples, TextSamples

STRETCH = 32
"""Only the highest of this many consecutive tokens counts, so that contexts are distinct."""
LEAST_LOAD = 0.05
"""Share of the mean load below which experts are shown only if named."""
SHOWN = 8
"""Number of experts picked in a layer, unless they are named."""
Highest: TypeAlias = list[tuple[float, int]]
"""Weights and positions of tokens, the highest weight first."""


class ShownExpert(NamedTuple):
    """One expert and what it weights most."""

    name: str
    """The name that `RoutedLayer.expert_name` gives it."""
    share: float
    """Its share of the assignments, or of the coefficients, of its level."""
    top: list[Any]
    """Its `Context`s or `TopImage`s, the highest weight first."""


class TopTokens:
    """The K highest weights of every expert of a layer, and their positions.

    Ties, such as many coefficients of 1.0 with entmax, are broken by a hash of the position, since
    otherwise the first in the data would be shown. It is too small to reorder different values in
    fp32.

    Args:
        layer: the layer.
        top: K.
        device: the weights' device.
        stretch: only the highest of this many consecutive tokens counts.
    """

    def __init__(
        self,
        layer: RoutedLayer,
        top: int,
        device: torch.device | str = "cpu",
        stretch: int = STRETCH,
    ) -> None:
        self.layer, self._top, self._stretch = layer, top, stretch
        experts = layer.num_experts
        self._key_KS = torch.zeros(top, experts, dtype=torch.float64, device=device)
        self._position_KS = torch.full((top, experts), -1, device=device)
        self._given_S = torch.zeros(experts, dtype=torch.float64, device=device)
        self.tokens = 0
        """Number of tokens so far."""

    def add(self, a_BTS: Tensor, position_BT: Tensor) -> None:
        """Adds a batch.

        Args:
            a_BTS: weights, fp32.
            position_BT: each token's position in the data; negative: not counted.
        """
        valid_BT = position_BT >= 0
        a_BTS = a_BTS.where(valid_BT.unsqueeze(-1), 0.0)
        # A coefficient counts as it is, an assignment of a sparse expert as 1.
        given_BTS = a_BTS if self.layer.shares else (a_BTS != 0) + 0 * a_BTS  # NaN stays
        self._given_S += given_BTS.sum((0, 1)).double()
        self.tokens += int(valid_BT.sum())
        for first in range(0, a_BTS.shape[1], self._stretch):
            stretch = slice(first, first + self._stretch)
            highest_BS, where_BS = a_BTS[:, stretch].max(1)
            at_BS = position_BT[:, stretch].gather(1, where_BS)
            key_BS = highest_BS.double() * (1 + 1e-8 * _drawn(at_BS))
            keys = torch.cat([self._key_KS, key_BS])
            positions = torch.cat([self._position_KS, at_BS])
            key_KS, rows_KS = keys.topk(self._top, dim=0)
            self._key_KS.copy_(key_KS)
            self._position_KS.copy_(positions.gather(0, rows_KS))

    def highest(self, expert: int) -> Highest:
        """Weights above 0 and positions of one expert, the highest first."""
        keys, positions = self._key_KS[:, expert].float(), self._position_KS[:, expert]
        pairs = zip(keys.tolist(), positions.tolist(), strict=True)
        return [(key, position) for key, position in pairs if key > 0]

    def shares(self) -> list[Tensor]:
        """Each expert's share of all that its level gives so far, by level."""
        of_levels = torch.split(self._given_S.cpu(), list(self.layer.levels))
        return [sums / sums.sum().clamp_min(1e-300) for sums in of_levels]

    def shown(
        self, experts: Sequence[str], describe: Callable[[Highest], list[Any]]
    ) -> list[ShownExpert]:
        """Returns the experts to show.

        Args:
            experts: their names; empty: `SHOWN` are picked; see `choose_experts`.
            describe: returns what is shown of the highest weights of one.

        Raises:
            ConfigError: weights are not finite.
        """
        if not self._given_S.isfinite().all():
            raise ConfigError(not_finite(f"the coefficients of {self.layer.name}"))
        layer, shares = self.layer, self.shares()
        columns = columns_of(layer, experts) if experts else choose_experts(shares, SHOWN)
        share_S = torch.cat(shares)
        return [
            ShownExpert(layer.expert_name(s), float(share_S[s]), describe(self.highest(s)))
            for s in columns
        ]


def _drawn(position: Tensor) -> Tensor:
    """A pseudorandom number from 0 to 1: Knuth's multiplicative hash."""
    return (position * 2654435761 % 2**32).double() / 2**32


def choose_experts(shares: Sequence[Tensor], count: int) -> list[int]:
    """Picks experts to show: in every level evenly spaced in the order of their shares, from the
    busiest to the last with at least a twentieth of the mean, since less is mostly rounding.

    Args:
        shares: the shares of each level's experts.
        count: number of experts to pick, over all levels.

    Returns:
        Their columns, in order.
    """
    chosen: list[int] = []
    first, each = 0, max(1, count // len(shares))
    for share_N in shares:
        used = [s for s in range(len(share_N)) if share_N[s] * len(share_N) >= LEAST_LOAD]
        used.sort(key=lambda s: (-float(share_N[s]), s))
        wanted = min(each, len(used))
        places = [round(i * (len(used) - 1) / max(1, wanted - 1)) for i in range(wanted)]
        chosen += [first + used[place] for place in places]
        first += len(share_N)
    return sorted(chosen)


BEFORE, AFTER = 16, 8
"""Number of tokens shown around a token."""
OF_ONE_DOCUMENT = 2
"""Maximum number of an expert's contexts from one document."""
CANDIDATES = 4
"""Number of tokens kept per context shown, since those of one document are left out."""
LONGEST_CHARACTER = 4
"""Maximum bytes of a character; each may be a token in a byte-level vocabulary."""
UNFINISHED = "\ufffd"


class Context(NamedTuple):
    """A token with a high weight of an expert, and the text of its document around it."""

    weight: float
    position: int
    """The token's position in its split."""
    document: int
    """From 0."""
    offset: int
    """The token's position in its document, from 0."""
    before: str
    token: str
    after: str


def split_text(
    ids: Sequence[int], at: int, decode: Callable[[Sequence[int]], str]
) -> tuple[str, str, str]:
    """Splits a text at one of its tokens, with the other tokens of a character that it is part of.

    Args:
        ids: token ids.
        at: the token's index.
        decode: the tokenizer's `decode`.

    Returns:
        The text before, the token's, and the text after, without incomplete characters at the ends.
    """
    first, stop = at, at + 1
    while decode(ids[:first]).endswith(UNFINISHED) and first > max(0, at - LONGEST_CHARACTER + 1):
        first -= 1
    while decode(ids[:stop]).endswith(UNFINISHED) and stop < min(len(ids), at + LONGEST_CHARACTER):
        stop += 1
    before, upto, whole = (decode(ids[:end]) for end in (first, stop, len(ids)))
    return before.lstrip(UNFINISHED), upto[len(before) :], whole[len(upto) :].rstrip(UNFINISHED)


class TopText:
    """Collects the top tokens of each expert.

    Args:
        layers: the layers whose experts are shown.
        text: the text to read.
        top: number of contexts per expert.
        device: the model's device.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], text: TextSamples, top: int, device: str
    ) -> None:
        self._text, self._top = text, top
        self._tops = {each.name: TopTokens(each, CANDIDATES * top, device) for each in layers}

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch."""
        position_BT = self._text.position_BT(forward_pass.batch)
        for name, decision in forward_pass.of_all_tokens.items():
            a_BTS = decision.by_row(len(position_BT))
            self._tops[name].add(a_BTS, position_BT)

    @property
    def tokens(self) -> int:
        """Number of tokens read."""
        return next(iter(self._tops.values())).tokens

    def result(self, experts: Sequence[str]) -> dict[str, list[ShownExpert]]:
        """Returns the experts to show in each layer.

        Args:
            experts: names of experts in every layer; empty: some are picked.

        Raises:
            ConfigError: weights are not finite.
        """
        return {name: top.shown(experts, self._contexts) for name, top in self._tops.items()}

    def _contexts(self, highest: Highest) -> list[Context]:
        contexts, of_document = list[Context](), Counter[int]()
        for weight, position in highest:
            (document,), (offset,) = self._text.stream.locate(np.array([position]))
            of_document[document] += 1
            if of_document[document] <= OF_ONE_DOCUMENT and len(contexts) < self._top:
                contexts.append(self._context(weight, position, int(document), int(offset)))
        return contexts

    def _context(self, weight: float, position: int, document: int, offset: int) -> Context:
        stream, tokenizer = self._text.stream, self._text.tokenizer
        length = int(stream.document_lengths[document])
        first, stop = max(0, offset - BEFORE), min(length, offset + AFTER + 1)
        ids = stream.read(position - offset + first, position - offset + stop).tolist()
        before, token, after = split_text(ids, offset - first, tokenizer.decode)
        if ids[offset - first] == tokenizer.end_of_text_id:
            token = "<end of text>"
        return Context(weight, position, document, offset, before, token, after)


MAPPED = 6
"""Number of images for which the page shows the experts of all patches."""
MOST_IMAGES = 20_000
"""Maximum number of images to read."""
WHOLE_IMAGE = 1 << 20
"""More tokens than an image has, so that only the highest of each image counts."""
SIDE, LOSSLESS_SIDE = 96, 48
"""Pixels of a picture; up to the second an image is not compressed: a JPEG would be blurred and no
smaller."""


class TopImage(NamedTuple):
    """An image with a high weight of an expert."""

    weight: float
    """Highest weight over its tokens."""
    number: int
    """The image's number in its split."""
    label: str
    patch: int | None
    """The patch with that weight, in row-major order; None for the class token, and if tokens are
    not patches."""


class RoutingMap(NamedTuple):
    """The experts of one image's patches in one layer."""

    number: int
    label: str
    first: list[int]
    """The expert with the highest weight for each patch, in row-major order."""


@dataclass(frozen=True, kw_only=True)
class ImagePass:
    """The pictures of a page, each of which is in the style sheet once and named by number."""

    grid: int
    """Number of patches per row."""
    maps: dict[str, list[RoutingMap]]
    """Maps by layer name; empty if tokens are not patches."""
    pixels: dict[int, np.ndarray[Any, Any]]
    """The images to show, [H, W, 3] uint8, by number."""

    def uris(self) -> dict[int, str]:
        """Data URIs of the pictures by number."""
        return {number: _data_uri(pixels) for number, pixels in self.pixels.items()}

    def frame(self, patch: int) -> str:
        """The position of a patch as CSS."""
        row, column = divmod(patch, self.grid)
        side = 100 / self.grid
        place = f"left:{column * side:.3g}%;top:{row * side:.3g}%"
        return f"{place};width:{side:.3g}%;height:{side:.3g}%"

    def runs(self, first: Sequence[int]) -> list[tuple[int, int, int, int, float]]:
        """Adjacent patches with the same first expert: row, column, number of patches, expert, and
        its hue, which is far from those of its neighbors."""
        runs, grid = [], self.grid
        for row in range(grid):
            column = 0
            for expert, run in groupby(first[row * grid : (row + 1) * grid]):
                width = len(list(run))
                runs.append((row, column, width, expert, expert * 137.508 % 360))
                column += width
        return runs


def _data_uri(pixels: np.ndarray[Any, Any]) -> str:
    from PIL import Image

    image, file, kind = Image.fromarray(pixels), io.BytesIO(), "png"
    if max(image.size) > LOSSLESS_SIDE:
        image.thumbnail((SIDE, SIDE))
        kind = "jpeg"
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _tokens_before_patches(name: str, tokens: int, grid: int) -> int | None:
    """Number of class tokens, which precede the patches; None if the tokens are not patches."""
    before = tokens - grid * grid
    return None if name.endswith("token_feed_forward") or before not in (0, 1) else before


class TopImages:
    """Collects the top images of each expert.

    Args:
        layers: the layers whose experts are shown.
        samples: the samples to read.
        top: number of images per expert.
        device: the model's device.
    """

    def __init__(
        self, layers: Sequence[RoutedLayer], samples: ImageSamples, top: int, device: str
    ) -> None:
        self._layers, self._samples = layers, samples
        self._tops = {each.name: TopTokens(each, top, device, WHOLE_IMAGE) for each in layers}
        self._tokens: dict[str, int] = {}
        model = samples.task.model
        self._grid = 1
        if isinstance(model, ImageModelSettings):
            self._grid = model.image_size // model.patch_size

    def add(self, forward_pass: ForwardPass) -> None:
        """Adds a batch."""
        number_R = forward_pass.number_R
        of_split_R = torch.tensor(self._samples.numbers, device=number_R.device)[number_R]
        for name, top in self._tops.items():
            a_BTS = forward_pass.decisions[name].by_row(len(number_R))
            self._tokens[name] = length = a_BTS.shape[1]
            place_T = torch.arange(length, device=number_R.device)
            top.add(a_BTS, of_split_R.unsqueeze(-1) * length + place_T)

    def result(self, experts: Sequence[str]) -> dict[str, list[ShownExpert]]:
        """Returns the experts to show in each layer.

        Args:
            experts: names of experts to show in every layer; empty: some are picked.

        Raises:
            ConfigError: weights are not finite.
        """
        return {
            name: top.shown(experts, functools.partial(self._images, name))
            for name, top in self._tops.items()
        }

    def pictures(self, model: nn.Module, shown: Mapping[str, list[ShownExpert]]) -> ImagePass:
        """Returns the pictures of a page.

        Args:
            model: reads a few images again, to map their patches.
            shown: the experts to show in each layer.
        """
        task, split = self._samples.task, self._samples.split
        some, maps = ImageSamples(task, split, MAPPED), dict[str, list[RoutingMap]]()
        for forward_pass in Subject(model, self._layers, some, MAPPED).read():
            of_split = [some.numbers[number] for number in forward_pass.number_R.tolist()]
            for name, decision in forward_pass.decisions.items():
                a_BTS = decision.by_row(len(of_split))
                before = _tokens_before_patches(name, a_BTS.shape[1], self._grid)
                if before is not None:
                    first_BT = a_BTS[:, before:].argmax(-1).tolist()
                    maps.setdefault(name, []).extend(
                        RoutingMap(number, task.label_of(split, number), first_T)
                        for number, first_T in zip(of_split, first_BT, strict=True)
                    )
        numbers = {image.number for each in shown.values() for e in each for image in e.top}
        numbers |= {each.number for of_layer in maps.values() for each in of_layer}
        images = task.held_out(split)
        pixels = {n: images[n].images_BCHW.permute(1, 2, 0).numpy() for n in sorted(numbers)}
        return ImagePass(grid=self._grid, maps=maps, pixels=pixels)

    def _images(self, name: str, highest: Highest) -> list[TopImage]:
        """The images with the highest weights of an expert of a layer."""
        tokens, images = self._tokens[name], []
        before = _tokens_before_patches(name, tokens, self._grid)
        for weight, position in highest:
            number, token = divmod(position, tokens)
            patch = None if before is None or token < before else token - before
            label = self._samples.task.label_of(self._samples.split, number)
            images.append(TopImage(weight, number, label, patch))
        return images
