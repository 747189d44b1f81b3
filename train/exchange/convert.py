"""`polyad convert`: weights from Polyad to other formats and back, one tensor at a time."""

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from data.config import DataConfig, DataSettings, MaskedTextConfig
from data.images.config import ImageDataConfig
from data.progress import Progress
from data.text.manifest import SENTENCEPIECE_FILE, TOKENIZER_FILE
from data.text.tokenizers.tokenizer import Tokenizer
from model import huggingface_bert as bert
from model.bert import BertConfig
from model.build import build_model, num_parameters
from model.config_yaml import dump
from model.gpt2 import GPT2Config
from model.huggingface import (
    CONFIG_FILE,
    HEAD,
    PREFIX,
    HuggingFaceError,
    config_to_huggingface,
    parameter_shapes,
    their_tensor,
)
from model.huggingface_vision import Parts, config_to_files, parts_of
from model.settings import ModelSettings
from model.vision import ImageModelSettings
from parallel.adapted import AdaptedCheckpoint
from parallel.checkpoint.checkpoint import find_checkpoint
from parallel.checkpoint.tensor_file import Entry, write_safetensors
from parallel.checkpoint.tensor_folder import WEIGHTS_FILE, differing_shapes
from parallel.checkpoint.writer import save_weights
from parallel.fragments import persistent_buffers
from parallel.huggingface import HuggingFaceWeights, is_huggingface_folder
from parallel.huggingface_bert import BertWeights
from parallel.plain_weights import CONFIG_FILE as OUR_CONFIG_FILE
from parallel.plain_weights import is_plain_folder
from parallel.weights import Choice, Weights, open_weights
from train.config.run import RunConfig
from train.errors import ConfigError
from train.exchange.change import Change, Changed
from train.exchange.peft import ADAPTER_CONFIG_FILE, ADAPTER_FILE, peft_files
from train.exchange.split import Merging, is_split
from train.exchange.upcycle import Upcycling
from train.guard.run_folder import RunFolderConfig
from train.loop.config import TrainConfig
from train.state import TrainState
from train.tasks.images import CLASSES_FILE, class_names_of
from train.tasks.tokenizers import tokenizer_of

Format = Literal["huggingface", "polyad", "safetensors", "peft"]
FORMATS: dict[Format, str] = {
    "huggingface": "a Hugging Face folder",
    "polyad": "of Polyad",
    "safetensors": "a folder of safetensors under our names",
    "peft": "a folder of adapters of the library peft",
}
BATCH_SIZE = 8
"""The batch size in a converted checkpoint's configuration, for `polyad evaluate`."""


def convert(
    source: Path,
    destination: Path,
    to: Format,
    change: Change | None = None,
    choice: Choice = "trained",
    merge: bool = False,
    base: Path | None = None,
) -> dict[str, Any]:
    """Writes the weights of a model in another format. All ways are bitwise in fp32.

    Args:
        source: a checkpoint or run of Polyad, a folder of another library's model that
            `open_weights` knows, or a folder of safetensors under our names.
        destination: the folder to make; it may exist if it is empty.
        to: `huggingface` for config.json, model.safetensors and the tokenizer, of a dense model;
            `safetensors` for config.yaml, model.safetensors and the tokenizer, of any; `polyad` for
            a checkpoint at step 0 without optimizer state; `peft` for the adapters alone of a dense
            GPT-2 that was trained with LoRA.
        change: makes another model of it on the way, as experts of a dense one; the format may
            stay.
        choice: which weights of a checkpoint; the format may stay for the average.
        merge: whether adapters become part of the weights, and feed-forwards that were split dense
            again; the format may stay.
        base: see `open_weights`.

    Returns:
        What was written: JSON values.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if not destination.name:  # `.`: the folder is renamed into place, so it needs its name
        destination = destination.absolute()
    _refuse_what_is_there(destination)
    is_of: Format = "polyad"
    if is_huggingface_folder(source):
        is_of = "huggingface"
    elif is_plain_folder(source):
        is_of = "safetensors"
    else:
        find_checkpoint(source)  # raises an error if there is none
    if isinstance(change, Upcycling) and to == "huggingface":
        raise change.error(
            "--to huggingface is not allowed: Hugging Face's GPT-2 has no experts; --to polyad and "
            "--to safetensors are"
        )
    if is_of == to and not change and choice == "trained" and not merge:
        others = " and ".join(f"--to {name}" for name in FORMATS if name not in (to, "peft"))
        raise ConfigError(f"{source}: is {FORMATS[to]} already; {others} are the other ways")
    opened = open_weights(source, choice, base)
    if merge and change is None and is_split(opened.model_config()):
        change = Merging()
    _check_adapters(source, opened, to, merge, is_split(opened.model_config()))
    weights = _Checked(opened, change)
    if choice == "ema":
        weights.notes.append("the weights are the moving average of the trained ones (train.ema)")
    if change:
        _refuse_more_than_fits(weights.bytes, destination, change)
    with closing(weights.progress), _staging(destination) as staging:
        _WRITERS[to](weights, staging, destination)
        weights.progress.finish(weights.bytes_read)
    weights.note_what_was_made()
    config, tokenizer = weights.config, weights.tokenizer
    files = sorted(destination.iterdir())
    return {
        "source": str(weights.folder),
        "destination": str(destination),
        "format": to,
        "parameters": _count_adapters(weights) if to == "peft" else num_parameters(config),
        "vocab_size": getattr(config, "vocab_size", None),
        "tokenizer": tokenizer is not None,
        "files": {path.name: path.stat().st_size for path in files},
        "notes": weights.notes,
    }


def _check_adapters(source: Path, weights: Weights, to: Format, merge: bool, split: bool) -> None:
    """Checks that adapters are merged where there are some, and only there.

    Raises:
        ConfigError: they are not, or there are none.
    """
    adapted = isinstance(weights, AdaptedCheckpoint)
    if not adapted and (to == "peft" or (merge and not split)):
        option = "--merge" if merge else "--to peft"
        others = " and no groups of units (model.feed_forward.kind: emoe)" if merge else ""
        raise ConfigError(
            f"{option}: {source} holds no adapters{others}; a run with adapt.lora does"
            + (", and what --split makes" if merge else "")
        )
    if merge and to == "peft":
        raise ConfigError("--merge: is not allowed with --to peft, which writes adapters alone")
    if isinstance(weights, AdaptedCheckpoint) and not merge and to != "peft":
        raise ConfigError(
            f"{source}: holds adapters of {weights.base.folder}: --merge makes them part of the "
            f"weights, --to peft writes them alone"
        )


class _Checked:
    """Weights to convert, with checks and notes about them.

    Args:
        weights: of any format.
        change: makes another model of them; None: none.
    """

    def __init__(self, weights: Weights, change: Change | None) -> None:
        self.tokenizer: Tokenizer | None = tokenizer_of(weights)
        self.notes: list[str] = []
        self.change = change
        self.adapted = weights if isinstance(weights, AdaptedCheckpoint) else None
        self._weights: Weights | Changed = weights
        if change:
            self._weights = change.of(weights)
        self.folder = weights.folder
        self.config = self._weights.model_config()
        self.shapes = self._weights.shapes()
        self.bytes, self.bytes_read = 4 * sum(map(math.prod, self.shapes.values())), 0
        self.progress = Progress()
        self.progress.start("converting", self.bytes)
        self._not_finite: list[str] = []
        note = getattr(weights, "note", None)
        if note is not None:
            self.notes.append(note)
        vocabulary = getattr(self.config, "vocab_size", None)
        if self.tokenizer and vocabulary and self.tokenizer.vocab_size > vocabulary:
            raise ConfigError(
                f"{self.folder}: its tokenizer has {self.tokenizer.vocab_size} tokens, its model "
                f"{vocabulary}"
            )

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes of a checkpoint that was trained on images."""
        return class_names_of(self.folder)

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight."""
        value = self._weights.whole(name)
        if not all(end.isfinite() for end in value.aminmax()):  # both are NaN if any element is
            self._not_finite.append(name)
        self.bytes_read += value.nbytes
        self.progress.update(self.bytes_read)
        return value

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers of the model."""
        names = [name for name, _ in persistent_buffers(build_model(self.config))]
        return {name: self._weights.buffer(name) for name in names}

    def check_model(self) -> dict[str, tuple[int, ...]]:
        """Checks the weights against their configuration.

        Returns:
            Names and shapes in the model's order, where a checkpoint has that of its shards.

        Raises:
            ConfigError: the first few differences.
        """
        model = build_model(self.config)
        ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
        if differing := differing_shapes(self.shapes, ours):
            raise ConfigError(f"{self.folder}: is not of its configuration: {differing}")
        return ours

    def note_what_was_made(self) -> None:
        """Notes what a change says of its weights, and which are NaN or infinite."""
        if not isinstance(self._weights, Weights):
            self.notes += self._weights.notes()
        if names := self._not_finite:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(
                f"NaN or infinity in {names[0]}{more}: written as they are, of no use to anyone"
            )


def _to_huggingface(weights: _Checked, staging: Path, destination: Path) -> None:
    if isinstance(weights.config, ImageModelSettings):
        _to_vision_library(weights, staging)
        return
    if isinstance(weights.config, BertConfig):
        _to_bert(weights, weights.config, staging)
        return
    config, tokenizer, held = weights.config, weights.tokenizer, weights.shapes
    assert isinstance(config, GPT2Config)
    tree = config_to_huggingface(config, tokenizer.end_of_text_id if tokenizer else None)
    shapes = dict(parameter_shapes(config))
    if strange := held.keys() - shapes.keys():
        raise HuggingFaceError(f"{weights.folder}: {min(strange)} has no place in GPT-2")
    if lacking := [n for n in shapes if n not in held and (config.bias or n.endswith("weight"))]:
        raise HuggingFaceError(f"{weights.folder}: has no weight {lacking[0]}")
    entries = []
    for name, shape in shapes.items():
        theirs, transposed = their_tensor(name)
        read = _reader(weights, name, shape, transposed)
        shape = shape[::-1] if transposed else shape
        stored = theirs if theirs == HEAD else PREFIX + theirs
        entries.append(Entry(stored, torch.float32, shape, read))
    _write_json(staging / CONFIG_FILE, tree)
    write_safetensors(staging / WEIGHTS_FILE, entries, {"format": "pt"})
    _write_tokenizer(weights, staging)
    if not config.bias:
        weights.notes.append(
            "model.bias is false and Hugging Face's GPT-2 always has biases: zeros were written"
        )
    if tokenizer is not None and tokenizer.file_name == SENTENCEPIECE_FILE:
        weights.notes.append(
            f"the tokenizer is a SentencePiece model, {SENTENCEPIECE_FILE}: transformers does not "
            "find a class for it by itself, and one that it is given may encode otherwise"
        )


def _to_vision_library(weights: _Checked, staging: Path) -> None:
    """transformers' ViT, or timm's Mixer."""
    tree, library = config_to_files(weights.config, weights.class_names)
    _write_json(staging / CONFIG_FILE, tree)
    _write_parts(
        weights,
        staging,
        lambda name, shape: parts_of(name, shape, library, ()),
        lambda name: ("" if name.startswith("classifier.") else library.prefix) + name,
    )


def _to_bert(weights: _Checked, config: BertConfig, staging: Path) -> None:
    """transformers' BERT, of the class that has such a head."""
    tokenizer = weights.tokenizer
    pad_id = tokenizer.vocabulary().get("[PAD]") if tokenizer else None
    tree = bert.config_to_huggingface(config, pad_id, weights.class_names)
    _write_json(staging / CONFIG_FILE, tree)
    _write_parts(
        weights, staging, bert.parts_of, lambda name: bert.stored_name(name, config.head.kind)
    )
    _write_tokenizer(weights, staging)


def _write_parts(
    weights: _Checked,
    staging: Path,
    parts_of_one: Callable[[str, tuple[int, ...]], Parts],
    stored_name: Callable[[str], str],
) -> None:
    """Writes weights of which one of ours is several of theirs."""
    entries = []
    for name, shape in weights.check_model().items():
        parts = parts_of_one(name, shape)
        for number, theirs in enumerate(parts.names):
            read = _part_reader(weights, name, number, parts)
            entries.append(Entry(stored_name(theirs), torch.float32, parts.shape, read))
    write_safetensors(staging / WEIGHTS_FILE, entries, {"format": "pt"})


def _part_reader(
    weights: _Checked, name: str, number: int, parts: Parts
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        pieces = weights.whole(name).chunk(len(parts.names))
        return pieces[number].reshape(parts.shape).contiguous()

    return read


def _to_safetensors(weights: _Checked, staging: Path, destination: Path) -> None:
    entries = [
        Entry(name, torch.float32, shape, _reader(weights, name, shape, transposed=False))
        for name, shape in weights.check_model().items()
    ]
    for name, value in weights.buffers().items():
        entries.append(Entry(name, value.dtype, tuple(value.shape), value.detach))
    section = {"model": weights.config.model_dump(mode="json")}
    (staging / OUR_CONFIG_FILE).write_text(dump(section), encoding="utf-8")
    write_safetensors(staging / WEIGHTS_FILE, entries, {"format": "pt"})
    _write_tokenizer(weights, staging)


def _reader(
    weights: _Checked, name: str, shape: tuple[int, ...], transposed: bool
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        if name not in weights.shapes:
            return torch.zeros(shape)
        value = weights.whole(name)
        return value.T if transposed else value

    return read


def _write_tokenizer(weights: _Checked, staging: Path) -> None:
    tokenizer = weights.tokenizer
    if isinstance(weights.config, ImageModelSettings):
        return
    if tokenizer is None:
        weights.notes.append("no tokenizer was found beside the weights or data: none was written")
        return
    assert isinstance(weights.config, GPT2Config | BertConfig)
    tokenizer.save(staging / tokenizer.file_name)
    # Which of transformers' classes reads a SentencePiece model depends on the model.
    is_json = tokenizer.file_name == TOKENIZER_FILE
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} if is_json else {}
    _write_json(
        staging / "tokenizer_config.json",
        about
        | _special_tokens(weights.config, tokenizer)
        | {
            "model_max_length": weights.config.sequence_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def _data_of(config: ModelSettings) -> DataSettings:
    """What a configuration says of data that nobody has named yet."""
    if isinstance(config, ImageModelSettings):
        return ImageDataConfig(path="runs/images")
    return MaskedTextConfig() if isinstance(config, BertConfig) else DataConfig()


def _special_tokens(config: ModelSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers calls a tokenizer's special tokens, and what it makes of a text."""
    if not isinstance(config, BertConfig):
        return {"bos_token": tokenizer.end_of_text, "eos_token": tokenizer.end_of_text}
    names = ("cls", "sep", "mask", "pad", "unk")
    vocabulary = tokenizer.vocabulary()
    special = {f"{n}_token": token for n in names if (token := f"[{n.upper()}]") in vocabulary}
    return special | {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}


def _to_polyad(weights: _Checked, staging: Path, destination: Path) -> None:
    tokenizer, config = weights.tokenizer, weights.config
    is_of_images = isinstance(config, ImageModelSettings)
    if tokenizer is None and not is_of_images:
        weights.notes.append(f"{weights.folder} has no tokenizer: name one where text is needed")
    run = RunConfig(
        run=RunFolderConfig(folder=f"runs/{destination.name}"),
        model=config,
        data=_data_of(config),
        train=TrainConfig(steps=1, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE),
    )
    state = TrainState(
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else None,
        end_of_text=tokenizer.end_of_text if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else getattr(config, "vocab_size", None) or 0,
    )
    origin = {"converted_from": str(weights.folder)}
    if weights.change:
        origin[weights.change.done] = weights.change.text
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        files[tokenizer.file_name] = tokenizer.file_bytes()
    if weights.class_names is not None:
        files[CLASSES_FILE] = json.dumps(weights.class_names, ensure_ascii=False).encode()
    save_weights(
        staging,
        weights.shapes,
        weights.whole,
        buffers=weights.buffers(),
        state=state.to_json() | origin,
        config_yaml=run.to_yaml(),
        files=files,
    )


def _to_peft(weights: _Checked, staging: Path, destination: Path) -> None:
    assert weights.adapted is not None
    tree, tensors = peft_files(weights.adapted)
    entries = [
        Entry(name, torch.float32, tuple(value.shape), value.detach) for name, value in tensors
    ]
    if not isinstance(weights.adapted.base, HuggingFaceWeights | BertWeights):
        weights.notes.append(
            f"peft wants the base in transformers' form: `polyad convert "
            f"{weights.adapted.base.folder} DESTINATION --to huggingface`"
        )
    _write_json(staging / ADAPTER_CONFIG_FILE, tree)
    write_safetensors(staging / ADAPTER_FILE, entries, {"format": "pt"})


_WRITERS: dict[Format, Callable[[_Checked, Path, Path], None]] = {
    "huggingface": _to_huggingface,
    "polyad": _to_polyad,
    "safetensors": _to_safetensors,
    "peft": _to_peft,
}


def _count_adapters(weights: _Checked) -> int:
    assert weights.adapted is not None
    beside = [adapter for _, adapter in weights.adapted.adapters.values()]
    return sum(p.numel() for adapter in beside for p in adapter.parameters())


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` when everything is in it, and else goes away.

    Each conversion has a folder of its own; of two to one destination the first to end succeeds.
    """
    destination = destination.absolute()
    staging = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
    staging.mkdir(parents=True)
    try:
        yield staging
        try:
            staging.rename(destination)
        except OSError:  # another conversion was faster, or the disk refused
            _refuse_what_is_there(destination)
            raise
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _refuse_what_is_there(destination: Path) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: exists and is not an empty folder; name another one")


def _refuse_more_than_fits(needed: int, destination: Path, change: Change) -> None:
    """Checks the room on the disk first, since a few digits of num_experts can mean any size."""
    existing = next(path for path in destination.absolute().parents if path.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        raise change.error(
            f"makes a model of {needed:,} bytes; {existing} has room for {free:,}; fewer experts "
            f"or another disk are needed"
        )


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def conversion_table(result: dict[str, Any]) -> str:
    """A conversion for a person."""
    rows = [
        ("source", result["source"]),
        ("destination", f"{result['destination']} ({result['format']})"),
        ("parameters", f"{result['parameters']:,}"),
        ("files", ", ".join(f"{name} {size:,} B" for name, size in result["files"].items())),
        *(("note", note) for note in result["notes"]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
