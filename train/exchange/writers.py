"""Weights to convert, and the formats that `polyad convert` writes, one function each.

Each writes into a folder that becomes the destination once it is complete, one tensor at a time.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from polyad.data.config import DataConfig, DataSettings, MaskedTextConfig
from polyad.data.images.config import NORMALIZATIONS, ImageDataConfig
from polyad.data.text.manifest import TOKENIZER_FILE
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.config import dump_yaml
from polyad.model.decoder import DecoderConfig, DecoderSettings
from polyad.model.families.family import CONFIG_FILE, Known, computes_the_same
from polyad.model.families.registry import family_of_model
from polyad.model.settings import ModelSettings
from polyad.model.vision import ImageSettings
from polyad.parallel.checkpoint.format import CONFIG_FILE as OUR_CONFIG_FILE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.save import save_weights
from polyad.parallel.families import Origin, stored_entries
from polyad.parallel.peft import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from polyad.parallel.source import differing_shapes
from polyad.parallel.tensor_file import FileTensor, write_tensors
from polyad.parallel.tensor_folder import WEIGHTS_FILE
from polyad.parallel.weights import AdaptedCheckpoint, Weights, origin_of
from polyad.train.config.run import RunConfig, config_of_checkpoint
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed
from polyad.train.exchange.peft import peft_files
from polyad.train.guard.run_folder import RunFolderConfig
from polyad.train.loop.optimizer import TrainConfig
from polyad.train.state import TrainState
from polyad.train.tasks.pixels import PREPROCESSOR_FILE, read_pixels, transformers_file
from polyad.train.tasks.vocabulary import CLASSES_FILE, names_of, tokenizer_of

Format = Literal["huggingface", "polyad", "safetensors", "peft"]
BATCH_SIZE = 8
"""Batch size in a converted checkpoint's configuration, for `polyad evaluate`."""


class Source(Changed):
    """Weights to convert, with checks and notes about them.

    Args:
        weights: weights in any format.
        change: a change of the model; None: no change.
    """

    def __init__(self, weights: Weights, change: Change | None) -> None:
        super().__init__(weights, change)
        if not change and (differing := differing_shapes(weights.shapes(), self.shapes)):
            raise ConfigError(f"{self.folder}: does not match its configuration: {differing}")
        self.bytes = 4 * sum(map(math.prod, self.shapes.values()))
        self.progress = tqdm(
            total=self.bytes, desc="converting", unit="B", unit_scale=True, disable=None
        )
        self.notes: list[str] = [] if (note := getattr(weights, "note", None)) is None else [note]
        self.tokenizer: Tokenizer | None = tokenizer_of(weights)

    @property
    def adapted(self) -> AdaptedCheckpoint:
        """The same as a checkpoint of adapters, for `--to peft`."""
        assert isinstance(self.before, AdaptedCheckpoint)
        return self.before

    @property
    def class_names(self) -> list[str] | None:
        """The class names; None if unknown.

        Raises:
            ConfigError: Their number differs from the model's number of classes.
        """
        names = names_of(self.before)
        config: Any = self.config
        classes = getattr(config, "num_classes", None)
        classes = classes or getattr(getattr(config, "head", None), "num_classes", None)
        if names and classes and len(names) != classes:
            raise ConfigError(
                f"{self.folder}: names {len(names)} classes, but its model has {classes}"
            )
        return names

    def files(self) -> dict[str, bytes]:
        """The tokenizer and the class names, as far as they are known, by file name."""
        files: dict[str, bytes] = {}
        if self.tokenizer is not None:
            files[self.tokenizer.file] = self.tokenizer.file_bytes()
        if self.class_names is not None:
            files[CLASSES_FILE] = json.dumps(self.class_names, ensure_ascii=False).encode()
        return files

    @property
    def data(self) -> DataSettings | None:
        """The data settings of the run that trained them; None for other libraries' weights."""
        opened = self.before
        return config_of_checkpoint(opened).data if isinstance(opened, Checkpoint) else None

    def origin(self) -> Origin | None:
        """Contents beside the weights of the other library's folder; None: they are not from such a
        folder of a decoder, or the kind of model has changed."""
        if (contents := origin_of(self.before)) is None:
            return None
        origin = Origin.model_validate(contents)
        return origin if self.change is None else self.change.origin(origin)

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight."""
        value = super().whole(name)
        self.progress.update(value.nbytes)
        return value


def _to_huggingface(weights: Source, staging: Path, destination: Path) -> None:
    """Writes a folder of transformers."""
    config, tokenizer = weights.config, weights.tokenizer
    origin, family = weights.origin(), None
    if origin is not None and isinstance(config, DecoderConfig):
        family = origin.family()
        before = family.read_config(origin.config, lambda name: None, CONFIG_FILE)
        assert isinstance(before, DecoderConfig)
        if not computes_the_same(config, before):  # it was trained as a different model
            origin = family = None
    if family is None:
        family = family_of_model(config)
    beside = Known(
        weights.class_names,
        tokenizer.end_of_text_id if tokenizer else None,
        tokenizer.vocabulary().get("[PAD]") if tokenizer else None,
    )
    tree = origin.config if origin else family.write_config(config, beside)
    buffers = weights.buffers()
    entries = stored_entries(
        family,
        config,
        family.parameter_shapes(config),
        lambda name: weights.whole(name) if name in weights.shapes else buffers.get(name),
        origin,
    )
    _write_json(staging / CONFIG_FILE, tree)
    _write_folder(weights, staging, entries)
    for name, text in (origin.files if origin else {}).items():
        (staging / name).write_text(text, encoding="utf-8")
    is_trained = isinstance(weights.before, Checkpoint) and weights.before.training_step > 0
    if origin and origin.dtype != "F32" and is_trained:
        weights.notes.append(f"weights are rounded to {origin.dtype}, as in the original model")


def _to_safetensors(weights: Source, staging: Path, destination: Path) -> None:
    entries = [
        FileTensor(name, torch.float32, shape, partial(weights.whole, name))
        for name, shape in weights.shapes.items()
    ]
    for name, value in weights.buffers().items():
        entries.append(FileTensor(name, value.dtype, tuple(value.shape), value.detach))
    section = {"model": weights.config.model_dump(mode="json")}
    (staging / OUR_CONFIG_FILE).write_text(dump_yaml(section), encoding="utf-8")
    _write_folder(weights, staging, entries)


def _write_folder(weights: Source, staging: Path, entries: Sequence[FileTensor]) -> None:
    """Writes tensors, and beside them what is known of pixels, classes and the tokenizer."""
    write_tensors(staging / WEIGHTS_FILE, entries, {"format": "pt"})
    config, tokenizer = weights.config, weights.tokenizer
    if isinstance(config, ImageSettings) and (settings := _pixels_of(weights, config)):
        _write_json(staging / PREPROCESSOR_FILE, transformers_file(settings, config.image_size))
    for name, content in weights.files().items():
        (staging / name).write_bytes(content)
    if tokenizer is None:
        return
    assert isinstance(config, DecoderSettings | BertConfig)
    # The class in transformers that reads a SentencePiece model depends on the model.
    is_json = tokenizer.file == TOKENIZER_FILE
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} if is_json else {}
    _write_json(
        staging / "tokenizer_config.json",
        about
        | _special_tokens(config, tokenizer)
        | {
            "model_max_length": config.sequence_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def config_for_model(
    model: ModelSettings, folder: Path, name: str, data: DataSettings | None = None
) -> tuple[RunConfig, list[str]]:
    """Completes the configuration of a run that starts from a folder of weights.

    Args:
        model: the weights' model.
        folder: their folder.
        name: name of the run's folder in runs/.
        data: the data; None: the kind that the model reads, without a path yet.

    Returns:
        The configuration, and notes for the user about assumptions.
    """
    notes: list[str] = []
    if data is None:
        data, notes = _data_of(model, folder)
    run = RunConfig(
        run=RunFolderConfig(folder=f"runs/{name}"),
        model=model,
        data=data,
        train=TrainConfig(steps=1, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE),
    )
    return run, notes


def _data_of(model: ModelSettings, folder: Path) -> tuple[DataSettings, list[str]]:
    """The section `data` without a path, and notes."""
    if not isinstance(model, ImageSettings):
        return (MaskedTextConfig() if isinstance(model, BertConfig) else DataConfig()), []
    keys, notes = read_pixels(folder, model.image_size)
    settings = ImageDataConfig.model_validate({"path": "runs/images"} | keys)
    if "normalization" not in keys:
        assumed = f"assuming data.normalization: {settings.normalization}"
        unknown = f"{folder} does not say how pixels are normalized: {assumed} (allowed: "
        unknown += f"{', '.join(NORMALIZATIONS)})"
        notes = [*notes, f"{assumed}: check it" if notes else unknown]
    return settings, notes


def _pixels_of(weights: Source, config: ImageSettings) -> ImageDataConfig | None:
    """The preprocessing of images with which weights were trained; None, with a note, if
    unknown."""
    if isinstance(weights.data, ImageDataConfig):
        return weights.data
    keys, notes = read_pixels(weights.folder, config.image_size)
    weights.notes += notes
    if "normalization" in keys:
        return ImageDataConfig.model_validate({"path": "runs/images"} | keys)
    weights.notes.append(
        f"{weights.folder} does not say how pixels are normalized, so the result does not either"
    )
    return None


def _special_tokens(config: ModelSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer's special tokens and options under transformers' names."""
    if not isinstance(config, BertConfig):
        begin = tokenizer.begin_of_text
        return {
            "bos_token": begin or tokenizer.end_of_text,
            "eos_token": tokenizer.end_of_text,
            **({} if begin is None else {"add_bos_token": True}),
        }
    names = ("cls", "sep", "mask", "pad", "unk")
    vocabulary = tokenizer.vocabulary()
    special = {f"{n}_token": token for n in names if (token := f"[{n.upper()}]") in vocabulary}
    return special | {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}


def _to_polyad(weights: Source, staging: Path, destination: Path) -> None:
    tokenizer, config = weights.tokenizer, weights.config
    run, notes = config_for_model(config, weights.folder, destination.name, weights.data)
    weights.notes += notes
    state = TrainState(
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else None,
        end_of_text=tokenizer.end_of_text if tokenizer else None,
    )
    origin: dict[str, Any] = {"converted_from": str(weights.folder)}
    if (of_folder := weights.origin()) is not None:
        origin["huggingface"] = of_folder.model_dump()
    if weights.change:
        origin[weights.change.done] = weights.change.text
    save_weights(
        staging,
        weights.shapes,
        weights.whole,
        buffers=weights.buffers(),
        state=state.to_json() | origin,
        config_yaml=run.to_yaml(),
        files=weights.files(),
    )


def _to_peft(weights: Source, staging: Path, destination: Path) -> None:
    tree, tensors = peft_files(weights.adapted)
    entries = [
        FileTensor(name, torch.float32, tuple(value.shape), value.detach) for name, value in tensors
    ]
    _write_json(staging / ADAPTER_CONFIG_FILE, tree)
    write_tensors(staging / ADAPTER_FILE, entries, {"format": "pt"})


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


WRITERS: dict[Format, Callable[[Source, Path, Path], None]] = {
    "huggingface": _to_huggingface,
    "polyad": _to_polyad,
    "safetensors": _to_safetensors,
    "peft": _to_peft,
}
