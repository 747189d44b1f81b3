"""Validation rules between sections of a configuration, or between a run and its next start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from polyad.model.config import Config, flatten
from polyad.model.decoder import DecoderConfig
from polyad.model.emoe import EmergentMoEConfig
from polyad.model.foreign import KIND
from polyad.model.smoe.config import SelectingConfig, SparseMoEConfig
from polyad.parallel.config import Dims
from polyad.parallel.foreign import READ_ONLY
from polyad.train.config.run import RunConfig
from polyad.train.config.text import below
from polyad.train.errors import ConfigError, shown, some_of

# Keys or sections that may change when a run is resumed. Changing any other makes it another run.
MAY_CHANGE_ON_RESUME = (
    # The data is compared by its fingerprint, not by path or mixture.
    "run", "data.path", "data.mixture", "data.num_workers", "data.tokenizer",
    "data.padding", "train.steps",
    "train.micro_batch_size", "train.max_skipped_steps", "train.ema", "train.cuda_graph",
    "optimizer.learning_rate", "schedule", "parallel", "checkpoint", "evaluation", "monitor", "log",
    "model.recompute", "model.compile",
    # Initial weights matter only to new runs.
    "model.feed_forward.scale_residual_init",
)  # fmt: skip


class Rule(NamedTuple):
    """Which values of a key are allowed with another key."""

    key: str
    """`KEY`, where it is neither null, false nor 0; or `KEY: VALUE`."""
    other: str
    """The key whose values are restricted then; `KINDS`: the kinds of all feed-forwards."""
    allowed: tuple[Any, ...] | Callable[[RunConfig], Any]
    """The other key's allowed values, or whether the configuration is allowed."""
    why: str = ""


KINDS = "kinds"
_GRAPH, _BLOCKS, _TENSOR = "train.cuda_graph", "distill.blocks", "parallel.tensor_parallel_size"
_FROZEN = "all weights except the replaced feed-forwards are the teacher's, and frozen"
_SIMILARITY, _NO_EXPERTS = "loss.sample_similarity", "it needs experts"


def _routers(config: RunConfig) -> list[SelectingConfig]:
    """The settings of feed-forwards that select experts."""
    sections = config.model.feed_forwards().values()
    return [each for each in sections if isinstance(each, SelectingConfig)]


def _expert_kinds(config: RunConfig) -> set[Any]:
    """The kinds of a model's parts that may have experts."""
    head = getattr(config.model, "head", None)
    kinds = {config.model.kind, getattr(head, "kind", head)}
    if config.model.kind != "mixture":
        kinds |= {each.kind for each in config.model.feed_forwards().values()}
    return kinds


RULES = (
    Rule(_TENSOR, "model.kind", lambda c: c.model.cut_sizes() is not None or _alone(c),
         "its layers are not cut"),
    Rule("parallel.sequence_parallel", "model.kind", ("gpt2", "decoder")),
    Rule("parallel.sequence_parallel", _TENSOR, lambda c: not _alone(c), "it needs 2 or more"),
    Rule("parallel.expert_parallel_size", KINDS,
         lambda c: c.parallel.expert_parallel_size == 1 or _routers(c),
         "it needs separate experts"),
    Rule("optimizer.kind: muon", "parallel.zero_stage", (1, 2), "it needs whole matrices"),
    Rule("optimizer.kind: muon", _TENSOR, (1,), "it needs whole matrices"),
    Rule("optimizer.kind: muon", "adapt.lora", (None,), "adapters freeze its matrices"),
    Rule("model.compile", "parallel.zero_stage", (1, 2),
         "DeepSpeed's hooks on every module send the compiler back to eager code"),
    Rule("adapt.lora", "checkpoint.init_from", lambda c: c.checkpoint.init_from,
         "adapters are added to its weights"),
    Rule("schedule.decay_steps", "schedule.warmup_steps",
         lambda c: c.schedule.warmup_steps <= (c.schedule.decay_steps or 0), "it is more"),
    Rule("monitor.spike_window", "monitor.spike_warmup",
         lambda c: c.monitor.spike_warmup <= c.monitor.spike_window, "it is more"),
    Rule("evaluation.stride", "data.kind", ("text",)),
    Rule("evaluation.stride", "model.sequence_length",
         lambda c: (c.evaluation.stride or 0) <= c.model.units_per_sample(),
         "some tokens would not be scored"),
    Rule("evaluation.patience", "evaluation.every", lambda c: c.evaluation.every,
         "0 validates only at the end"),
    Rule("log.fluctuation", "checkpoint.every", lambda c: c.checkpoint.every,
         "checkpoints are compared"),
    Rule("log.fluctuation", KINDS, lambda c: c.model.has_experts(), _NO_EXPERTS),
    Rule("data.augmentation", "train.micro_batch_size",
         lambda c: not getattr(c.data, "mixes", False) or c.train.micro_batch_size % 2 == 0,
         "mixup and cutmix mix images in pairs"),
    Rule("model.top_k", "model.kind",
         lambda c: c.model.kind != "mixture" or _value(c, "model.top_k") != 1,
         "the share of one expert is always 1, so the gate would learn nothing"),
    Rule("loss.sequence_balance", KINDS,
         lambda c: any(isinstance(each, SparseMoEConfig) for each in _routers(c)),
         "it needs kind: smoe"),
    Rule("loss.load_balance_over: model", KINDS,
         lambda c: not c.loss.load_balance or len(_routers(c)) == 1,
         "it needs one feed-forward of kind: smoe or emoe, whose layers have the same experts"),
    Rule("loss.load", KINDS, lambda c: any(router.router_noise for router in _routers(c)),
         "it needs kind: smoe or emoe with router_noise above 0"),
    Rule(_SIMILARITY, KINDS,
         lambda c: _expert_kinds(c) & {"smoe", "emoe", "mumoe", "mixture"}, _NO_EXPERTS),
    Rule(_SIMILARITY, "train.micro_batch_size", lambda c: c.train.micro_batch_size > 1,
         "samples of a micro-batch are compared"),
    Rule(_SIMILARITY, _TENSOR, lambda c: "mumoe" not in _expert_kinds(c) or _alone(c),
         "the gate of a muMoE would get its gradient several times"),
    Rule("loss.sample_similarity.of: input", "model.kind", ("mixer", "vit", "mixture"),
         "token ids have no distance"),
    Rule("distill.teacher", "data.kind", ("text", "images", "sequences")),
    Rule("distill.teacher", "data.loss", ("softmax", None), "it teaches probabilities"),
    Rule("distill.teacher", _TENSOR,
         lambda c: c.data.kind != "text" or c.distill.blocks or _alone(c),
         "the vocabulary that it teaches would be cut"),
    Rule(_BLOCKS, "distill.teacher", lambda c: c.distill.teacher, "its feed-forwards teach"),
    Rule(_BLOCKS, "distill.weight", (0.5,), "it does not apply"),
    Rule(_BLOCKS, "distill.temperature", (1.0,), "it does not apply"),
    Rule(_BLOCKS, "data.kind", ("text",)),
    Rule(_BLOCKS, "model.replaced", lambda c: _value(c, "model.replaced"), "these blocks learn"),
    Rule(_BLOCKS, "model.feed_forward.graph", ("none", "similarity", None),
         "the teacher's feed-forward may read its input alone"),
    Rule(_BLOCKS, "checkpoint.init_from", (None,), _FROZEN),
    Rule(_BLOCKS, "adapt.lora", (None,), _FROZEN),
    Rule(_BLOCKS, "model.recompute", ("none",), _FROZEN),
    Rule(_BLOCKS, "train.cuda_graph", (False,), _FROZEN),
    Rule(_BLOCKS, "parallel.sequence_parallel", (False,), _FROZEN),
    Rule(_GRAPH, "model.kind", ("gpt2", "vit"), "other blocks take more than tokens"),
    Rule(_GRAPH, KINDS,  # see model/block.py
         lambda c: {each.kind for each in c.model.feed_forwards().values()} <= {"dense", "mumoe"},
         "products of experts may wait for their sizes"),
    Rule(_GRAPH, "adapt.lora", (None,), "frozen embeddings have nothing to differentiate"),
    Rule(_GRAPH, "model.recompute", ("none",), "graphs compute nothing again"),
    Rule(_GRAPH, "train.precision", ("bf16",),
         "in fp32 gradients would stay where the next pass overwrites them"),
    Rule(_GRAPH, "parallel.zero_stage", (1, 2), "stage 3 moves weights"),
    Rule(_GRAPH, _TENSOR, (1,), "processes talk in each block"),
)  # fmt: skip


def _alone(config: RunConfig) -> bool:
    """Whether each process has whole layers."""
    return config.parallel.tensor_parallel_size == 1


def _value(config: RunConfig, key: str) -> Any:
    """The value of a dotted key, a section in short; None if it has no such key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return "{...}" if isinstance(value, BaseModel) else value


def _said(value: Any) -> str:
    """A value as in YAML."""
    return json.dumps(value).strip('"')


def _in_words(config: RunConfig, key: str) -> str:
    """A key with its value."""
    if key != KINDS:
        return f"{key}: {_said(_value(config, key))}"
    sections = config.model.feed_forwards()
    return " and ".join(f"{name}.kind: {each.kind}" for name, each in sections.items())


def _check(config: RunConfig, rule: Rule) -> None:
    key, _, wanted = rule.key.partition(": ")
    value, other, allowed = _value(config, key), _value(config, rule.other), rule.allowed
    if not value or (wanted and value != wanted):
        return
    if not (allowed(config) if callable(allowed) else other in allowed):
        why = f": {rule.why}" if rule.why else ""
        if not callable(allowed):
            why += f"; allowed: {', '.join(map(_said, allowed))}"
        named = [rule.other, key]
        if rule.other == KINDS:
            named.reverse()
        first, second = (_in_words(config, each) for each in named)
        raise ConfigError(f"{first} is not allowed with {second}{why}")


def validate(config: RunConfig, world_size: int) -> Dims:
    """Checks the sections against one another.

    Args:
        config: the tree.
        world_size: number of processes.

    Returns:
        The layout.

    Raises:
        ConfigError: two keys contradict each other, or a degree does not divide what it cuts.
        LayoutError: degrees or batch sizes do not fit the processes.
    """
    dims = Dims(
        world_size=world_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel_size=config.parallel.expert_parallel_size,
    )
    for rule in RULES:
        _check(config, rule)
    if config.model.kind == KIND:
        raise ConfigError(f"model.kind: {KIND}: {READ_ONLY}")
    size, model = dims.tensor_parallel_size, config.model
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
    for key, each in model.feed_forwards().items():
        _check_feed_forward(config, dims, key, each)
    dims.accumulation_steps(config.train.global_batch_size, config.train.micro_batch_size)
    return dims


def _check_feed_forward(config: RunConfig, dims: Dims, key: str, each: Config) -> None:
    size = dims.expert_parallel_size
    if isinstance(each, SelectingConfig) and each.num_experts % size:
        raise ConfigError(
            f"parallel.expert_parallel_size: {size} does not divide "
            f"{key}.num_experts: {each.num_experts}"
        )
    if isinstance(each, EmergentMoEConfig) and each.score != "avg_k" and each.used_experts() == 1:
        raise ConfigError(
            f"{key}.score: {each.score} is not allowed with one expert per token, whose weight is "
            "always 1, so the router would learn nothing; use avg_k, or a top_k of 2 or more"
        )
    mixes = getattr(each, "gate_norm", "layer") == "batch"
    if config.train.cuda_graph and mixes and dims.data_parallel_size > 1:
        raise ConfigError(
            "train.cuda_graph: true is not allowed with gate_norm: batch on several processes, "
            "which talk in each block"
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
            f"{origin}: holds another run: {some_of(changed, 3, '; ')}. Choose another run.folder, "
            "or change the keys back"
        )
