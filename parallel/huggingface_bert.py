"""A folder of transformers' BERT as a source of weights."""

from pathlib import Path

from polyad.model.bert import BertConfig
from polyad.model.build import ModelSizeError, build_model
from polyad.model.heads import ClassificationHeadConfig
from polyad.model.huggingface import CONFIG_FILE, HuggingFaceError
from polyad.model.huggingface_bert import (
    DECODER,
    EMBEDDING,
    IGNORED,
    config_from_huggingface,
    is_bert,
    parts_of,
    plain_name,
)
from polyad.model.huggingface_vision import Parts
from polyad.model.settings import ModelSettings
from polyad.parallel.huggingface_parts import PartsWeights, is_copy
from polyad.parallel.tensor_folder import TensorFolder, Wanted, read_json

_UNUSED = ("pooler", "cls.seq_relationship")
# What decides which weights the encoder has and what they compute; a head may be new.
_FREE = ("head", "dropout", "recompute", "compile", "initializer_range")


def is_bert_folder(path: Path) -> bool:
    """Whether config.json of a folder is of a BERT."""
    return is_bert(read_json(path / CONFIG_FILE, HuggingFaceError))


class BertWeights(PartsWeights):
    """The weights of such a folder: a `WeightSource`.

    Args:
        folder: with config.json and model.safetensors, or shards and an index.

    Raises:
        HuggingFaceError: it is incomplete or damaged, asks for what is not built here, or holds a
            pickle.
    """

    def __init__(self, folder: Path) -> None:
        tree = read_json(folder / CONFIG_FILE, HuggingFaceError)
        super().__init__(folder, TensorFolder(folder, HuggingFaceError, plain_name))
        self.config = config_from_huggingface(tree, self._shape, str(folder / CONFIG_FILE))
        last = f"encoder.layer.{self.config.num_layers - 1}.attention.output.LayerNorm.weight"
        if last not in self._tensors.names():
            raise HuggingFaceError(
                f"{folder}: no tensor {last}, though {CONFIG_FILE} says num_hidden_layers "
                f"{self.config.num_layers}"
            )
        self._labels: object = tree.get("id2label")
        self._describe(self.config)
        self._check()

    @property
    def labels(self) -> object:
        """The names of classes as config.json has them."""
        return self._labels

    @property
    def num_classes(self) -> int:
        """Classes of its head; 0 without one."""
        head = self.config.head
        return head.num_classes or 0 if isinstance(head, ClassificationHeadConfig) else 0

    @property
    def note(self) -> str | None:
        """A line for people: what is new, and what of the folder is not used; None for nothing."""
        new = [name for name in self._shapes if self.is_new(name)]
        if new:
            return f"{', '.join(new)}: new, {self.folder} has none of these shapes"
        used = {part for name in self._shapes for part in self.parts(name).names}
        left = sorted(
            name for name in self._tensors.names() if name not in used and name.startswith(_UNUSED)
        )
        said = [f"not brought over: {', '.join(left)}"] if left else []
        return "; ".join([*said, *([self.unnamed] if self.unnamed else [])]) or None

    def model_config(self) -> BertConfig:
        """The configuration of its model, complete."""
        return self.config

    def is_new(self, name: str) -> bool:
        """Whether it is a weight of a head that the folder does not have in this shape."""
        if self._fresh is None or not name.startswith("head."):
            return False
        parts = self.parts(name)
        return any(self._shape(part) != parts.shape for part in parts.names)

    def parts(self, name: str) -> Parts:
        """Where a weight of ours is in the folder."""
        return parts_of(name, self._shapes[name])

    def check_config(self, config: ModelSettings) -> None:
        """Compares the folder's encoder with the one that a configuration describes.

        What the configuration's head has, and the folder has not, is new.

        Raises:
            HuggingFaceError: a key differs; each is named with both values.
        """
        if not isinstance(config, BertConfig):
            raise HuggingFaceError(
                f"{self.folder}: is of another model: model.kind 'bert' there, {config.kind!r} here"
            )
        theirs, ours = (c.model_dump(exclude=set(_FREE)) for c in (self.config, config))
        if config.feed_forward.kind == self.config.feed_forward.kind == "dense":
            for values, each in ((theirs, self.config), (ours, config)):
                inner = each.feed_forward.inner_size(
                    each.hidden_size
                )  # null is four times the width
                values["feed_forward"] = {"hidden_size": inner}
        differing = [
            f"model.{key} {theirs.get(key)!r} there, {value!r} here"
            for key, value in ours.items()
            if theirs.get(key) != value
        ]
        if differing:
            raise HuggingFaceError(
                f"{self.folder}: is of another model: {'; '.join(differing[:3])}"
            )
        self._fresh = build_model(config)
        self._describe(config)

    def _describe(self, config: BertConfig) -> None:
        try:
            named = build_model(config).named_parameters()
        except ModelSizeError:
            raise HuggingFaceError(
                f"{self.folder / CONFIG_FILE}: asks for more numbers than a tensor can have"
            ) from None
        self._shapes = {name: tuple(parameter.shape) for name, parameter in named}

    def _check(self) -> None:
        wanted: dict[str, Wanted] = {}
        for name in self._shapes:
            parts = self.parts(name)
            wanted |= {each: Wanted(parts.shape) for each in parts.names}
        faults = self._tensors.faults(wanted, CONFIG_FILE)
        strange = sorted(self._tensors.names() - wanted.keys())
        faults += [f"unknown tensor {name}" for name in strange if not IGNORED.fullmatch(name)]
        if not faults:
            copies = {DECODER: EMBEDDING}
            if "cls.predictions.bias" in wanted:
                copies["cls.predictions.decoder.bias"] = "cls.predictions.bias"
            faults = [
                f"{name} is not {other}, though they are tied"
                for name, other in copies.items()
                if not is_copy(self._tensors, name, other)
            ]
        self._tensors.refuse(faults)
