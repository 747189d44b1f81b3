"""`polyad generate`: generates text from a checkpoint token by token.

A model reads at most `sequence_length` tokens. When the window is full, its older half is dropped:
the window then starts `sequence_length // 2` tokens before the next one, and positions restart at
0. Learned positions change every key and value at such a step, so the cache is refilled, once per
half window. The model reads the same tokens with and without a cache.
"""

import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.attention import KeyValueCache
from polyad.model.decoder import DecoderSettings
from polyad.train.errors import ConfigError
from polyad.train.experts.information import not_finite

_UNFINISHED = "\ufffd"
"""The replacement character, to which an incomplete UTF-8 character decodes."""
_OVERLAP = 6
"""Number of tokens decoded with new ones, since a token's text may depend on its neighbours."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled.

    Raises:
        ConfigError: a number is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int | None = None
    """Samples from this many most probable tokens; None, or more than exist: from all."""
    top_p: float = 1.0
    """Samples from the smallest set of tokens with this share of the probability after `top_k`."""
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "seed": (0 <= self.seed < 2**63, "0 or more, below 2^63"),
        }
        for key, (is_allowed, allowed) in rules.items():
            if not is_allowed:
                option = f"--{key.replace('_', '-')}: {getattr(self, key)}"
                raise ConfigError(f"{option} is not allowed: {allowed}")


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Samples a token.

    Args:
        logits_V: logits of all tokens, on the CPU.
        sampling: how to sample.
        generator: random generator, unused if the temperature is 0.

    Returns:
        Its id.
    """
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(probabilities(logits_V, sampling), 1, generator=generator))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Returns the probability of each token after temperature, then top-k, then top-p.

    Among equally probable tokens, lower ids rank first.

    Args:
        logits_V: logits of all tokens.
        sampling: how to sample; its temperature is above 0.

    Returns:
        [V], fp64, with sum 1.
    """
    # The largest logit becomes 0, which stays finite at any temperature.
    logits_V = logits_V.double() - logits_V.max()
    probability_V = (logits_V / sampling.temperature).softmax(-1)
    top_k = probability_V.numel() if sampling.top_k is None else sampling.top_k
    if top_k < probability_V.numel():
        _, order_V = probability_V.sort(descending=True, stable=True)
        probability_V = probability_V.index_fill(0, order_V[top_k:], 0.0)
        probability_V = probability_V / probability_V.sum()
    if sampling.top_p < 1:
        sorted_V, order_V = probability_V.sort(descending=True, stable=True)
        before_V = sorted_V.cumsum(-1) - sorted_V  # the mass of more probable ones
        probability_V = probability_V.index_fill(0, order_V[before_V >= sampling.top_p], 0.0)
        probability_V = probability_V / probability_V.sum()
    return probability_V


def generate_ids(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    name: str = "the model",
) -> Iterator[int]:
    """Continues a prompt.

    Args:
        model: a decoder in evaluation mode.
        tokenizer: names the tokens that end generation, which are not yielded, and those that are
            not sampled: the ones from `vocab_size` on, and `unused_ids`.
        prompt: token ids, at least one; only the last `sequence_length` are read.
        max_tokens: maximum number of tokens to generate.
        sampling: how tokens are sampled.
        name: name of the model in errors.

    Yields:
        Token ids, each as soon as it is sampled.

    Raises:
        ConfigError: no token can be sampled, because the model's weights are not finite.
    """
    config: DecoderSettings = model.config  # type: ignore[assignment]
    length, device = config.sequence_length, next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    start = read = max(0, len(ids) - length)  # start of the window; start of what is not cached
    # A long window may never be filled.
    room = min(length, len(ids) - start + max_tokens)
    cache = KeyValueCache(config.num_layers, room)
    for _ in range(max_tokens):
        if len(ids) - start > length:
            start = read = len(ids) - max(1, length // 2)
            cache = KeyValueCache(config.num_layers, length)
        with torch.inference_mode():
            logits_BTV = model(torch.tensor([ids[read:]], device=device), cache).logits
            logits_V = logits_BTV[0, -1, : tokenizer.vocab_size].cpu()
        if not logits_V.isfinite().all():
            raise ConfigError(not_finite(f"{name}: its logits"))
        if tokenizer.unused_ids:
            logits_V = logits_V.index_fill(0, torch.tensor(tokenizer.unused_ids), -math.inf)
        read = len(ids)
        token = choose(logits_V, sampling, generator)
        if token in tokenizer.stop_ids:
            return
        yield token
        ids.append(token)


class TextStream:
    """Decodes tokens incrementally; incomplete characters are held back.

    Args:
        tokenizer: the tokenizer of the ids.
        prompt: the tokens before them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(prompt)
        self._shown = len(self._ids)
        self._from = max(0, self._shown - _OVERLAP)

    def push(self, token: int) -> str:
        """Adds a token; returns new text (may be empty) that later tokens cannot change."""
        self._ids.append(token)
        text = self._rest()
        return "" if text.endswith(_UNFINISHED) else self._show(text)

    def end(self) -> str:
        """Returns the rest of the text, with the replacement character for an incomplete one."""
        return self._show(self._rest())

    def _rest(self) -> str:
        before = self._decode(self._ids[self._from : self._shown])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _show(self, text: str) -> str:
        self._from, self._shown = max(0, len(self._ids) - _OVERLAP), len(self._ids)
        return text


def check_text(text: object, place: str = "--prompt") -> None:
    """Checks that a value is one text, which UTF-8 can encode: not half of a surrogate pair.

    Args:
        text: the value.
        place: name of the argument, for errors.

    Raises:
        ConfigError: it is not.
    """
    try:
        str.encode(text)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        raise ConfigError(f"{place}: {reprlib.repr(text)} is not one text in UTF-8") from None
