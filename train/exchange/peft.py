"""Adapters in the format of the library peft, for a transformers model.

adapter_config.json           rank, alpha, and the layers by transformers' names
adapter_model.safetensors     A and B of each: see `parallel/peft.py`

Our q, k and v are one matrix with one A and one B, as in transformers' GPT-2. Its BERT has three
layers: each gets a copy of A, and a third of B's rows. In a mixture the feed-forwards are named as
parameters (`target_parameters`), because experts are stacked, routers are not linear layers, and
peft takes names such as gate_proj in `target_modules` for those of experts.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyad.model.bert import BertConfig
from polyad.model.build import build_model
from polyad.model.decoder import DecoderConfig, GPT2Config
from polyad.model.families.family import Family, computes_the_same
from polyad.model.families.registry import family_of_model
from polyad.model.families.tensors import Piece
from polyad.model.lora import ExpertsLowRank
from polyad.parallel.families import FamilyWeights
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.peft import BEFORE, STACKS, Factors, fused, module_of
from polyad.parallel.weights import AdaptedCheckpoint
from polyad.train.errors import ConfigError

_OF_CLASSIFIER = {"head.classifier.": "classifier", "head.pooler.": "pooler"}
"""Modules of a BERT that may be trained fully (`modules_to_save`), by prefix of our names."""


class _Target(NamedTuple):
    """A tensor in transformers that has an adapter."""

    name: str
    """Its name in a file."""
    plain: str
    parts: list[tuple[str, Piece]]
    """Our weights of which it is made, with the share of each."""
    by_parameter: bool

    @property
    def shares(self) -> int:
        """The number of adapters combined in it."""
        share = self.parts[0][1].rule.share
        return 1 if share is None else share.count


def peft_files(weights: AdaptedCheckpoint) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Returns the contents of both files.

    Args:
        weights: a checkpoint of adapters, with its base.

    Returns:
        The content of the first, and names and tensors of the second.

    Raises:
        ValueError: with an `exit_status` of 2: transformers has no such model, or trained weights
            do not exist there.
    """
    config, family = weights.model_config(), _family_of(weights)
    saved = _saved_whole(weights)
    targets = _targets(weights, family)
    modules = [t.name.removesuffix(".weight") for t in targets if not t.by_parameter]
    shares = {_in_all_blocks(t): t.shares for t in targets if t.shares > 1}
    rank, alpha, is_bert = weights.lora.rank, weights.lora.alpha, isinstance(config, BertConfig)
    tree: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if saved else None if is_bert else "CAUSAL_LM",
        "base_model_name_or_path": str(weights.base.folder),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "modules_to_save": [_OF_CLASSIFIER[prefix] for prefix in saved] or None,
        "fan_in_fan_out": isinstance(config, GPT2Config),  # it stores its weights transposed
        "bias": "none",
        "inference_mode": True,
    }
    if parameters := [t.name for t in targets if t.by_parameter]:
        tree["target_parameters"] = parameters
    if shares:
        tree["rank_pattern"] = {name: rank * count for name, count in shares.items()}
        tree["alpha_pattern"] = {name: alpha * count for name, count in shares.items()}
    return tree, _tensors(weights, family, targets, saved)


def _family_of(weights: AdaptedCheckpoint) -> Family:
    """Returns the family of a model, with the names in memory; raises an error if transformers has
    none, or if it could not have what was trained."""
    config, base = weights.model_config(), weights.base
    if not isinstance(config, DecoderConfig | GPT2Config | BertConfig):
        raise ConfigError(
            f"--to peft: {weights.folder}: model.kind: {config.kind} is not allowed; allowed: "
            "decoder, gpt2, bert"
        )
    family: Family | None = None
    if isinstance(config, DecoderConfig) and isinstance(base, FamilyWeights):
        family = base.family if computes_the_same(config, base.config) else None
    family = family or family_of_model(config)
    _refuse_moved_buffers(weights, family)
    return family.in_memory()


def _refuse_moved_buffers(weights: AdaptedCheckpoint, family: Family) -> None:
    """Checks that training has not changed a buffer of their model, such as a balancing bias.

    Raises:
        ConfigError: it has.
    """
    for name, _ in persistent_buffers(build_model(weights.model_config())):
        if family.find(name) and not torch.equal(weights.buffer(name), weights.base.buffer(name)):
            raise ConfigError(
                f"--to peft: {weights.folder}: {name} was changed by training "
                "(feed_forward.balancing_rate), which adapters cannot hold; use --merge to write "
                "whole weights"
            )


def _saved_whole(weights: AdaptedCheckpoint) -> list[str]:
    """Returns our name prefixes of the modules that were trained fully.

    Raises:
        ConfigError: something else was.
    """
    whole, config = weights.shapes().keys() - weights.frozen, weights.model_config()
    is_classifier = isinstance(config, BertConfig) and config.head.kind == "classification"
    possible = _OF_CLASSIFIER if is_classifier else {}
    if strange := [name for name in whole if not name.startswith(tuple(possible))]:
        allowed = f"; of this model {' and '.join(possible)} may be" if possible else ""
        raise ConfigError(
            f"--to peft: {weights.folder}: {min(strange)} was fully trained (adapt.lora.trained), "
            f"which adapters cannot hold{allowed}; use --merge to write whole weights"
        )
    return [prefix for prefix in possible if any(name.startswith(prefix) for name in whole)]


def _targets(weights: AdaptedCheckpoint, family: Family) -> list[_Target]:
    """Returns the tensors in transformers that have adapters.

    Raises:
        WeightsError: they have no such weight.
    """
    config, targets = weights.model_config(), dict[str, _Target]()
    is_mixture = isinstance(config, DecoderConfig) and config.has_experts()
    for name in weights.adapters:
        for piece in family.pieces(name, weights.shapes()[name]):
            stored = family.stored_name(piece.name, config)
            by_parameter = is_mixture and ".feed_forward." in name
            target = targets.setdefault(piece.name, _Target(stored, piece.name, [], by_parameter))
            target.parts.append((name, piece))
    return list(targets.values())


def _in_all_blocks(target: _Target) -> str:
    """The name suffix shared by all blocks, which is a pattern in peft's `rank_pattern`."""
    end = ".".join(target.name.removesuffix(".weight").split(".")[-2:])
    is_weight = target.by_parameter and target.name.endswith(".weight")
    return f"{end}.weight" if is_weight else end


def _tensors(
    weights: AdaptedCheckpoint, family: Family, targets: list[_Target], saved: list[str]
) -> Iterator[tuple[str, Tensor]]:
    stacks = {target.plain.rpartition(".")[2] for target in targets} & set(STACKS)
    for target in targets:
        factors = fused([(piece, _beside(weights, name, piece)) for name, piece in target.parts])
        before = BEFORE + module_of(target.name, stacks)
        A, B = factors.packed()
        yield f"{before}.lora_A.weight", A.contiguous()
        yield f"{before}.lora_B.weight", B.contiguous()
    config = weights.model_config()
    for name, shape in weights.shapes().items():
        if name.startswith(tuple(saved)):
            (piece,) = family.pieces(name, shape)
            yield BEFORE + family.stored_name(piece.name, config), weights.whole(name)


def _beside(weights: AdaptedCheckpoint, name: str, piece: Piece) -> Factors:
    """The adapter of one of our weights, or of its rows that are one tensor in transformers."""
    path, adapter = weights.adapters[name]
    A, B = weights.own(f"{path}.A"), weights.own(f"{path}.B")
    if isinstance(adapter, ExpertsLowRank):
        return Factors(A.mT, B.mT)
    return Factors(A[None], B[None, piece.rows])
