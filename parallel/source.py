"""Sources of a run's weights and optimizer state, read one box at a time.

An engine reads only boxes of tensors that its rank holds, so no process ever has the whole model.
Sources are checkpoints, folders of weights, initial values, and combinations of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from polyad.model.build import initial_value, initializer_of, read_model_config
from polyad.model.config import load_yaml, with_new_names
from polyad.model.families.keys import WeightsError
from polyad.model.lora import of_base
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.format import MASTER, OF_WEIGHTS, Box, fault_of


class Source(ABC):
    """A source of the parameters of an engine: of weights only, unless methods are overridden."""

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box of a master weight, of its moving average or of an optimizer state.

        A source without averages returns the weights for them, one without optimizer state zeros.

        Args:
            box: the box; its shape is that of the tensor in the model.

        Returns:
            The values with shape `box.size`, fp32; the caller must not write to them.
        """
        return self.weight(box) if box.field in OF_WEIGHTS else torch.zeros(box.size)

    def weight(self, box: Box) -> torch.Tensor:
        """Reads a box of a weight, fp32."""
        return self.read(box._replace(field=MASTER))

    def step(self, name: str) -> float:
        """Returns the number of optimizer steps of a parameter."""
        return 0.0

    @abstractmethod
    def buffer(self, name: str) -> torch.Tensor:
        """Returns a whole persistent buffer."""


class StoredWeights(Source):
    """A source that is a folder of weights, each of which can be read whole."""

    folder: Path
    config: ModelSettings

    def model_config(self) -> ModelSettings:
        """Returns the configuration of its model, complete."""
        return self.config

    @property
    def files_folder(self) -> Path:
        """The folder of further files that belong to the weights, such as a tokenizer."""
        return self.folder

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns global shapes of the weights by name."""

    @abstractmethod
    def whole(self, name: str) -> torch.Tensor:
        """Returns a whole weight, fp32."""

    def as_stored(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a whole weight, if possible in this dtype and with the memory layout of its
        file."""
        return self.whole(name)

    def check_model(self, module: nn.Module, without: tuple[str, ...] = ()) -> None:
        """Compares names and shapes of weights with a model's, except for frozen weights of a model
        with adapters.

        Args:
            module: the model.
            without: prefixes of names to ignore on both sides.

        Raises:
            WeightsError: they differ; the first few differences are named.
        """
        base = of_base(module)
        named = [(name, p) for name, p in module.named_parameters() if name not in base]
        ours = {name: tuple(parameter.shape) for name, parameter in named}
        if differing := differing_shapes(self.shapes(), ours, without):
            raise WeightsError(f"{self.folder}: is a different model: {differing}")


def differing_shapes(
    theirs: dict[str, tuple[int, ...]],
    ours: dict[str, tuple[int, ...]],
    without: tuple[str, ...] = (),
) -> str | None:
    """Describes the first few names whose shapes differ, with both shapes; None if all are equal.

    Args:
        theirs: shapes of stored weights.
        ours: shapes of the model.
        without: prefixes of names to ignore.
    """
    differing = [
        f"{name} {list(theirs.get(name, ())) or 'missing'} there, "
        f"{list(ours.get(name, ())) or 'missing'} here"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name) and not name.startswith(without)
    ]
    return first_few(differing) if differing else None


def first_few(faults: list[str]) -> str:
    """Joins the first few faults, and says how many more there are."""
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")


def described_config(text: str, place: Path) -> ModelSettings:
    """Reads the section `model` of a configuration in YAML.

    Args:
        text: the configuration.
        place: its file.

    Raises:
        WeightsError: there is none, or another Polyad or somebody else wrote it.
    """
    try:
        return read_model_config(with_new_names(load_yaml(text)["model"]))
    except ValidationError as error:
        raise WeightsError(f"{place}: model.{fault_of(error)}") from None
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise WeightsError(f"{place}: has no section `model` of a model: {reason}") from None


class InitialWeights(Source):
    """The source of a new run: draws each parameter from its own generator.

    Only one parameter, or some of its experts, is in memory at a time. Values are exact fp32
    whatever the training precision, and the same in any layout.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._last: tuple[str, range | None] | None = None
        self._value = torch.empty(0)

    def weight(self, box: Box) -> torch.Tensor:
        """Returns a box of a parameter's initial value."""
        experts, slices = None, box.slices
        if initializer_of(self._model, box.name).per_expert:  # draws only the experts of this rank
            experts = range(slices[0].start, slices[0].stop)
            slices = (slice(None), *slices[1:])
        if (box.name, experts) != self._last:
            self._last = box.name, experts
            self._value = initial_value(self._model, box.name, self._seed, experts)
        assert tuple(self._value.shape[1:]) == tuple(box.shape[1:])
        return self._value[slices]

    def buffer(self, name: str) -> torch.Tensor:
        """Returns a buffer's initial value."""
        return initial_value(self._model, name, self._seed)


class WeightsOnly(Source):
    """Another source as the start of a run: its weights and buffers, without moments and steps."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def weight(self, box: Box) -> torch.Tensor:
        """Reads a box of a weight, also for a moving average, which starts from it."""
        return self._source.weight(box)

    def buffer(self, name: str) -> torch.Tensor:
        """Returns a whole buffer: buffers count as weights."""
        return self._source.buffer(name)


class Joined(Source):
    """Some parameters and buffers from one source, and the rest from others.

    A run with adapters has frozen weights from its base, and the rest from initial adapters or a
    checkpoint of them.

    Args:
        source_of: returns the source of a parameter or buffer, by its name.
    """

    def __init__(self, source_of: Callable[[str], Source]) -> None:
        self._source_of = source_of

    def read(self, box: Box) -> torch.Tensor:
        """See `Source.read`."""
        return self._source_of(box.name).read(box)

    def step(self, name: str) -> float:
        """See `Source.step`."""
        return self._source_of(name).step(name)

    def buffer(self, name: str) -> torch.Tensor:
        """See `Source.buffer`."""
        return self._source_of(name).buffer(name)
