"""`polyad convert`: converts weights to other formats and back, one tensor at a time."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from polyad.data.files import named, temporary_folder
from polyad.model.build import num_parameters
from polyad.parallel.checkpoint.load import read_newest
from polyad.parallel.families import FamilyWeights
from polyad.parallel.peft import PeftWeights
from polyad.parallel.tensor_folder import PlainWeights
from polyad.parallel.weights import AdaptedCheckpoint, Choice, Weights, open_weights
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change
from polyad.train.exchange.experts import Merging, is_split
from polyad.train.exchange.writers import WRITERS, Format, Source
from polyad.train.results import aligned


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
        if to == "peft":
            beside = [adapter for _, adapter in weights.adapted.adapters.values()]
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
