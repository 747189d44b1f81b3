"""Adapters of a dense GPT-2 or BERT as the library peft reads them, over transformers' model.

adapter_config.json           rank, alpha, and the layers by transformers' names
adapter_model.safetensors     A and B of each; peft's have our orientation

Our q, k and v are one matrix with one A and one B, as in transformers' GPT-2. Its BERT has three
layers: each gets a copy of A, and a third of the rows of B.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from polyad.model.bert import BertConfig
from polyad.model.decoder import DecoderSettings
from polyad.model.families.bert import BERT
from polyad.model.families.family import Known
from polyad.model.families.gpt2 import GPT2
from polyad.model.families.registry import family_of_model
from polyad.model.lora import LowRank
from polyad.model.settings import ModelSettings
from polyad.parallel.adapted import AdaptedCheckpoint
from polyad.train.errors import ConfigError

ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."
"""Before transformers' names in the file."""


class _Theirs(NamedTuple):
    """How transformers and peft have a model."""

    transposed: bool
    """Whether its linear layers store their weights transposed."""
    saved: dict[str, str]
    """Modules that may be trained whole (`modules_to_save`), by the beginning of our names."""
    task_type: str | None
    """Peft's name of the task where such modules are saved."""
    task_type_without: str | None
    """Where none are."""


def peft_files(weights: AdaptedCheckpoint) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """What both files hold.

    Returns:
        The content of adapter_config.json, and names and values of the other file.

    Raises:
        ValueError: with an `exit_status` of 2: the model is not a dense GPT-2 or BERT, or has
            weights that were trained whole and have no place there.
    """
    config = weights.model_config()
    theirs = _theirs(config, weights)
    saved = _saved_whole(weights, theirs)
    layers = {name: _stored(config, name, weights.shapes()[name]) for name in weights.adapters}
    tree = {
        "peft_type": "LORA",
        "task_type": theirs.task_type if saved else theirs.task_type_without,
        "base_model_name_or_path": str(weights.base.folder),
        "r": weights.lora.rank,
        "lora_alpha": weights.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [n.removesuffix(".weight") for names in layers.values() for n in names],
        "modules_to_save": [theirs.saved[prefix] for prefix in saved] or None,
        "fan_in_fan_out": theirs.transposed,
        "bias": "none",
        "inference_mode": True,
    }
    return tree, _tensors(weights, layers, saved)


def _theirs(config: ModelSettings, weights: AdaptedCheckpoint) -> _Theirs:
    """How they have this kind of model; raises an error if transformers has no such model."""
    if isinstance(config, DecoderSettings):
        GPT2.write_config(config, Known())  # raises an error
        return _Theirs(True, {}, None, "CAUSAL_LM")
    if isinstance(config, BertConfig):
        BERT.write_config(config, Known())
        saved = {"head.classifier.": "classifier", "head.pooler.": "pooler"}
        is_class = config.head.kind == "classification"
        return _Theirs(False, saved if is_class else {}, "SEQ_CLS", None)
    raise ConfigError(
        f"--to peft: {weights.folder}: model.kind: {config.kind} is not allowed; gpt2 and bert are"
    )


def _saved_whole(weights: AdaptedCheckpoint, theirs: _Theirs) -> list[str]:
    """The beginnings of our names of the modules that were trained whole.

    Raises:
        ConfigError: something else was.
    """
    whole = weights.shapes().keys() - weights.frozen
    if strange := [name for name in whole if not name.startswith(tuple(theirs.saved))]:
        allowed = f"; of this model {' and '.join(theirs.saved)} may be" if theirs.saved else ""
        raise ConfigError(
            f"--to peft: {weights.folder}: {min(strange)} was trained whole (adapt.lora.trained), "
            f"which is in no adapter{allowed}; --merge writes whole weights"
        )
    return [prefix for prefix in theirs.saved if any(name.startswith(prefix) for name in whole)]


def _stored(config: ModelSettings, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Their names of a weight: several where theirs are parts of ours, one below the other."""
    family = family_of_model(config)
    return tuple(family.stored_name(piece.name, config) for piece in family.pieces(name, shape))


def _tensors(
    weights: AdaptedCheckpoint, layers: dict[str, tuple[str, ...]], saved: list[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, parts in layers.items():
        path, adapter = weights.adapters[name]
        assert isinstance(adapter, LowRank)
        A, B = weights.own(f"{path}.A"), weights.own(f"{path}.B")
        for part, rows in zip(parts, B.chunk(len(parts)), strict=True):
            before = _BEFORE + part.removesuffix(".weight")
            yield f"{before}.lora_A.weight", A
            yield f"{before}.lora_B.weight", rows.contiguous()
    config = weights.model_config()
    for name, shape in weights.shapes().items():
        if name.startswith(tuple(saved)):
            (stored,) = _stored(config, name, shape)
            yield _BEFORE + stored, weights.whole(name)
