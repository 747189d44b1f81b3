"""`evaluate --leak`: how much a language model gains from a token graph without a causal mask.

With such a graph (`model.feed_forward.causal_graph: false`) the tokens of a window choose their
experts by later tokens, so its loss over whole windows is not that of a predictive model. The same
weights are scored without that leak in two ways:

    prefix   the window is cut before each predicted token: exact, but T forward passes for a window
             of T tokens, so only a sample of the tokens is scored. Tokens of the prefix still see
             each other in both directions.
    masked   every token sees only itself and earlier ones, as in generation with a cache: one
             forward pass, so the whole split is scored.

Shapes: B windows, T tokens of a window, D width, V vocabulary, W windows in total.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyad.data.text.windows import EvaluationWindows, window_batches
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.graph import MixingGraph
from polyad.parallel import comm
from polyad.train.config.run import RunConfig
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.tasks.losses import cross_entropy
from polyad.train.tasks.text import TokenScore, score_windows

GROUP = 8
"""Number of windows cut at the same tokens, in one forward pass."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The golden ratio less 1: any number of its multiples is spread evenly modulo 1."""

Report = Callable[[float], None]


class PrefixScore(NamedTuple):
    """Scores of a sample of tokens, each within its window and from its prefix."""

    tokens: int
    in_window: float
    """Loss in nats per token, with the whole window visible."""
    from_prefix: float
    """Loss of the same tokens, with the window cut before the predicted token."""
    standard_error: float
    """Standard error of the mean difference as an estimate for the split, with tokens clustered by
    window. NaN for a single window."""

    @property
    def difference(self) -> float:
        """The gain from the window's later tokens, in nats per token."""
        return self.from_prefix - self.in_window


class Leak(NamedTuple):
    """Scores of a split without later tokens."""

    masked: TokenScore
    """Loss over all tokens with the mask."""
    wanted: int
    """Approximate number of tokens to score from their prefix."""
    prefix: PrefixScore

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "masked_loss": self.masked.loss,
            "masked_tokens": self.masked.tokens,
            "prefix_wanted": self.wanted,
            "prefix_tokens": self.prefix.tokens,
            "prefix_loss": self.prefix.from_prefix,
            "prefix_loss_in_window": self.prefix.in_window,
            "prefix_difference": self.prefix.difference,
            "prefix_standard_error": self.prefix.standard_error,
        }

    def rows(self, loss: float) -> list[tuple[str, str]]:
        """Names and values for display, beside the loss over whole windows."""
        masked, prefix = self.masked.loss, self.prefix
        return [
            (
                "with the mask",
                f"{masked:.4f} nats per token, {masked - loss:+.4f}: no token sees later tokens",
            ),
            (
                "from the prefix",
                f"{loss + prefix.difference:.4f} nats per token, {prefix.difference:+.4f} ± "
                f"{prefix.standard_error:.4f} (standard error): text cut off before each of "
                f"{prefix.tokens:,} tokens",
            ),
        ]


def check_leaks(config: RunConfig, name: object) -> None:
    """Checks that there is a leak to measure.

    Args:
        config: the checkpoint's configuration.
        name: its name in the message.

    Raises:
        ConfigError: no graph of the model sees later tokens.
    """
    sections = config.model.feed_forwards()
    sparse = [each for each in sections.values() if isinstance(each, SparseMoEConfig)]
    if not sparse:
        kinds = " and ".join(f"{key}.kind: {each.kind}" for key, each in sections.items())
        raise ConfigError(
            f"--leak: {name} has {kinds}, which has no token graph; only smoe has one"
        )
    if all(each.causal_graph for each in sparse):
        raise ConfigError(
            f"--leak: {name} has model.feed_forward.causal_graph: true, so no token sees later "
            "ones; only a model trained with false has a leak"
        )


def measure_leak(
    model: nn.Module,
    windows: EvaluationWindows,
    tokens: int,
    *,
    units: int,
    batch_size: int,
    world: comm.World,
) -> Leak:
    """Scores a split again, without later tokens.

    Args:
        model: a model whose graphs have no mask, in evaluation mode.
        windows: the split's windows.
        tokens: approximate number to score from their prefix, spread evenly over the split.
        units: number of tokens in the split.
        batch_size: windows per forward pass of the masked model.
        world: this process.

    Returns:
        The same on every process.
    """

    told = Progress("with the mask", units) if world.is_main else None
    with masked(model):
        score = score_windows(model, windows, batch_size=batch_size, world=world, report=told)
    told = Progress("from the prefix", tokens) if world.is_main else None
    prefix = score_prefixes(model, windows, tokens=tokens, world=world, report=told)
    return Leak(score, tokens, prefix)


@contextmanager
def masked(model: nn.Module) -> Iterator[None]:
    """A context in which all graphs of a language model are causal."""
    graphs = [m for m in model.modules() if isinstance(m, MixingGraph) and not m.causal]
    for graph in graphs:
        graph.causal = True
    try:
        yield
    finally:
        for graph in graphs:
            graph.causal = False


@contextmanager
def _last_position_alone(model: nn.Module) -> Iterator[None]:
    """A context in which the output head, a large part of a small model, computes only the last
    position."""
    hook = model.get_submodule("final_norm").register_forward_hook(
        lambda module, given, x_BTD: x_BTD[:, -1:]
    )
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def score_prefixes(
    model: nn.Module,
    windows: EvaluationWindows,
    *,
    tokens: int,
    world: comm.World,
    report: Report | None = None,
) -> PrefixScore:
    """Scores a sample of a split's tokens from their prefixes alone.

    Every n-th token of a window is taken, with an offset that differs between groups of windows, so
    that every distance from the window's start occurs equally often.

    Args:
        model: a language model, without dropout.
        windows: the split's windows.
        tokens: approximate number of tokens to score; all if there are fewer.
        world: this process.
        report: called with the share done.

    Returns:
        Sums over all processes; the sample does not depend on the number of processes.
    """
    rank, size = world.data_parallel_rank, world.data_parallel_size
    apart = max(1, len(windows) * windows.stride // tokens)
    count = math.ceil(len(windows) / (GROUP * size))
    total = torch.zeros(len(_Sums._fields), dtype=torch.float64, device=world.device)
    for number, batch in enumerate(window_batches(windows, GROUP, rank, size)):
        input_BT, target_BT, scored_BT = (tensor.to(world.device) for tensor in batch)
        first = int(apart * (((number * size + rank) * GOLDEN) % 1))
        places = [t for t in range(first, input_BT.shape[1], apart) if scored_BT[:, t].any()]
        if places:
            whole_BP = cross_entropy(model(input_BT).logits, target_BT)[:, places]
            cut_BP = torch.cat([_cut_losses(model, input_BT, target_BT, t) for t in places], 1)
            total += _sums(whole_BP, cut_BP, scored_BT[:, places])
        if report is not None:
            report((number + 1) / count)
    return _prefix_score(_Sums(*comm.sum_over_samples(total, world).tolist()))


def _cut_losses(model: nn.Module, input_BT: Tensor, target_BT: Tensor, place: int) -> Tensor:
    """The loss [B, 1] of the token after position `place`, with the input cut after `place`."""
    with _last_position_alone(model):
        logits_B1V = model(input_BT[:, : place + 1]).logits
    return cross_entropy(logits_B1V, target_BT[:, place : place + 1])


class _Sums(NamedTuple):
    """Sums over windows; n is a window's number of tokens, d the sum of their differences."""

    windows: float
    tokens: float
    in_window: float
    from_prefix: float
    d_d: float
    d_n: float
    n_n: float


def _sums(whole_BP: Tensor, cut_BP: Tensor, scored_BP: Tensor) -> Tensor:
    # `where`, not a product: the loss of a padded position may not be finite.
    whole_B, cut_B = (x.double().where(scored_BP, 0.0).sum(1) for x in (whole_BP, cut_BP))
    n_B, d_B = scored_BP.sum(1).double(), cut_B - whole_B
    return torch.stack(
        [
            *((n_B > 0).sum().double(), n_B.sum(), whole_B.sum(), cut_B.sum()),
            *((d_B * d_B).sum(), (d_B * n_B).sum(), (n_B * n_B).sum()),
        ]
    )


def _prefix_score(sums: _Sums) -> PrefixScore:
    """Computes means, and the standard error of their difference.

    The mean difference is a ratio of sums over windows, sum d / sum n, whose variance is
    W / (W - 1) sum (d - mean n)^2 / (sum n)^2 (Cochran 1977, section 6.4).
    """
    mean = (sums.from_prefix - sums.in_window) / sums.tokens
    squares = sums.d_d - 2 * mean * sums.d_n + mean**2 * sums.n_n
    error = math.nan
    if sums.windows > 1:
        variance = sums.windows / (sums.windows - 1) * max(squares, 0.0)
        error = math.sqrt(variance) / sums.tokens
    return PrefixScore(
        int(sums.tokens), sums.in_window / sums.tokens, sums.from_prefix / sums.tokens, error
    )
