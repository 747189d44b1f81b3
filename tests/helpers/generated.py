"""Text that a model generates: by the command's function, and without a cache, which has to equal
it."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from polyad.train.evaluation.generate import Sampling, choose
from polyad.train.loading import continuation_of, load


def any_token(vocab_size: int | None = None, stop_ids: Sequence[int] = ()) -> Any:
    """What `generate_ids` asks of a tokenizer."""
    return SimpleNamespace(vocab_size=vocab_size, stop_ids=stop_ids, unused_ids=())


def uncached(model: nn.Module, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """Tokens that are each sampled from a pass over the whole window."""
    config: Any = model.config
    length, generator = config.sequence_length, torch.Generator().manual_seed(sampling.seed)
    ids, start = list(prompt), max(0, len(prompt) - length)
    for _ in range(count):
        if len(ids) - start > length:
            start = len(ids) - max(1, length // 2)
        with torch.inference_mode():
            logits_V = model(torch.tensor([ids[start:]])).logits[0, -1]
        ids.append(choose(logits_V, sampling, generator))
    return ids[len(prompt) :]


def generated(
    path: Path, prompt: str, *, max_tokens: int, sampling: Sampling | None = None
) -> SimpleNamespace:
    """What `polyad generate --json` writes, as attributes."""
    options: Any = {"max_tokens": max_tokens, "sampling": sampling or Sampling()}
    return SimpleNamespace(**continuation_of(load(path), prompt, **options))
