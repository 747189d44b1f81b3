"""Validation rules between sections of a configuration, or between a run and its next start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from polyad.data.images.config import ImageDataConfig
from polyad.model.config import Config
from polyad.model.decoder_config import DecoderConfig
from polyad.model.emoe.layer import EmergentMoEConfig
from polyad.model.mixture import MixtureConfig
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.parallel.dims import Dims
from polyad.train.config.run import RunConfig
from polyad.train.config.text import below, flatten
from polyad.train.errors import ConfigError, shown

# Keys or sections that may change when a run is resumed. Changing any other makes it another run.
MAY_CHANGE_ON_RESUME = (
    # The data is compared by its fingerprint, not by path or mixture.
    "run", "data.path", "data.mixture", "data.num_workers", "data.tokenizer",
    "data.padding", "data.max_damaged", "train.steps",
    "train.micro_batch_size", "train.max_skipped_steps", "train.ema", "train.cuda_graph",
    "optimizer.learning_rate", "schedule", "parallel", "checkpoint", "evaluation", "monitor", "log",
    "model.recompute", "model.compile",
    # Initial weights matter only to new runs.
    "model.feed_forward.scale_residual_init",
)  # fmt: skip


class Combination(NamedTuple):
    """Which values of a key are allowed with another key."""

    key: str
    """`KEY`, where it is neither null, false nor 0; or `KEY: VALUE`."""
    other: str
    """The key whose values are restricted then."""
    allowed: tuple[Any, ...]
    """Its allowed values; empty: all but null, false and 0."""
    why: str = ""


_GRAPH, _BLOCKS = "train.cuda_graph", "distill.blocks"
_FROZEN = "all weights except the replaced feed-forwards are the teacher's, and frozen"
COMBINATIONS = (
    Combination("parallel.sequence_parallel", "model.kind", ("gpt2", "decoder")),
    Combination("optimizer.kind: muon", "parallel.zero_stage", (1, 2), "it needs whole matrices"),
    Combination(
        "optimizer.kind: muon", "parallel.tensor_parallel_size", (1,), "it needs whole matrices"
    ),
    Combination("optimizer.kind: muon", "adapt.lora", (None,), "adapters freeze its matrices"),
    Combination(
        *("model.compile", "parallel.zero_stage", (1, 2)),
        "DeepSpeed's hooks on every module send the compiler back to eager code",
    ),
    Combination("adapt.lora", "checkpoint.init_from", (), "adapters are added to its weights"),
    Combination("evaluation.stride", "data.kind", ("text",)),
    Combination("evaluation.patience", "evaluation.every", (), "0 validates only at the end"),
    Combination("log.fluctuation", "checkpoint.every", (), "checkpoints are compared"),
    Combination(
        *("loss.sample_similarity.of: input", "model.kind", ("mixer", "vit", "mixture")),
        "token ids have no distance",
    ),
    Combination(_BLOCKS, "distill.teacher", (), "its feed-forwards teach"),
    Combination(_BLOCKS, "data.kind", ("text",)),
    Combination(_BLOCKS, "model.replaced", (), "these blocks learn"),
    Combination(_BLOCKS, "distill.weight", (0.5,), "it does not apply"),
    Combination(_BLOCKS, "distill.temperature", (1.0,), "it does not apply"),
    Combination(_BLOCKS, "checkpoint.init_from", (None,), _FROZEN),
    Combination(_BLOCKS, "adapt.lora", (None,), _FROZEN),
    Combination(_BLOCKS, "model.recompute", ("none",), _FROZEN),
    Combination(_BLOCKS, "train.cuda_graph", (False,), _FROZEN),
    Combination(_BLOCKS, "parallel.sequence_parallel", (False,), _FROZEN),
    Combination(_GRAPH, "model.kind", ("gpt2", "vit"), "other blocks take more than tokens"),
    Combination(_GRAPH, "adapt.lora", (None,), "frozen embeddings have nothing to differentiate"),
    Combination(_GRAPH, "model.recompute", ("none",), "graphs compute nothing again"),
    Combination(
        *(_GRAPH, "train.precision", ("bf16",)),
        "in fp32 gradients would stay where the next pass overwrites them",
    ),
    Combination(_GRAPH, "parallel.zero_stage", (1, 2), "stage 3 moves weights"),
    Combination(_GRAPH, "parallel.tensor_parallel_size", (1,), "processes talk in each block"),
)


class Rule(NamedTuple):
    """A rule on more than single values."""

    when: Callable[[RunConfig], Any]
    """Whether it applies."""
    needs: Callable[[RunConfig], Any]
    """What must be true then."""
    say: str
    """The error if it is not, formatted with the sections of the configuration and `kinds`."""


def _routers(config: RunConfig) -> list[SelectingConfig]:
    """The settings of feed-forwards that select experts."""
    sections = config.model.feed_forwards().values()
    return [each for each in sections if isinstance(each, SelectingConfig)]


def _kinds(config: RunConfig) -> str:
    sections = config.model.feed_forwards()
    return " and ".join(f"{key}.kind: {each.kind}" for key, each in sections.items())


def _expert_kinds(config: RunConfig) -> set[Any]:
    """The kinds of a model's parts that may have experts."""
    head = getattr(config.model, "head", None)
    kinds = {config.model.kind, getattr(head, "kind", head)}
    if config.model.kind != "mixture":
        kinds |= {each.kind for each in config.model.feed_forwards().values()}
    return kinds


RULES = (
    Rule(
        lambda c: c.model.cut_sizes() is None,
        lambda c: c.parallel.tensor_parallel_size == 1,
        "parallel.tensor_parallel_size: {parallel.tensor_parallel_size} is not allowed with "
        "model.kind: {model.kind}, whose layers are not cut; allowed: 1",
    ),
    Rule(
        lambda c: c.parallel.sequence_parallel,
        lambda c: c.parallel.tensor_parallel_size > 1,
        "parallel.sequence_parallel: true needs a parallel.tensor_parallel_size of 2 or more",
    ),
    Rule(
        lambda c: c.parallel.expert_parallel_size > 1,
        _routers,
        "parallel.expert_parallel_size: {parallel.expert_parallel_size} is not allowed with "
        "{kinds}, which has no separate experts to distribute",
    ),
    Rule(
        lambda c: c.schedule.decay_steps is not None,
        lambda c: c.schedule.warmup_steps <= (c.schedule.decay_steps or 0),
        "schedule.warmup_steps: {schedule.warmup_steps} is more than schedule.decay_steps: "
        "{schedule.decay_steps}",
    ),
    Rule(
        lambda c: c.evaluation.stride,
        lambda c: (c.evaluation.stride or 0) <= c.model.units_per_sample(),
        "evaluation.stride: {evaluation.stride} is more than model.sequence_length: "
        "{model.sequence_length}, so some tokens would not be scored",
    ),
    Rule(
        lambda c: isinstance(c.data, ImageDataConfig) and c.data.mixes,
        lambda c: c.train.micro_batch_size % 2 == 0,
        "train.micro_batch_size: {train.micro_batch_size} is odd, but data.augmentation.mixup and "
        "data.augmentation.cutmix mix images in pairs; use an even number, or set both to 0",
    ),
    Rule(
        lambda c: c.log.fluctuation,
        lambda c: c.model.has_experts(),
        "log.fluctuation: true is not allowed with {kinds}, which has no experts",
    ),
    Rule(
        lambda c: isinstance(c.model, MixtureConfig) and c.model.top_k == 1,
        lambda c: False,
        "model.top_k: 1 is not allowed: the share of one expert is always 1, so the gate would "
        "learn nothing; allowed: 2 or more, or null",
    ),
    Rule(
        lambda c: c.loss.sequence_balance,
        lambda c: any(isinstance(each, SparseMoEConfig) for each in _routers(c)),
        "loss.sequence_balance: {loss.sequence_balance:g} is not allowed with {kinds}: it needs a "
        "feed-forward of kind: smoe; otherwise only 0 is allowed",
    ),
    Rule(
        lambda c: c.loss.load_balance and c.loss.load_balance_over == "model",
        lambda c: len(_routers(c)) == 1,
        "loss.load_balance_over: model is not allowed with {kinds}: it needs one feed-forward of "
        "kind: smoe or emoe, whose layers have the same experts; allowed: layer",
    ),
    Rule(
        lambda c: c.loss.load,
        lambda c: any(router.router_noise for router in _routers(c)),
        "loss.load: {loss.load:g} needs a feed-forward of kind: smoe or emoe with router_noise "
        "above 0; otherwise only 0 is allowed",
    ),
    Rule(
        lambda c: c.loss.sample_similarity,
        lambda c: _expert_kinds(c) & {"smoe", "emoe", "mumoe", "mixture"},
        "loss.sample_similarity: is not allowed with {kinds}, which has no experts that samples "
        "could share; allowed: null",
    ),
    Rule(
        lambda c: c.loss.sample_similarity,
        lambda c: c.train.micro_batch_size > 1,
        "train.micro_batch_size: {train.micro_batch_size} is not allowed with "
        "loss.sample_similarity, which compares the samples of a micro-batch; allowed: 2 or more",
    ),
    Rule(
        lambda c: c.loss.sample_similarity and "mumoe" in _expert_kinds(c),
        lambda c: c.parallel.tensor_parallel_size == 1,
        "parallel.tensor_parallel_size: {parallel.tensor_parallel_size} is not allowed with "
        "loss.sample_similarity and a muMoE, whose gate would get its gradient several times; "
        "allowed: 1",
    ),
    Rule(  # see model/cuda_graph.py
        lambda c: c.train.cuda_graph,
        lambda c: {each.kind for each in c.model.feed_forwards().values()} <= {"dense", "mumoe"},
        "train.cuda_graph: true is not allowed with {kinds}: products of experts may wait for "
        "their sizes; allowed: dense, mumoe",
    ),
)


def _value(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None if its section is null or has no such key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _said(value: Any) -> str:
    """A value as in YAML; a section in short."""
    return "{...}" if isinstance(value, Config) else json.dumps(value).strip('"')


def _check_combination(config: RunConfig, rule: Combination) -> None:
    key, _, named = rule.key.partition(": ")
    value, other = _value(config, key), _value(config, rule.other)
    if not value or (named and value != named):
        return
    given, why = f"{key}: {_said(value)}", f": {rule.why}" if rule.why else ""
    if not rule.allowed and not other:
        raise ConfigError(f"{given} needs {rule.other}, which is {_said(other)}{why}")
    if rule.allowed and other not in rule.allowed:
        raise ConfigError(
            f"{rule.other}: {_said(other)} is not allowed with {given}{why}; allowed: "
            f"{', '.join(map(_said, rule.allowed))}"
        )


def validate(config: RunConfig, world_size: int) -> Dims:
    """Checks the sections against one another.

    Args:
        config: the tree.
        world_size: number of processes.

    Returns:
        The layout.

    Raises:
        ConfigError: two keys contradict each other.
        LayoutError: degrees or batch sizes do not fit the processes.
    """
    dims = Dims(
        world_size=world_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel_size=config.parallel.expert_parallel_size,
    )
    for combination in COMBINATIONS:
        _check_combination(config, combination)
    for rule in RULES:
        if rule.when(config) and not rule.needs(config):
            raise ConfigError(rule.say.format(kinds=_kinds(config), **vars(config)))
    check_tensor_parallel(config.model, dims.tensor_parallel_size)
    check_experts(config, dims.expert_parallel_size)
    dims.accumulation_steps(config.train.global_batch_size, config.train.micro_batch_size)
    sections = config.model.feed_forwards().values()
    mixes = any(getattr(each, "gate_norm", "layer") == "batch" for each in sections)
    if config.train.cuda_graph and mixes and dims.data_parallel_size > 1:
        raise ConfigError(
            "train.cuda_graph: true is not allowed with gate_norm: batch on several processes, "
            "which talk in each block"
        )
    return dims


def check_tensor_parallel(model: ModelSettings, size: int) -> None:
    """Checks that everything that tensor parallelism shards has equal parts.

    Raises:
        ConfigError: it does not divide heads, width, inner width or the ranks of factors.
    """
    for choices in model.cut_sizes() or ():
        if all(value % size for value in choices.values()):
            sizes = " nor ".join(f"{key}: {value}" for key, value in choices.items())
            raise ConfigError(f"parallel.tensor_parallel_size: {size} does not divide {sizes}")
    groups = model.known_key_value_heads() if isinstance(model, DecoderConfig) else size
    if groups % size and size % groups:
        raise ConfigError(
            f"parallel.tensor_parallel_size: {size} neither divides model.num_key_value_heads: "
            f"{groups} nor is a multiple of it"
        )


def check_experts(config: RunConfig, size: int) -> None:
    """Checks the number of experts of each feed-forward.

    Args:
        config: the run's configuration.
        size: number of processes over which experts are distributed.

    Raises:
        ConfigError: they cannot be divided evenly, or the weight of a token's only expert never
            changes, so that its router would get no gradient.
    """
    for key, each in config.model.feed_forwards().items():
        if isinstance(each, SelectingConfig) and each.num_experts % size:
            raise ConfigError(
                f"parallel.expert_parallel_size: {size} does not divide "
                f"{key}.num_experts: {each.num_experts}"
            )
        if not isinstance(each, EmergentMoEConfig) or each.score == "avg_k":
            continue
        if each.used_experts() == 1:
            raise ConfigError(
                f"{key}.score: {each.score} is not allowed with one expert per token, whose weight "
                "is always 1, so the router would learn nothing; use avg_k, or a top_k of 2 or "
                "more"
            )


def refuse_changes(saved: RunConfig, now: RunConfig, origin: Path) -> None:
    """Checks that a configuration continues the run of another one.

    Raises:
        ConfigError: keys that define the run differ; they are named with both values.
    """
    before, after = flatten(saved.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    changed = [
        f"{key}: {shown(before.get(key))} there, {shown(after.get(key))} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not below(key, MAY_CHANGE_ON_RESUME)
    ]
    if changed:
        raise ConfigError(
            f"{origin}: holds another run: {'; '.join(changed[:3])}"
            + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            + ". Choose another run.folder, or change the keys back"
        )
