"""A folder of weights under Polyad's own names, for any model, as `--to safetensors` writes it.

    model.safetensors       every weight in fp32 and every buffer, by its name in the model
    config.yaml             the section `model` of the configuration, complete
    tokenizer files         tokenizer.json or tokenizer.model, and tokenizer_config.json

It contains no optimizer state, no step, and no paths of the machine that trained the model.
"""

from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn

from polyad.model.build import read_model_config
from polyad.model.config_yaml import load
from polyad.model.families.keys import WeightsError
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.format import fault_of
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.source import described_model
from polyad.parallel.tensor_file import DTYPE_NAMES
from polyad.parallel.tensor_folder import (
    INDEX_FILE,
    WEIGHTS_FILE,
    FolderWeights,
    TensorFolder,
    Wanted,
    differing_shapes,
)

CONFIG_FILE = "config.yaml"


def is_plain_folder(path: Path) -> bool:
    """Returns whether a path is such a folder, not transformers' or a checkpoint."""
    others = ("config.json", "manifest.json")
    return any((path / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)) and not any(
        (path / name).exists() for name in others
    )


class PlainWeights(FolderWeights):
    """The weights of such a folder, as a `Source`.

    Args:
        folder: the folder.

    Raises:
        WeightsError: it is incomplete or damaged, or its tensors do not match its
            configuration.
    """

    def __init__(self, folder: Path) -> None:
        self._config = _read_config(folder / CONFIG_FILE)
        super().__init__(folder, TensorFolder(folder, WeightsError), {}, WeightsError)
        place, names = folder / CONFIG_FILE, self._tensors.names()
        model = described_model(self._config, names, place, WeightsError)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        wanted = {name: Wanted(shape) for name, shape in self._shapes.items()}
        for name, buffer in persistent_buffers(model):
            wanted[name] = Wanted(tuple(buffer.shape), (DTYPE_NAMES[buffer.dtype],))
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        faults += [f"unknown tensor {name}" for name in sorted(names - wanted.keys())]
        self._tensors.refuse(faults)

    def model_config(self) -> ModelSettings:
        """Returns the configuration of its model, complete."""
        return self._config

    def buffer(self, name: str) -> torch.Tensor:
        """Returns a whole buffer of the model."""
        if name not in self._tensors.names():
            raise WeightsError(f"{self.folder}: has no buffer {name}")
        shape = self._tensors.mapped(name).get_shape()
        return self._tensors.read(name, tuple(slice(0, n) for n in shape)).clone()

    def check_model(self, module: nn.Module, without: tuple[str, ...] = ()) -> None:
        """Compares names and shapes of weights with a model's.

        Args:
            module: the model.
            without: prefixes of names to ignore on both sides.

        Raises:
            WeightsError: they differ; the first few differences are named.
        """
        ours = {name: tuple(p.shape) for name, p in module.named_parameters()}
        if differing := differing_shapes(self._shapes, ours, without):
            raise WeightsError(f"{self.folder}: is a different model: {differing}")


def _read_config(path: Path) -> ModelSettings:
    try:
        section = load(path.read_text(encoding="utf-8"))["model"]
        config = read_model_config(section)
    except ValidationError as error:
        raise WeightsError(f"{path}: model.{fault_of(error)}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise WeightsError(f"{path}: has no section `model` of a model: {reason}") from None
    if missing := config.left_to_data():
        raise WeightsError(f"{path}: {missing}: is missing")
    return config
