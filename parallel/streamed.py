"""A decoder that is larger than memory: one part of it at a time has its weights.

    begin, *blocks, end = parts_of(model)
    with model.part(*begin):        model.embed(...)
    with model.part(*blocks[3]):    model.blocks[3](...)
    with model.part(*end):          model.score(...)

It is the same `Decoder` that `load_model` gives, and its parts are filled from the same weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from polyad.model.build import build_model, place
from polyad.model.decoder import Decoder, DecoderSettings
from polyad.parallel.tensor_folder import FolderWeights
from polyad.parallel.weights import Weights, fill
from polyad.parallel.zero import DTYPES, Precision


class Streamed(Decoder):
    """A decoder on the meta device.

    Args:
        weights: of a decoder without a head for classes.
        device: where a part goes that has memory.
        precision: of its parameters.
        folder: where readings keep how far they are; None: they do not.

    Attributes:
        readings: that were begun.
        seconds_before: that readings took before a stop after which they went on.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        precision: Precision,
        folder: Path | None = None,
    ) -> None:
        config = weights.model_config()
        assert isinstance(config, DecoderSettings)
        with torch.device("meta"):
            super().__init__(config)
        self.weights, self.device, self.precision = weights, device, precision
        self.folder, self.readings, self.seconds_before = folder, 0, 0.0
        self.eval()

    @contextmanager
    def part(self, *begins: str) -> Iterator[None]:
        """Inside the context some weights are in memory, and no file is mapped afterwards.

        Args:
            begins: how their names begin.
        """
        meta = {
            name: tensor
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if name.startswith(begins)
        }
        fill(self, self.weights, self.device, self.precision, begins)
        if isinstance(self.weights, FolderWeights):
            self.weights.let_go()
        try:
            yield
        finally:
            place(self, meta.items(), "meta", DTYPES[self.precision])

    @property
    def largest(self) -> int:
        """Bytes of its largest part."""
        return max(bytes_of(self, self.precision, part) for part in parts_of(self))


def parts_of(model: Decoder) -> list[tuple[str, ...]]:
    """How the names of the weights of each part begin: of what the first block gets, of the blocks,
    and of what scores the output of the last one."""
    blocks = [(f"blocks.{number}.",) for number in range(len(model.blocks))]
    tied = ("token_embedding.",) if model.config.tied_embeddings else ()
    return [("token_embedding.", "position_embedding."), *blocks, ("final_norm.", "head.", *tied)]


def bytes_of_weights(weights: Weights, precision: Precision) -> int:
    """Bytes that the parameters of a model take.

    Args:
        weights: of the model.
        precision: of the parameters.
    """
    return bytes_of(build_model(weights.model_config()), precision)


def bytes_of(model: nn.Module, precision: Precision, begins: tuple[str, ...] = ("",)) -> int:
    """Bytes that parameters of a model take.

    Args:
        model: on any device.
        precision: of the parameters.
        begins: how their names begin.
    """
    numbers = (p.numel() for name, p in model.named_parameters() if name.startswith(begins))
    return sum(numbers) * DTYPES[precision].itemsize


def seconds_before(model: nn.Module) -> float:
    """The time that readings of a model took before a stop after which they went on."""
    return model.seconds_before if isinstance(model, Streamed) else 0.0


def device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on."""
    return model.device if isinstance(model, Streamed) else next(model.parameters()).device
