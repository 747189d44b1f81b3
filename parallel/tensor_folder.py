"""Memory-maps the tensors of a folder with model.safetensors, or with shards and an index.

Weights of 4 bits with one scale per 32 of them, as gpt-oss stores them (MXFP4), are read as bf16. A
matrix `name` [E, in, out] is stored as `name_blocks` uint8 [E, out, in / 32, 16], low nibble first,
and `name_scales` uint8 [E, out, in / 32], exponents of two with a bias of 127.

Source: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0.
"""

import functools
import json
import math
import mmap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyad.data import json_reader
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.source import StoredWeights
from polyad.parallel.tensor_file import DTYPE_NAMES

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of stored weights, as safetensors names them; each is exact in fp32."""
WEIGHT_DTYPES = tuple(TORCH_DTYPES)
_READ = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Dtypes of all tensors whose values are read, including buffers and 4-bit weights."""


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


class MappedTensor:
    """A tensor of a mapped file; values are read on access.

    Args:
        file: the file.
        dtype: the dtype, as safetensors names it.
        shape: the shape of the tensor.
        begin: its first byte in the file.
    """

    def __init__(self, file: "_MappedFile", dtype: str, shape: list[int], begin: int) -> None:
        self._file, self._dtype, self._shape, self._begin = file, dtype, shape, begin

    def get_shape(self) -> list[int]:
        """Returns the shape."""
        return self._shape

    def get_dtype(self) -> str:
        """Returns the dtype, as safetensors names it."""
        return self._dtype

    def __getitem__(self, box: tuple[slice, ...] | slice) -> torch.Tensor:
        """Returns a view of the mapped file; writing to it would end the process."""
        dtype, count = _READ[self._dtype], math.prod(self._shape)
        if not count:
            return torch.empty(self._shape, dtype=dtype)[box]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._file.memory, dtype=dtype, count=count, offset=self._begin)
        return flat.view(self._shape)[box]


class _MappedFile:
    """A file that is mapped read-only when it is read: safetensors' own mapping reserves memory for
    a copy, which may not be available for large files.

    Raises:
        SafetensorError, OSError: it cannot be read, or is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="numpy"):
            pass  # its header is complete and matches its size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, dict[str, Any]] = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self._path = path
        self._memory: mmap.mmap | None = None
        first = 8 + size
        self.tensors = {
            name: MappedTensor(self, each["dtype"], each["shape"], first + each["data_offsets"][0])
            for name, each in header.items()
        }

    @property
    def memory(self) -> mmap.mmap:
        """The mapped content."""
        if self._memory is None:
            with self._path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._memory

    def let_go(self) -> None:
        """Unmaps it once no tensor is a view of it."""
        self._memory = None


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
    found = _pairs_of_scales().index_select(0, number.flatten())
    return found.view(torch.bfloat16).view(*scales.shape[:-1], -1)


def fault_of_pair(blocks: Any, scales: Any) -> str | None:
    """Returns why two mapped tensors are not the blocks and scales of one matrix; None if they are.

    Args:
        blocks: The mapped tensor `name_blocks`.
        scales: The mapped tensor `name_scales`.
    """
    shape = blocks.get_shape()
    if blocks.get_dtype() != "U8" or len(shape) != 4 or shape[-1] != _BYTES:
        form = f"U8 [experts, out, in / 32, {_BYTES}]"
        return f"{BLOCKS} is {blocks.get_dtype()} {shape}, but MXFP4 has {form}"
    if scales.get_dtype() != "U8" or scales.get_shape() != shape[:-1]:
        found = f"{scales.get_dtype()} {scales.get_shape()}"
        return f"{SCALES} is {found}, but {BLOCKS} {shape} needs U8 {shape[:-1]}"
    return None


class Quantized:
    """A matrix of such weights, with the interface of a mapped tensor.

    Args:
        blocks: The mapped tensor `name_blocks`.
        scales: The mapped tensor `name_scales`, which fits them (`fault_of_pair`).
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Returns [E, in, out]."""
        experts, out, groups, half = self._blocks.get_shape()
        return [experts, groups * 2 * half, out]

    def get_dtype(self) -> str:
        """The type of the values."""
        return "BF16"

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A part of the values: of these experts and outputs all inputs are read."""
        experts, inputs, outputs = box
        return torch.cat([
            dequantize(
                self._blocks[expert : expert + 1, outputs],
                self._scales[expert : expert + 1, outputs],
            )[..., inputs]
            for expert in range(self.get_shape()[0])[experts]
        ]).mT  # fmt: skip


class TensorFolder:
    """Finds tensors by name and returns slices of them.

    Args:
        folder: the folder with the files.
        error: the exception type to raise.
        shorten: maps the name in a file to the requested name.
        single: the name of the file, if there is only one.

    Raises:
        ValueError: of that type: a file is missing or damaged, or a tensor occurs twice.
    """

    def __init__(
        self,
        folder: Path,
        error: type[ValueError],
        shorten: Callable[[str], str] = lambda name: name,
        single: str = WEIGHTS_FILE,
    ) -> None:
        self.folder, self._error = folder, error
        self._files: list[_MappedFile] = []
        self._tensors: dict[str, MappedTensor | Quantized] = {}
        for path in self._paths(single):
            try:
                self._files.append(_MappedFile(path))
            except (SafetensorError, OSError, UnicodeError) as fault:
                raise error(f"{path}: is damaged or not a safetensors file: {fault}") from None
            for name, tensor in self._files[-1].tensors.items():
                if shorten(name) in self._tensors:
                    raise error(
                        f"{folder}: {shorten(name)} appears twice, also as {name} in {path.name}"
                    )
                self._tensors[shorten(name)] = tensor
        stems = [name.removesuffix(BLOCKS) for name in self._tensors if name.endswith(BLOCKS)]
        for stem in sorted(stem for stem in stems if stem + SCALES in self._tensors):
            blocks, scales = (self._tensors.pop(stem + end) for end in (BLOCKS, SCALES))
            if reason := fault_of_pair(blocks, scales):
                raise error(f"{folder}: {stem}: {reason}")
            self._tensors[stem] = Quantized(blocks, scales)

    def names(self) -> Collection[str]:
        """Returns the names of all tensors; blocks and scales of one tensor count as one."""
        return self._tensors.keys()

    def mapped(self, name: str) -> MappedTensor | Quantized:
        """Returns a tensor with safetensors' interface: shape, dtype, and parts by index."""
        return self._tensors[name]

    def is_quantized(self, name: str) -> bool:
        """Returns whether values are computed when they are read."""
        return isinstance(self._tensors[name], Quantized)

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """Reads a part of a tensor, possibly as a view of the file; `box` is () for a scalar."""
        return self._tensors[name][box]

    def let_go(self) -> None:
        """Unmaps all files; each is mapped again when it is read."""
        for file in self._files:
            file.let_go()

    def faults(self, wanted: Mapping[str, Wanted], config_file: str) -> list[str]:
        """Lists missing tensors and differences from a configuration; extra tensors are allowed.

        Args:
            wanted: expected tensors by name.
            config_file: the name of the configuration file, or what else determines the shapes.
        """
        there = self.names()
        faults = [f"no tensor {name}" for name in wanted if name not in there]
        for name, (shape, dtypes) in wanted.items():
            if name in there:
                found = self.mapped(name)
                if found.get_shape() != list(shape):
                    is_, says = found.get_shape(), list(shape)
                    faults.append(f"{name} is {is_}, {config_file} says {says}")
                elif found.get_dtype() not in dtypes:
                    allowed = ", ".join(dtypes)
                    faults.append(f"{name} is {found.get_dtype()}, allowed: {allowed}")
        return faults

    def refuse(self, faults: list[str]) -> None:
        """Raises a one-line error with the first few faults, if there are any."""
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise self._error(f"{self.folder}: {'; '.join(faults[:3])}{more}")

    def _paths(self, file_name: str) -> list[Path]:
        index, single = self.folder / INDEX_FILE, self.folder / file_name
        if single.is_file():  # first, as in transformers: it leaves an older index beside it
            return [single]
        if index.is_file():
            weight_map = read_json(index, self._error).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise self._error(f"{index}: weight_map: the file of each tensor is missing")
            return [self.folder / str(file) for file in sorted(set(weight_map.values()))]
        if pickles := sorted(path.name for path in self.folder.glob("*.bin")):
            raise self._error(
                f"{self.folder}: holds {pickles[0]}, a pickle, which can run code when it is read; "
                f"{file_name} is needed: save the model again with safetensors "
                f"(transformers: model.save_pretrained)"
            )
        raise self._error(f"{self.folder}: has neither {file_name} nor {INDEX_FILE}")


class FolderWeights(StoredWeights):
    """Weights in such a folder; only the requested boxes are read.

    Args:
        folder: the folder with the files.
        tensors: the tensors of that folder.
        shapes: shapes of the weights, by Polyad's names.
        error: the exception type to raise.
    """

    def __init__(
        self,
        folder: Path,
        tensors: TensorFolder,
        shapes: dict[str, tuple[int, ...]],
        error: type[ValueError],
    ) -> None:
        self.folder, self._tensors, self._shapes, self._error = folder, tensors, shapes, error

    @property
    def files_folder(self) -> Path:
        """The folder of further files that belong to the weights, such as a tokenizer."""
        return self.folder

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the weights by Polyad's names."""
        return self._shapes

    def parts(self, name: str, slices: tuple[slice, ...]) -> Iterator[torch.Tensor]:
        """Yields a part of a weight in our orientation, of any dtype, as stored in one tensor of
        the files, or in several, row after row; possibly as views of the mapped file.

        Args:
            name: Polyad's name.
            slices: slices in our orientation.
        """
        yield self._tensors.read(name, slices)

    def weight(self, box: Box) -> torch.Tensor:
        """Reads a box of a weight in our orientation, fp32."""
        there = self._shapes.get(box.name)
        if there != tuple(box.shape):
            raise self._error(
                f"{self.folder}: {box.name} has shape {list(there or ()) or 'none'} there, "
                f"{list(box.shape)} in this model"
            )
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

    def let_go(self) -> None:
        """Unmaps the files; the next read maps them again."""
        self._tensors.let_go()


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


def read_json(path: Path, error_class: type[ValueError]) -> dict[str, Any]:
    """Reads a JSON object from a file; its keys are not checked here.

    Raises:
        ValueError: of the given type: it cannot be read, or is not an object.
    """
    tree = json_reader.read_json(path, error=error_class)
    if not isinstance(tree, dict):
        raise error_class(f"{path}: is not a JSON object")
    return tree


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
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"{'; '.join(differing[:3])}{more}" if differing else None
