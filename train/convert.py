"""`polyad convert`: weights from Polyad to Hugging Face and back, one tensor at a time."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from data.config import DataConfig
from data.manifest import SENTENCEPIECE_FILE, TOKENIZER_FILE
from data.tokenizer import Tokenizer
from model.build import ModelConfig, num_parameters
from model.huggingface import (
    CONFIG_FILE,
    PREFIX,
    HuggingFaceError,
    config_to_huggingface,
    parameter_shapes,
    their_tensor,
)
from parallel.checkpoint import Checkpoint, find_checkpoint
from parallel.checkpoint_writer import TokenizerCopy, save_weights
from parallel.huggingface import WEIGHTS_FILE, HuggingFaceWeights, is_huggingface_folder
from parallel.tensor_file import Entry, write_safetensors
from train.config import RunConfig, RunFolderConfig, TrainConfig
from train.errors import ConfigError
from train.resolve import tokenizer_of
from train.state import TrainState

Format = Literal["huggingface", "polyad"]
BATCH_SIZE = 8
"""Of a converted checkpoint's configuration: what `polyad evaluate` scores at once."""


def convert(source: Path, destination: Path, to: Format) -> dict[str, Any]:
    """Writes the weights of a model in the other format. Both ways are bitwise in fp32.

    Args:
        source: a checkpoint or run of Polyad, or a Hugging Face folder of GPT-2.
        destination: the folder to make; it may exist if it is empty.
        to: `huggingface` for config.json, model.safetensors and the tokenizer; `polyad` for a
            checkpoint at step 0 without optimizer state.

    Returns:
        What was written: JSON values.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    if not destination.name:  # the current folder, which will be another one
        destination = destination.absolute()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: exists and is not an empty folder; name another one")
    is_theirs = is_huggingface_folder(source)
    if is_theirs == (to == "huggingface"):
        other = "polyad" if is_theirs else "huggingface"
        kind = "a Hugging Face folder" if is_theirs else "of Polyad"
        if not is_theirs:
            find_checkpoint(source)  # says so if it is nothing at all
        raise ConfigError(f"{source}: is {kind} already; --to {other} is the other way")
    if is_theirs:
        return _to_polyad(HuggingFaceWeights(source), destination)
    return _to_huggingface(Checkpoint(find_checkpoint(source)), destination)


def _to_huggingface(checkpoint: Checkpoint, destination: Path) -> dict[str, Any]:
    config, tokenizer = checkpoint.model_config(), tokenizer_of(checkpoint)
    tree = config_to_huggingface(config, tokenizer.end_of_text_id if tokenizer else None)
    held = checkpoint.shapes()
    shapes = dict(parameter_shapes(config))
    if strange := held.keys() - shapes.keys():
        raise HuggingFaceError(f"{checkpoint.folder}: {min(strange)} has no place in GPT-2")
    if lacking := [n for n in shapes if n not in held and (config.bias or n.endswith("weight"))]:
        raise HuggingFaceError(f"{checkpoint.folder}: has no weight {lacking[0]}")
    entries = []
    for name, shape in shapes.items():
        theirs, transposed = their_tensor(name)
        read = _reader(checkpoint, name, shape, transposed)
        shape = shape[::-1] if transposed else shape
        entries.append(Entry(PREFIX + theirs, torch.float32, shape, read))
    with _staging(destination) as staging:
        _write_json(staging / CONFIG_FILE, tree)
        write_safetensors(staging / WEIGHTS_FILE, entries, {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(staging / tokenizer.file_name)
            about = _tokenizer_config(tokenizer, config.sequence_length)
            _write_json(staging / "tokenizer_config.json", about)
    notes = []
    if not config.bias:
        notes.append(
            "model.bias is false and Hugging Face's GPT-2 always has biases: zeros were written"
        )
    if tokenizer is not None and tokenizer.file_name == SENTENCEPIECE_FILE:
        notes.append(
            f"the tokenizer is a SentencePiece model, {SENTENCEPIECE_FILE}: transformers does not "
            "find a class for it by itself, and one that it is given may encode otherwise"
        )
    if tokenizer is None:
        notes.append("no tokenizer was found beside the checkpoint or its data: none was written")
    return _result(checkpoint.folder, destination, "huggingface", config, tokenizer, notes)


def _reader(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], transposed: bool
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        if name not in checkpoint.shapes():
            return torch.zeros(shape)
        value = checkpoint.whole(name)
        return value.T if transposed else value

    return read


def _tokenizer_config(tokenizer: Tokenizer, sequence_length: int) -> dict[str, Any]:
    # Which of transformers' classes reads a SentencePiece model depends on the model.
    is_json = tokenizer.file_name == TOKENIZER_FILE
    return ({"tokenizer_class": "PreTrainedTokenizerFast"} if is_json else {}) | {
        "bos_token": tokenizer.end_of_text,
        "eos_token": tokenizer.end_of_text,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }


def _copy(tokenizer: Tokenizer) -> TokenizerCopy:
    return TokenizerCopy(tokenizer.file_name, tokenizer.file_bytes())


def _to_polyad(weights: HuggingFaceWeights, destination: Path) -> dict[str, Any]:
    tokenizer = tokenizer_of(weights)
    config, notes = weights.config, []
    if tokenizer is None:
        notes.append(f"{weights.folder} has no tokenizer: name one where text is needed")
    elif tokenizer.vocab_size > config.known_vocab_size():
        raise HuggingFaceError(
            f"{weights.folder}: its tokenizer has {tokenizer.vocab_size} tokens, its model "
            f"{config.known_vocab_size()}"
        )
    run = RunConfig(
        run=RunFolderConfig(folder=f"runs/{destination.name}"),
        model=config,
        data=DataConfig(),
        train=TrainConfig(steps=1, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE),
    )
    state = TrainState(
        tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else None,
        end_of_text=tokenizer.end_of_text if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else config.known_vocab_size(),
    )
    with _staging(destination) as staging:
        save_weights(
            staging,
            weights.shapes(),
            weights.whole,
            state=state.to_json() | {"converted_from": str(weights.folder)},
            config_yaml=run.to_yaml(),
            tokenizer=_copy(tokenizer) if tokenizer else None,
        )
    return _result(weights.folder, destination, "polyad", config, tokenizer, notes)


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` when everything is in it, and else goes away."""
    destination = destination.absolute()
    staging = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(destination)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _result(
    source: Path,
    destination: Path,
    to: Format,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    notes: list[str],
) -> dict[str, Any]:
    files = sorted(destination.iterdir())
    return {
        "source": str(source),
        "destination": str(destination),
        "format": to,
        "parameters": num_parameters(config),
        "vocab_size": config.vocab_size,
        "tokenizer": tokenizer is not None,
        "files": {path.name: path.stat().st_size for path in files},
        "notes": notes,
    }


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
