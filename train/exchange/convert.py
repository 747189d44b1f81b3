"""`polyad convert`: converts weights to other formats and back, one tensor at a time.

There is a writer for each format. It writes into a folder that becomes the destination once it is
complete.
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from polyad.data.config import DataConfig, DataSettings, MaskedTextConfig
from polyad.data.files import named, temporary_folder
from polyad.data.images.config import NORMALIZATIONS, ImageDataConfig
from polyad.data.text.manifest import TOKENIZER_FILE
from polyad.data.text.tokenizers.tokenizer import Tokenizer
from polyad.model.bert import BertConfig
from polyad.model.build import num_parameters
from polyad.model.config import dump_yaml
from polyad.model.decoder import DecoderConfig, DecoderSettings
from polyad.model.families.family import CONFIG_FILE, Known, computes_the_same
from polyad.model.families.registry import family_of_model
from polyad.model.settings import ModelSettings
from polyad.model.vision import ImageSettings
from polyad.parallel.checkpoint.format import CONFIG_FILE as OUR_CONFIG_FILE
from polyad.parallel.checkpoint.load import Checkpoint, read_newest
from polyad.parallel.checkpoint.save import save_weights
from polyad.parallel.families import FamilyWeights, Origin, stored_entries
from polyad.parallel.peft import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PeftWeights
from polyad.parallel.source import differing_shapes
from polyad.parallel.tensor_file import FileTensor, write_tensors
from polyad.parallel.tensor_folder import WEIGHTS_FILE, PlainWeights
from polyad.parallel.weights import AdaptedCheckpoint, Choice, Weights, open_weights, origin_of
from polyad.train.config.run import RunConfig, config_of_checkpoint
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed, Merging, is_split
from polyad.train.exchange.peft import peft_files
from polyad.train.guard.run_folder import RunFolderConfig
from polyad.train.loop.optimizer import TrainConfig
from polyad.train.results import aligned
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


def convert(
    source: Path,
    destination: Path,
    to: Format,
    change: Change | None = None,
    choice: Choice = "trained",
    merge: bool = False,
    base: Path | None = None,
) -> dict[str, Any]:
    """Writes the weights of a model in another format, bit for bit in fp32.

    Args:
        source: a checkpoint or run of Polyad, a folder of another library's model that
            `open_weights` knows, or a folder of safetensors under our names.
        destination: the folder to create; it may exist if it is empty.
        to: `huggingface` for config.json, model.safetensors and the tokenizer, of a model that
            another library has; `safetensors` for config.yaml, model.safetensors and the tokenizer,
            of any; `polyad` for a checkpoint at step 0 without optimizer state; `peft` for the
            adapters alone of a decoder, a dense GPT-2 or a BERT that was trained with LoRA.
        change: change of the model, such as from dense to experts; the format may stay the same.
        choice: which weights of a checkpoint; for the average the format may stay the same.
        merge: whether to merge adapters into the weights, and make split feed-forwards dense again;
            the format may stay the same.
        base: see `open_weights`.

    Returns:
        A description of what was written, as JSON values.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if not destination.name:  # `.`: the folder is renamed into place, so it needs its name
        destination = destination.absolute()

    def converted(chosen: Path) -> dict[str, Any]:
        """Converts the chosen checkpoint of a run, or the source itself."""
        refuse_what_is_there(destination)
        opened = open_weights(chosen, choice, base)
        if format_of(opened) == to and not change and choice == "trained" and not merge:
            raise ConfigError(f"{source}: is in this format already; name another with --to")
        config: Any = opened.model_config()
        applied = Merging() if merge and change is None and is_split(config) else change
        if applied and getattr(config, "replaced", None) is not None:
            raise applied.error(
                f"{opened.folder}: has model.replaced, which gives the blocks "
                f"{config.replaced_blocks()} another feed-forward; a model without it is needed"
            )
        check_adapters(opened, to, merge=merge)
        weights = Source(opened, applied)
        if choice == "ema":
            weights.notes.append("the weights are the moving average that train.ema keeps")
        # A typing error in num_experts can mean any size.
        existing = next(path for path in destination.absolute().parents if path.exists())
        if applied and weights.bytes > (free := shutil.disk_usage(existing).free):
            raise applied.error(
                f"makes {weights.bytes:,} bytes, and {free:,} are free in {existing}"
            )
        parent = destination.absolute().parent
        with (
            named(destination),
            closing(weights.progress),
            temporary_folder(f".{destination.name}.", parent, ".partial") as staging,
        ):
            WRITERS[to](weights, staging, destination)
            staging.rename(destination.absolute())
        if applied:
            weights.notes += applied.notes(weights.config)
        parameters = num_parameters(weights.config)
        if to == "peft" and isinstance(opened, AdaptedCheckpoint):
            beside = [adapter for _, adapter in opened.adapters.values()]
            parameters = sum(p.numel() for adapter in beside for p in adapter.parameters())
        return {
            "source": str(weights.folder),
            "destination": str(destination),
            "format": to,
            "parameters": parameters,
            "vocab_size": getattr(weights.config, "vocab_size", None),
            "tokenizer": weights.tokenizer is not None,
            "files": {path.name: path.stat().st_size for path in sorted(destination.iterdir())},
            "notes": weights.notes,
        }

    return read_newest(source, converted)


def format_of(weights: Weights) -> Format:
    """The format of opened weights."""
    if isinstance(weights, PlainWeights):
        return "safetensors"
    if isinstance(weights, FamilyWeights):
        return "peft" if isinstance(weights, PeftWeights) else "huggingface"
    return "polyad"


def check_adapters(weights: Weights, to: Format, *, merge: bool) -> None:
    """Checks that `merge` is used if and only if there are adapters, or groups of units, to merge.

    Args:
        weights: the weights to convert.
        to: their new format.
        merge: whether to merge.

    Raises:
        ConfigError: it is missing, or there are none.
    """
    adapted = isinstance(weights, AdaptedCheckpoint | PeftWeights)
    if not adapted and (to == "peft" or (merge and not is_split(weights.model_config()))):
        raise ConfigError(
            f"{'--merge' if merge else '--to peft'}: {weights.folder} holds no adapters, which "
            "runs with adapt.lora do; --merge also merges what --split makes"
        )
    if adapted and merge == (to == "peft"):
        raise ConfigError(
            f"{weights.folder}: holds adapters: give --merge to merge them into the weights, or "
            "--to peft to write them alone"
        )


def refuse_what_is_there(destination: Path) -> None:
    """Checks that a folder can be created.

    Raises:
        ConfigError: it holds files, or is a file.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: exists and is not an empty folder; name another one")


def conversion_table(result: dict[str, Any]) -> str:
    """Formats the result of a conversion."""
    rows = [
        ("source", result["source"]),
        ("destination", f"{result['destination']} ({result['format']})"),
        ("parameters", f"{result['parameters']:,}"),
        ("files", ", ".join(f"{name} {size:,} B" for name, size in result["files"].items())),
        *(("note", note) for note in result["notes"]),
    ]
    return "\n".join(aligned(rows, "<"))


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
    assert isinstance(weights.before, AdaptedCheckpoint)
    tree, tensors = peft_files(weights.before)
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
