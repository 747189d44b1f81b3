"""A decoder that is larger than memory: only one part at a time has its weights loaded.

    begin, *blocks, end = parts_of(model)
    with model.part(*begin):        model.embed(...)
    with model.part(*blocks[3]):    model.blocks[3](...)
    with model.part(*end):          model.score(...)

It is the same `Decoder` as from `load_model`, and its parts are filled from the same weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from polyad.model.build import build_model, place
from polyad.model.decoder import Decoder, DecoderSettings
from polyad.parallel.weights import Weights, fill
from polyad.parallel.zero import DTYPES, Precision


class Streamed(Decoder):
    """A decoder on the meta device.

    Args:
        weights: weights of a decoder without a classification head.
        device: the device of the loaded part.
        precision: precision of its parameters.
    """

    def __init__(self, weights: Weights, device: torch.device, precision: Precision) -> None:
        config = weights.model_config()
        assert isinstance(config, DecoderSettings)
        with torch.device("meta"):
            super().__init__(config)
        self.weights, self.device, self.precision = weights, device, precision
        self.eval()

    @contextmanager
    def part(self, *begins: str) -> Iterator[None]:
        """A context in which some weights are loaded; no file is mapped afterwards.

        Args:
            begins: prefixes of their names.
        """
        meta = {
            name: tensor
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if name.startswith(begins)
        }
        fill(self, self.weights, self.device, self.precision, begins)
        try:
            yield
        finally:
            place(self, meta.items(), "meta", DTYPES[self.precision])

    @property
    def largest(self) -> int:
        """Size of its largest part, in bytes."""
        return max(bytes_of(self, self.precision, part) for part in parts_of(self))


def parts_of(model: Decoder) -> list[tuple[str, ...]]:
    """Returns the name prefixes of each part's weights: those before the blocks, each block, and
    those that score the output of the last block."""
    blocks = [(f"blocks.{number}.",) for number in range(len(model.blocks))]
    tied = ("token_embedding.",) if model.config.tied_embeddings else ()
    return [("token_embedding.", "position_embedding."), *blocks, ("final_norm.", "head.", *tied)]


def bytes_of_weights(weights: Weights, precision: Precision) -> int:
    """Returns the size of a model's parameters, in bytes.

    Args:
        weights: the weights of the model.
        precision: precision of the parameters.
    """
    return bytes_of(build_model(weights.model_config()), precision)


def bytes_of(model: nn.Module, precision: Precision, begins: tuple[str, ...] = ("",)) -> int:
    """Returns the size of some parameters of a model, in bytes.

    Args:
        model: a model on any device.
        precision: precision of the parameters.
        begins: prefixes of their names.
    """
    numbers = (p.numel() for name, p in model.named_parameters() if name.startswith(begins))
    return sum(numbers) * DTYPES[precision].itemsize


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model computes."""
    return model.device if isinstance(model, Streamed) else next(model.parameters()).device
