"""Folders of other libraries' models: read as a source of weights, and written from ours.

The names and configurations are those of `model/families`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyad.data.tables import each_once
from polyad.model.build import initial_value
from polyad.model.families.family import CONFIG_FILE, Family, comparable
from polyad.model.families.keys import WeightsError
from polyad.model.families.registry import family_of_files
from polyad.model.families.tensors import Piece, Shape, Slices
from polyad.model.heads import HEAD
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.format import Record
from polyad.parallel.source import first_few
from polyad.parallel.tensor_file import TORCH_DTYPES, FileTensor
from polyad.parallel.tensor_folder import (
    WEIGHT_DTYPES,
    FolderWeights,
    Quantized,
    TensorFolder,
    Wanted,
    read_json,
)

GENERATION_FILE = "generation_config.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", GENERATION_FILE,
           "added_tokens.json", "chat_template.jinja")  # fmt: skip
_UNNAMED = re.compile(r"LABEL_\d+")


def is_huggingface_folder(path: Path) -> bool:
    """Returns whether a path is a folder of another library, not a checkpoint or run of ours."""
    return (path / CONFIG_FILE).is_file() and not (path / "manifest.json").exists()


class Origin(Record):
    """What a folder of another library contains besides weights, kept to be written again."""

    config: dict[str, Any]
    """The content of config.json."""
    dtype: str
    """The dtype of most tensors, as safetensors names it."""
    dtypes: dict[str, str]
    """The dtypes of the others, by their plain names."""
    copies: list[str]
    """Plain names of tensors that are copies of others, such as a tied head."""
    fused: str | None = None
    """The plain name of a tensor with several experts, if the family's rules are per expert."""
    files: dict[str, str]
    """Further small files, by name."""

    def family(self) -> Family:
        """Returns the family, with the names that its tensors had."""
        names = [] if self.fused is None else [self.fused]
        return family_of_files(self.config, CONFIG_FILE).for_names(names)


class FamilyWeights(FolderWeights):
    """The weights of such a folder, as a `Source` that only reads the requested boxes.

    Args:
        folder: the folder, with config.json and model.safetensors, or shards and
            model.safetensors.index.json.

    Raises:
        WeightsError: its family is unknown, it is incomplete or damaged, needs something that
            is not supported, or contains a pickle.
    """

    def __init__(self, folder: Path) -> None:
        place = folder / CONFIG_FILE
        self._tree = read_json(place)
        self.family: Family = family_of_files(self._tree, str(place))
        tensors = TensorFolder(folder, self.family.plain_name)
        self.family = self.family.for_names(tensors)
        super().__init__(folder, tensors)
        self.config: Any = self.family.read_config(self._tree, self._shape, str(place))
        self.seed = 0
        """The seed of a new head; set by a run."""
        self._describe(self.config, CONFIG_FILE)
        self._head_may_be_new = self.family.may_lack_head and not self._has_head()
        self._check()

    @property
    def class_names(self) -> list[str] | None:
        """The class names of its head; None if it has none, or does not name all classes."""
        count, labels = self._num_classes, self._tree.get("id2label")
        if not isinstance(labels, dict) or count < 2 or len(labels) != count:
            return None
        names = [labels.get(str(number)) for number in range(count)]
        texts = [name for name in names if isinstance(name, str)]
        if len(texts) < count or all(map(_UNNAMED.fullmatch, texts)):
            return None
        return each_once(texts)

    @property
    def note(self) -> str | None:
        """A line for the user on what is new and what is unused; None if nothing is."""
        new = [name for name in self._shapes if self.is_new(name)]
        if new and self.family.may_lack_head:
            return f"{self.folder} has no head for these classes: it starts from random values"
        if new:
            return f"{', '.join(new)}: random, as {self.folder} has none of these shapes"
        left = [name for name in self.unread() if name.startswith(self.family.mentioned)]
        notes = [f"not loaded: {', '.join(left)}"] if left else []
        if self._num_classes > 1 and self.class_names is None:
            notes.append(
                f"{self.folder / CONFIG_FILE} does not name all {self._num_classes} classes of its "
                f"head: check that they are the data's classes, in the same order"
            )
        return "; ".join(notes) or None

    def origin(self) -> Origin:
        """Returns what is written again beside the weights on export."""
        tree = {key: value for key, value in self._tree.items() if key != "quantization_config"}
        named = ((name, tensor.dtype) for name, tensor in self._tensors.items())
        dtypes = {name: dtype for name, dtype in named if dtype in WEIGHT_DTYPES}
        most = max(set(dtypes.values()), key=list(dtypes.values()).count)
        copies = [name for name in self.family.copies(self.config) if name in dtypes]
        plain = family_of_files(self._tree, CONFIG_FILE)
        paths = [self.files_folder / name for name in _BESIDE]
        files = {path.name: path.read_text("utf-8") for path in paths if path.is_file()}
        return Origin(
            config=tree,
            dtype=most,
            dtypes={name: dtype for name, dtype in dtypes.items() if dtype != most},
            copies=copies,
            fused=next((name for name in dtypes if plain.for_names([name]) is not plain), None),
            files=files,
        )

    def stored_names(self, name: str) -> list[str]:
        """Returns the names of the folder's tensors for one of our weights."""
        return [piece.name for piece in self._stored_pieces(name)]

    def unread(self) -> tuple[str, ...]:
        """Lists the folder's tensors that none of our weights or buffers uses, in order."""
        return tuple(sorted(self._tensors.keys() - self._wanted().keys()))

    def _wanted(self) -> dict[str, Wanted]:
        """Returns the folder's tensors that weights and buffers are read from."""
        wanted = dict[str, Wanted]()
        for name in self._shapes:
            wanted |= {piece.name: Wanted(piece.shape) for piece in self._stored_pieces(name)}
        for name, buffer in self._model.named_buffers():
            if (rule := self.family.find(name)) is not None:
                wanted[rule.names[0]] = Wanted(tuple(buffer.shape))
        return wanted

    def is_new(self, name: str) -> bool:
        """Returns whether a tensor belongs to a head that the folder lacks in this shape."""
        if not self._head_may_be_new or not name.startswith(HEAD):
            return False
        if name not in self._shapes or self.family.find(name) is None:
            return True
        return any(self._shape(piece.name) != piece.shape for piece in self._pieces(name))

    def check_config(self, config: ModelSettings) -> None:
        """Compares the folder's model with a model that is initialized from it.

        Parts of that model's head that the folder lacks count as new from now on.

        Raises:
            WeightsError: a key differs; each is named with both values.
        """
        if type(config) is not type(self.config):
            raise WeightsError(
                f"{self.folder}: is a different model: model.kind {self.config.kind!r} there, "
                f"{config.kind!r} here"
            )
        free = self.family.free(config)
        theirs, ours = (comparable(each, free) for each in (self.config, config))
        differing = [
            f"{key} {theirs.get(key)!r} there, {value!r} here"
            for key, value in ours.items()
            if theirs.get(key) != value
        ]
        if differing:
            raise WeightsError(f"{self.folder}: is a different model: {first_few(differing)}")
        self._head_may_be_new = True
        self._describe(config, CONFIG_FILE)

    def buffer(self, name: str) -> Tensor:
        """Returns the folder's buffer, or the initial value of one that only training has."""
        rule = self.family.find(name)
        if rule is None or self.is_new(name):
            return initial_value(self._model, name, self.seed)
        return self._tensors[rule.names[0]].read(()).to(torch.float32, copy=True)

    def parts(self, name: str, slices: Slices) -> Iterator[Tensor]:
        """Yields the parts of a weight from each tensor of the folder, row after row."""
        if self.is_new(name):
            yield initial_value(self._model, name, self.seed)[slices]
            return
        for piece in self._pieces(name):
            start = max(slices[0].start, piece.rows.start) - piece.rows.start
            stop = min(slices[0].stop, piece.rows.stop) - piece.rows.start
            if start >= stop:
                continue
            tensor = self._tensors.get(piece.name)
            # Of a quantized tensor only one expert is in memory at a time.
            step = 1 if isinstance(tensor, Quantized) else stop - start
            for row in range(start, stop, step):
                box = (slice(row, row + step), *slices[1:])
                size = tuple(each.stop - each.start for each in box)
                if tensor is None:
                    yield torch.zeros(size)
                else:
                    yield piece.in_our_form(tensor.read(piece.box(box)), size)

    @property
    def _num_classes(self) -> int:
        """The number of classes of its head; 0 without one."""
        values = self.config.from_data()
        return values.get("num_classes") or values.get("head.num_classes") or 0

    def _shape(self, name: str) -> Shape | None:
        """Returns the shape of a tensor of the folder; None if it does not exist."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.shape

    def _pieces(self, name: str) -> Iterator[Piece]:
        return self.family.pieces(name, self._shapes[name])

    def _stored_pieces(self, name: str) -> list[Piece]:
        """Returns the pieces of a weight that the folder has; none of a new one."""
        pieces = () if self.is_new(name) else self._pieces(name)
        return [each for each in pieces if each.name in self._tensors or not each.rule.optional]

    def _has_head(self) -> bool:
        """Returns whether the folder has any tensor of a head."""
        rules = [self.family.find(name) for name in self._shapes if name.startswith(HEAD)]
        return any(rule and rule.names[0] in self._tensors for rule in rules)

    def _check(self) -> None:
        """Checks that every tensor is accounted for."""
        wanted = self._wanted()
        copies = self.family.copies(self.config)
        for name, other in copies.items():
            if name in self._tensors and other in wanted:
                wanted[name] = wanted[other]
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        strange = sorted(self._tensors.keys() - wanted.keys())
        ignored = self.family.ignored
        if self.family.extra_blocks:
            after = self.family.block.format(self.config.num_layers)
            strange = [name for name in strange if not name.startswith(after)]
        faults += [f"unknown tensor {name}" for name in strange if not ignored.fullmatch(name)]
        if not faults:
            faults = [
                f"{name} is not {other}, though {CONFIG_FILE} says that they are tied"
                for name, other in copies.items()
                if not _is_copy(self._tensors, name, other)
            ]
        self._tensors.refuse(faults)


def stored_entries(
    family: Family,
    config: ModelSettings,
    shapes: Mapping[str, Shape],
    whole: Callable[[str], Tensor | None],
    origin: Origin | None = None,
) -> list[FileTensor]:
    """Returns the tensors of a file for another library, in the order of our weights.

    Args:
        family: the family as which the model is written.
        config: the configuration of the model.
        shapes: shapes of the weights that their model has, by our names.
        whole: returns one of our weights; None if there is none, and zeros are written.
        origin: the origin of the weights; None if all are fp32.
    """
    parts: dict[str, list[tuple[str, Piece]]] = {}
    for name, shape in shapes.items():
        for piece in family.pieces(name, shape):
            parts.setdefault(piece.name, []).append((name, piece))
    copies = family.copies(config)
    for name in () if origin is None else origin.copies:
        if copies.get(name) in parts:
            parts[name] = parts[copies[name]]
    dtypes = dict.fromkeys(parts, torch.float32)
    if origin is not None:
        dtypes = {name: TORCH_DTYPES[origin.dtypes.get(name, origin.dtype)] for name in parts}
    # Larger element types first, so that each tensor is aligned to its own element size.
    ordered = sorted(parts.items(), key=lambda each: -dtypes[each[0]].itemsize)
    return [
        FileTensor(
            family.stored_name(plain, config),
            dtypes[plain],
            pieces[0][1].shape,
            partial(_assembled, pieces, whole, dtypes[plain]),
        )
        for plain, pieces in ordered
    ]


def _assembled(
    pieces: list[tuple[str, Piece]], whole: Callable[[str], Tensor | None], dtype: torch.dtype
) -> Tensor:
    stored = torch.zeros(pieces[0][1].shape)
    for name, piece in pieces:
        value = whole(name)
        if value is not None:
            piece.write(stored, value)
    return stored.to(dtype)


def _is_copy(tensors: TensorFolder, name: str, other: str) -> bool:
    """Returns whether two tensors of a folder are equal, bit for bit (NaN is not equal to itself).

    Args:
        tensors: the folder.
        name: the name of a tensor that may be missing, such as a tied head; it then counts as a
            copy.
        other: the name of an existing tensor.
    """
    if name not in tensors:
        return True
    one, two = (tensors[each].read(()).view(torch.uint8) for each in (name, other))
    return torch.equal(one, two)
