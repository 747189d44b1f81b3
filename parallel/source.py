"""Sources: where the weights and the optimizer state of a run come from, one box at a time.

An engine asks for the boxes of the tensors that this process holds, so no process ever has the
whole model. A checkpoint is a `Source`; initial values and folders of weights are a `WeightSource`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from polyad.model.build import has_experts, initial_value
from polyad.parallel.checkpoint.box import MASTER, OF_WEIGHTS, Box


class Source(ABC):
    """Where the parameters of an engine come from."""

    @abstractmethod
    def read(self, box: Box) -> torch.Tensor:
        """A box of a master weight, of its moving average or of an optimizer state.

        A source without averages gives the weights for them.

        Args:
            box: which one; its shape is that of the tensor in the model.

        Returns:
            The values of shape `box.size`, fp32; the caller does not write to them.
        """

    @abstractmethod
    def step(self, name: str) -> float:
        """Optimizer steps that a parameter has seen."""

    @abstractmethod
    def buffer(self, name: str) -> torch.Tensor:
        """A persistent buffer, whole."""


class WeightSource(Source):
    """A source of weights alone: no step is done, and optimizer state starts at zero."""

    def read(self, box: Box) -> torch.Tensor:
        """A box of a weight; zeros for optimizer state."""
        return self.weight(box) if box.field in OF_WEIGHTS else torch.zeros(box.size)

    @abstractmethod
    def weight(self, box: Box) -> torch.Tensor:
        """A box of a weight, fp32."""

    def step(self, name: str) -> float:
        """0: no step is done."""
        return 0.0


class InitialWeights(WeightSource):
    """The source that a new run is filled from: each parameter from its own generator.

    One whole parameter, or some of its experts, is held at a time. Values are exact fp32 whatever
    the training precision, and the same on any layout.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._last: tuple[str, range | None] | None = None
        self._value = torch.empty(0)

    def weight(self, box: Box) -> torch.Tensor:
        """A box of a parameter's initial value."""
        experts, slices = None, box.slices
        if has_experts(self._model, box.name):  # draws only the experts of this process
            experts = range(slices[0].start, slices[0].stop)
            slices = (slice(None), *slices[1:])
        if (box.name, experts) != self._last:
            self._last = box.name, experts
            self._value = initial_value(self._model, box.name, self._seed, experts)
        assert tuple(self._value.shape[1:]) == tuple(box.shape[1:])
        return self._value[slices]

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer's initial value."""
        return initial_value(self._model, name, self._seed)


class WeightsOnly(WeightSource):
    """Another source as the start of a run: its weights and buffers, no moments and no steps."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def weight(self, box: Box) -> torch.Tensor:
        """A box of a weight: a moving average starts from the weight, too."""
        return self._source.read(box._replace(field=MASTER))

    def buffer(self, name: str) -> torch.Tensor:
        """A whole buffer: buffers count as weights."""
        return self._source.buffer(name)


class Joined(Source):
    """Some parameters from one source, and others from another.

    Args:
        parameters: gives the source of a parameter, by its name.
        buffers: the source of a buffer.
    """

    def __init__(
        self, parameters: Callable[[str], Source], buffers: Callable[[str], Source]
    ) -> None:
        self._parameters, self._buffers = parameters, buffers

    def read(self, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        return self._parameters(box.name).read(box)

    def step(self, name: str) -> float:
        """See `Source.step`."""
        return self._parameters(name).step(name)

    def buffer(self, name: str) -> torch.Tensor:
        """See `Source.buffer`."""
        return self._buffers(name).buffer(name)


def begun_anew(weights: Source, fresh: Source, prefixes: Sequence[str]) -> Source:
    """Weights of another model as the start of one that has what they lack, such as a head.

    Args:
        weights: of all other names.
        fresh: of names that begin as one of `prefixes` says.
        prefixes: with their dot, as `head.`.
    """
    begins = tuple(prefixes)

    def of(name: str) -> Source:
        return fresh if name.startswith(begins) else weights

    return Joined(of, of)


def on_base(base: Source, own: Source, names: Collection[str], buffers: Source) -> Source:
    """The source of a run with adapters: some weights are the base's, the others its own.

    Args:
        base: what is frozen, and what starts from it.
        own: all else: adapters as they start, or a checkpoint of them with their moments.
        names: of the weights that the base gives.
        buffers: which of the two gives the buffers.
    """
    given, frozen = frozenset(names), WeightsOnly(base)
    return Joined(lambda name: frozen if name in given else own, lambda name: buffers)
