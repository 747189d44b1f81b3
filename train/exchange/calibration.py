"""Activations of text in the feed-forwards of a dense language model, for `convert --split`.

Shapes: N tokens, U inner units, A marked units per token, S samples of text.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from polyad.data.text.dataset import PreparedData
from polyad.model.decoder import DecoderSettings
from polyad.model.emoe.experts import activated
from polyad.model.feedforward import DenseFeedForward
from polyad.parallel.weights import Weights, load_model
from polyad.train.console import Progress
from polyad.train.errors import ConfigError
from polyad.train.tasks.vocabulary import check_tokenizer, fingerprint_of, tokenizer_of

MARKED = 10
"""Number of units marked per token, as in CMoE."""


class Activity(NamedTuple):
    """Activity of the units of one feed-forward."""

    marked_NA: Tensor
    """Each token's units with the largest magnitude, with tokens and rows of the first matrices
    normalized."""
    mean_SU: Tensor
    """Each unit's mean activation over each sample; for a gated unit that of the gate."""


def activity(weights: Weights, data: Path, tokens: int, key: str) -> dict[str, Activity]:
    """Reads text of the training split with a dense model, whole in memory.

    Args:
        weights: The model's.
        data: Data prepared with its tokenizer.
        tokens: Number of tokens to read, in samples of the model's length spread over the split.
        key: Name of the option in errors.

    Returns:
        Activity of each feed-forward, by name.

    Raises:
        ConfigError: The model does not predict text, or the data has other tokens or is too short.
    """
    config = weights.model_config()
    if not isinstance(config, DecoderSettings):
        raise ConfigError(f"{key}: reads text, and {weights.folder} has model.kind: {config.kind}")
    prepared = PreparedData.open(data)
    check_tokenizer(
        f"{key}: {data}", prepared, fingerprint_of(weights), "model", lambda: tokenizer_of(weights)
    )
    stream, length = prepared.split("train"), config.sequence_length
    length = min(length, tokens)
    if stream.num_tokens < tokens:
        raise ConfigError(
            f"{key}: tokens: {tokens} is more than the {stream.num_tokens} tokens of the training "
            f"split of {data}"
        )
    samples = tokens // length
    told = Progress("calibrate", samples * length)
    model = load_model(weights)
    with _recorded(model) as found, torch.inference_mode():
        for sample in range(samples):
            start = (stream.num_tokens - length) * sample // max(samples - 1, 1)
            ids_T = torch.from_numpy(stream.read(start, start + length))
            model(ids_T.unsqueeze(0))
            told((sample + 1) / samples)
    return {
        name: Activity(torch.cat(marked), torch.stack(means))
        for name, (marked, means) in found.items()
    }


Records = dict[str, tuple[list[Tensor], list[Tensor]]]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Records]:
    """Records the activity of dense feed-forwards in each forward pass."""
    found: Records = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, DenseFeedForward):
                found[name] = [], []
                handle = module.register_forward_pre_hook(_recording(*found[name]))
                hooks.callback(handle.remove)
        yield found


def _recording(marked: list[Tensor], means: list[Tensor]) -> Any:
    def record(layer: DenseFeedForward, arguments: tuple[Any, ...]) -> None:
        x_ND = arguments[0].flatten(0, 1)
        first = layer.up if layer.gate is None else layer.gate
        other = None if layer.gate is None else normalize(layer.up.weight, dim=1)
        activation = layer.context.activation
        directions = normalize(first.weight, dim=1)
        alone_NU = activated(activation, normalize(x_ND, dim=1), directions, None, other, None)
        marked.append(alone_NU.abs().topk(min(MARKED, alone_NU.shape[1]), dim=1).indices)
        keys_NU = first(x_ND)
        if layer.gate is None:
            means.append(layer.activation(keys_NU).mean(0))
        else:
            means.append(layer.combine(keys_NU, torch.ones_like(keys_NU)).mean(0))

    return record
