"""Memory-maps the tensors of a folder with model.safetensors, or with shards and an index.

Weights of 4 bits with one scale per 32 of them, as gpt-oss stores them (MXFP4), are read as bf16. A
matrix `name` [E, in, out] is stored as `name_blocks` uint8 [E, out, in / 32, 16], low nibble first,
and `name_scales` uint8 [E, out, in / 32], exponents of two with a bias of 127.

Source: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from polyad.data import files
from polyad.data.files import read_bytes
from polyad.model.build import ModelSizeError, build_model
from polyad.model.families.keys import WeightsError
from polyad.model.families.tensors import Slices
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.format import CONFIG_FILE, MASTER, Box
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.source import StoredWeights, described_config, first_few
from polyad.parallel.tensor_file import DTYPE_NAMES, mapped

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_DTYPES = ("F32", "F16", "BF16")
"""Dtypes of stored weights, as safetensors names them; each is exact in fp32."""
BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = 16
"""Bytes of a block of 32 values."""
_HALF = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = torch.cat((_HALF, -_HALF))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), -1)
"""Both values of each byte, [256, 2]."""


class Wanted(NamedTuple):
    """The expected properties of a tensor."""

    shape: tuple[int, ...]
    dtypes: Collection[str] = WEIGHT_DTYPES
    """The allowed dtypes, as safetensors names them."""


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a file, whose values are read on access."""

    path: Path
    dtype: str
    """The dtype, as safetensors names it."""
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""

    def read(self, box: Slices) -> Tensor:
        """Returns a part as a view of the file; `box` is () for the whole."""
        return mapped(self.path, self.dtype, self.shape, self.begin)[box]


def _mapped_tensors(path: Path) -> dict[str, MappedTensor]:
    """Lists the tensors of a safetensors file by name.

    Raises:
        SafetensorError, OSError: it cannot be read, or is not a safetensors file.
    """
    with safe_open(path, framework="numpy"):
        pass  # its header is complete and matches its size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: MappedTensor(
            path, each["dtype"], tuple(each["shape"]), 8 + size + each["data_offsets"][0]
        )
        for name, each in header.items()
    }


@functools.cache
def _pairs_of_scales() -> Tensor:
    """Returns both bf16 values of each byte with each scale, as one int32: [256 * 256]."""
    pairs = _PAIRS.to(torch.bfloat16).repeat(256, 1)
    exponents = torch.arange(256).repeat_interleave(256).unsqueeze(-1).expand_as(pairs) - 127
    return torch.ldexp(pairs, exponents).view(torch.int32).flatten()


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values, each exact in bf16.

    Args:
        blocks: [..., in / 32, 16].
        scales: [..., in / 32].

    Returns:
        [..., in] in bf16.
    """
    # A lookup takes a fortieth of the time of multiplying.
    number = torch.add(blocks.int(), scales.int().unsqueeze(-1), alpha=256)
    pairs = _pairs_of_scales().index_select(0, number.flatten())
    return pairs.view(torch.bfloat16).view(*scales.shape[:-1], -1)


@dataclass(frozen=True)
class Quantized:
    """A matrix of such weights [E, in, out]; its values are computed on access."""

    blocks: MappedTensor
    scales: MappedTensor
    dtype: ClassVar[str] = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, in, out]."""
        experts, out, groups, half = self.blocks.shape
        return experts, groups * 2 * half, out

    def read(self, box: Slices) -> Tensor:
        """Returns a part of the values: of these experts and outputs all inputs are read."""
        experts, inputs, outputs = box
        parts = ((slice(expert, expert + 1), outputs) for expert in range(self.shape[0])[experts])
        values = [dequantize(self.blocks.read(part), self.scales.read(part)) for part in parts]
        return torch.cat([each[..., inputs] for each in values]).mT


def _are_of_one_matrix(blocks: MappedTensor, scales: MappedTensor | None) -> bool:
    if scales is None or not blocks.dtype == scales.dtype == "U8":
        return False
    return len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BYTES)


class TensorFolder(dict[str, MappedTensor | Quantized]):
    """The tensors of a folder by name; blocks and scales of one tensor count as one.

    Args:
        folder: the folder with the files.
        shorten: maps the name in a file to the requested name.
        single: the name of the file, if there is only one.

    Raises:
        WeightsError: a file is missing or damaged, or a tensor occurs twice.
    """

    def __init__(
        self,
        folder: Path,
        shorten: Callable[[str], str] = lambda name: name,
        single: str = WEIGHTS_FILE,
    ) -> None:
        super().__init__()
        self.folder = folder
        for path in self._paths(single):
            try:
                tensors = _mapped_tensors(path)
            except (SafetensorError, OSError, UnicodeError) as fault:
                raise WeightsError(
                    f"{path}: is damaged or not a safetensors file: {fault}"
                ) from None
            for name, tensor in tensors.items():
                if shorten(name) in self:
                    raise WeightsError(
                        f"{folder}: {shorten(name)} appears twice, also as {name} in {path.name}"
                    )
                self[shorten(name)] = tensor
        for stem in [name.removesuffix(BLOCKS) for name in self if name.endswith(BLOCKS)]:
            blocks: Any = self[stem + BLOCKS]
            scales: Any = self.get(stem + SCALES)
            if _are_of_one_matrix(blocks, scales):
                self[stem] = Quantized(blocks, scales)
                del self[stem + BLOCKS], self[stem + SCALES]

    def faults(self, wanted: Mapping[str, Wanted], config_file: str) -> list[str]:
        """Lists missing tensors and differences from a configuration; extra tensors are allowed.

        Args:
            wanted: expected tensors by name.
            config_file: the name of the configuration file, or what else determines the shapes.
        """
        faults = [f"no tensor {name}" for name in wanted if name not in self]
        for name, (shape, dtypes) in wanted.items():
            if (tensor := self.get(name)) is None:
                continue
            if tensor.shape != tuple(shape):
                faults.append(f"{name} is {[*tensor.shape]}, {config_file} says {[*shape]}")
            elif tensor.dtype not in dtypes:
                faults.append(f"{name} is {tensor.dtype}, allowed: {', '.join(dtypes)}")
        return faults

    def refuse(self, faults: list[str]) -> None:
        """Raises a one-line error with the first few faults, if there are any."""
        if faults:
            raise WeightsError(f"{self.folder}: {first_few(faults)}")

    def _paths(self, file_name: str) -> list[Path]:
        index, single = self.folder / INDEX_FILE, self.folder / file_name
        if single.is_file():  # first, as in transformers: it leaves an older index beside it
            return [single]
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise WeightsError(f"{index}: weight_map: the file of each tensor is missing")
            return [self.folder / str(file) for file in sorted(set(weight_map.values()))]
        if pickles := sorted(path.name for path in self.folder.glob("*.bin")):
            raise WeightsError(
                f"{self.folder}: holds {pickles[0]}, a pickle, which can run code when it is read; "
                f"{file_name} is needed: save the model again with safetensors "
                f"(transformers: model.save_pretrained)"
            )
        raise WeightsError(f"{self.folder}: has neither {file_name} nor {INDEX_FILE}")


class FolderWeights(StoredWeights):
    """Weights in such a folder; only the requested boxes are read.

    Args:
        folder: the folder with the files.
        tensors: the tensors of that folder.
    """

    _model: nn.Module
    """The model whose weights are read."""
    _shapes: dict[str, tuple[int, ...]]
    """Its shapes, by Polyad's names."""

    def __init__(self, folder: Path, tensors: TensorFolder) -> None:
        self.folder, self._tensors = folder, tensors

    def _describe(self, config: ModelSettings, config_file: str) -> None:
        """Sets the model whose weights are read."""
        try:
            self._model = build_model(config)
        except ModelSizeError:
            raise WeightsError(
                f"{self.folder / config_file}: asks for more elements than a tensor can have"
            ) from None
        self._shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the weights by Polyad's names."""
        return self._shapes

    def parts(self, name: str, slices: Slices) -> Iterator[torch.Tensor]:
        """Yields a part of a weight in our orientation, of any dtype, as stored in one tensor of
        the files, or in several, row after row; possibly as views of the mapped file.

        Args:
            name: Polyad's name.
            slices: slices in our orientation.
        """
        yield self._tensors[name].read(slices)

    def weight(self, box: Box) -> torch.Tensor:
        """Reads a box of a weight in our orientation, fp32."""
        assert self._shapes[box.name] == tuple(box.shape), box.name  # `check_model` has compared
        return _copied(self.parts(box.name, box.slices), torch.empty(box.size))

    def whole(self, name: str) -> torch.Tensor:
        """Returns a whole weight in our orientation, fp32."""
        return self.weight(Box.whole(name, MASTER, self._shapes[name]))

    def as_stored(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns a whole weight in our orientation, with the memory layout of the files.

        Experts that are stored as [E, out, in] are not transposed: the weight is a view [E, in,
        out]. Products accept it, whereas transposing would take most of the loading time.

        Args:
            name: Polyad's name.
            dtype: the dtype of the result.
        """
        shape = self._shapes[name]
        parts = self.parts(name, tuple(slice(0, size) for size in shape))
        first = next(parts)
        if len(shape) > 2 and first.stride(-2) < first.stride(-1):
            out = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT
        else:
            out = torch.empty(shape, dtype=dtype)
        return _copied(chain([first], parts), out)


def _copied(parts: Iterable[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Fills a tensor row after row."""
    row = 0
    for part in parts:
        if part.dim() < 3:
            (out[row : row + len(part)] if part.dim() else out).copy_(part)
        else:
            # In torch transposing one matrix is several times as fast as a stack of them, and it is
            # faster before the conversion.
            turns = part.stride(-1) != out.stride(-1)
            for number, matrix in enumerate(part):
                out[row + number].copy_(matrix.contiguous() if turns else matrix)
        row += len(part) if part.dim() else 0
    return out


def is_plain_folder(path: Path) -> bool:
    """Returns whether a path is a folder of `PlainWeights`, not transformers' or a checkpoint."""
    others = ("config.json", "manifest.json")
    return any((path / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)) and not any(
        (path / name).exists() for name in others
    )


class PlainWeights(FolderWeights):
    """The weights of a folder under our own names, for any model, as `--to safetensors` writes it.

        model.safetensors       every weight in fp32 and every buffer, by its name in the model
        config.yaml             the section `model` of the configuration, complete
        tokenizer files         tokenizer.json or tokenizer.model, and tokenizer_config.json

    It contains no optimizer state, no step, and no paths of the machine that trained the model.

    Args:
        folder: the folder.

    Raises:
        WeightsError: it is incomplete or damaged, or its tensors do not match its
            configuration.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, TensorFolder(folder))
        place, names = folder / CONFIG_FILE, self._tensors.keys()
        self.config = described_config(read_bytes(place, WeightsError).decode(), place)
        if missing := self.config.left_to_data():
            raise WeightsError(f"{place}: {missing}: is missing")
        self._describe(self.config, CONFIG_FILE)
        wanted = {name: Wanted(shape) for name, shape in self._shapes.items()}
        for name, buffer in persistent_buffers(self._model):
            wanted[name] = Wanted(tuple(buffer.shape), (DTYPE_NAMES[buffer.dtype],))
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        faults += [f"unknown tensor {name}" for name in sorted(names - wanted.keys())]
        self._tensors.refuse(faults)

    def buffer(self, name: str) -> torch.Tensor:
        """Returns a whole buffer of the model."""
        if name not in self._tensors:
            raise WeightsError(f"{self.folder}: has no buffer {name}")
        return self._tensors[name].read(()).clone()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; its keys are not checked here.

    Raises:
        WeightsError: it cannot be read, or is not an object.
    """
    tree = files.read_json(path, error=WeightsError)
    if not isinstance(tree, dict):
        raise WeightsError(f"{path}: is not a JSON object")
    return tree
