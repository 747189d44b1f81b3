"""Scoring held-out text with a model: what training validates with and `polyad evaluate` reports.

Every token of a split is scored once, end-of-text tokens among them, each with at least
sequence_length - stride tokens of context where the split has them. One end-of-text token goes
before the first token, as context only.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from polyad.data.text.windows import EvaluationWindows, window_batches
from polyad.model.output import ModelOutput
from polyad.parallel import comm


class TokenScore(NamedTuple):
    """The summed negative log-likelihood of tokens, and their number."""

    negative_log_likelihood: float
    """The sum over all scored tokens, in nats."""
    tokens: int

    @property
    def loss(self) -> float:
        """The mean loss in nats per token."""
        return self.negative_log_likelihood / self.tokens


@torch.no_grad()
def score_windows(
    forward: Callable[..., ModelOutput],
    windows: EvaluationWindows,
    *,
    batch_size: int,
    world: comm.World,
    report: Callable[[float], None] | None = None,
) -> TokenScore:
    """Scores a split over all processes, which run equally many forward passes.

    Args:
        forward: the model: input ids and targets [B, T] -> the loss of each; dropout off.
        windows: of the split.
        batch_size: windows in a forward pass.
        world: this process.
        report: is told the share done after every batch.

    Returns:
        The sum over all processes; the same on each.
    """
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    rank, size = world.data_parallel_rank, world.data_parallel_size
    batches = window_batches(windows, batch_size, rank, size)
    count = math.ceil(len(windows) / (batch_size * size))
    for done, batch in enumerate(batches, start=1):
        input_BT, target_BT, scored_BT = (tensor.to(world.device) for tensor in batch)
        losses_BT = forward(input_BT, target_ids_BT=target_BT).logits.double()
        # Selected, not multiplied by a mask: a padded position may have a loss that is not finite.
        total += torch.stack([losses_BT[scored_BT].sum(), scored_BT.sum().double()])
        if report is not None:
            report(done / count)
    likelihood, tokens = comm.sum_over_samples(total, world).tolist()
    return TokenScore(likelihood, int(tokens))


def perplexities(score: TokenScore, *, words: int, bytes_: int) -> dict[str, float]:
    """A score per token, per word and per byte.

    Args:
        score: of a whole split.
        words: white-space separated words of its text.
        bytes_: UTF-8 bytes of its text.

    Returns:
        loss in nats a token, token and word perplexity, bits a byte. The likelihood of end-of-text
        tokens is in all four; they count as tokens, and neither as words nor as bytes.
    """
    nats = score.negative_log_likelihood
    return {
        "loss": score.loss,
        "perplexity": perplexity(score.loss),
        "word_perplexity": perplexity(nats / words) if words else float("nan"),
        "bits_per_byte": nats / math.log(2) / bytes_ if bytes_ else float("nan"),
    }


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats; infinite where fp64 overflows."""
    return math.exp(loss) if loss < 700 else float("inf")
