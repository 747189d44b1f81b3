"""A small model of the same kind, with all parts that layouts treat differently."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polyad.model.build import has_experts
from polyad.model.patterns import matches
from polyad.model.settings import ModelSettings
from polyad.train.config.adaptation import model_of
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, config_of
from polyad.train.errors import ConfigError

KINDS = ("gpt2", "decoder", "bert", "mixer", "vit")
HEAD_WIDTH = 8
PIXELS, PATCH = 16, 4
TOKENS, VOCABULARY, CLASSES = 17, 61, 11
WINDOW = 5
"""Odd, so that padding and uneven shards occur everywhere."""
FEED_FORWARDS = ("feed_forward", "token_feed_forward", "channel_feed_forward")
ADAPTER_RANK = 2
"""Smaller than any side of a small factor."""
_BLOCK = re.compile(r"(?<![^.])\d+(?![^.])")


def small_config(config: RunConfig, processes: int) -> RunConfig:
    """Returns the configuration with few layers, units, experts, tokens and samples.

    Kinds, scores, graphs, capacities, placement and degrees are kept. Randomness is turned off,
    since layouts draw random numbers in different orders, and so is compilation; numbers are fp32.

    Args:
        config: a run's configuration.
        processes: number of processes that will run it.

    Returns:
        A valid configuration for this number of processes.

    Raises:
        ValueError: with an `exit_status` of 2: the configuration does not fit the processes.
    """
    dims = validate(config, processes)
    tree: dict[str, Any] = config.model_dump(mode="json")
    model, train, parallel = tree["model"], tree["train"], tree["parallel"]
    if model["kind"] not in KINDS:
        raise ConfigError(
            f"model.kind: {model['kind']} is not allowed with verify-layout, which makes small "
            f"models and their input for {', '.join(KINDS[:-1])} and {KINDS[-1]}"
        )
    cut = dims.tensor_parallel_size
    _shrink_model(model, cut)
    for name in FEED_FORWARDS:
        if name in model:
            fewest = dims.expert_parallel_size
            _shrink_experts(model[name], cut, fewest, model["num_layers"])
    if replaced := model.get("replaced"):
        replaced["blocks"] = [model["num_layers"] - 1]
        fewest = dims.expert_parallel_size
        _shrink_experts(replaced["feed_forward"], cut, fewest, model["num_layers"])
    if (model.get("head") or {}).get("kind") == "mumoe":
        _shrink_factors(model["head"], cut)
    micro = min(train["micro_batch_size"], 2)
    accumulation = dims.accumulation_steps(train["global_batch_size"], train["micro_batch_size"])
    train |= {"precision": "fp32", "tf32": False, "ema": None, "micro_batch_size": micro}
    train["global_batch_size"] = micro * dims.data_parallel_size * min(accumulation, 2)
    if (lora := tree["adapt"]["lora"]) is not None:
        lora["rank"] = min(lora["rank"], ADAPTER_RANK)
        for key in ("targets", "trained"):  # a pattern may name a missing block
            lora[key] = [_BLOCK.sub("*", pattern) for pattern in lora[key]]
    tree["loss"]["load"] = 0.0  # depends on the router's noise
    tree["loss"]["load_balance_counts"] = "process"  # one process has no others' micro-batches
    tree["distill"] = {}  # the model's layout is tested on random samples
    if norms_over_batch(config.model):
        # One process then has all samples at once, but these losses are per micro-batch.
        tree["loss"] |= {"load_balance": 0.0, "importance": 0.0, "sample_similarity": None}
    tree["evaluation"]["stride"] = None  # it may now be longer than a sample
    parallel["bucket_size"] = min(parallel["bucket_size"], 1000)  # several buckets, as in a run
    groups, tree["optimizer"]["groups"] = tree["optimizer"]["groups"], []
    whole = model_of(_read(tree))
    experts = {n: len(p) if has_experts(whole, n) else 0 for n, p in whole.named_parameters()}
    tree["optimizer"]["groups"] = list(_with_parameters(groups, experts))
    return _read(tree)


def norms_over_batch(model: ModelSettings) -> bool:
    """Whether a gate averages over all samples that processes have at the same time."""
    gates = [*model.feed_forwards().values(), getattr(model, "head", None)]
    return any(getattr(each, "gate_norm", "") == "batch" for each in gates)


def _read(tree: dict[str, Any]) -> RunConfig:
    return config_of(tree, (), origin="the small model")


def _with_parameters(
    groups: Iterable[dict[str, Any]], experts: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields the optimizer's groups that still have parameters with fewer blocks and experts.

    Args:
        groups: The run's groups.
        experts: Number of experts that each parameter stacks, by name; 0: no stack.
    """
    left = {name: set(range(count or 1)) for name, count in experts.items()}
    for group in groups:
        some = {name for name in experts if matches(group["match"], name)}
        numbers = group["experts"]
        if numbers is not None:  # match any block, or nothing might be left to train
            match = group["match"] if some else _BLOCK.sub("*", group["match"])
            some = {name for name, count in experts.items() if count and matches(match, name)}
            fewest = min((experts[name] for name in some), default=1)
            numbers = sorted({number % fewest for number in numbers})
            group = group | {"match": match, "experts": numbers}
        mine = {n: left[n] if numbers is None else left[n] & set(numbers) for n in some}
        if any(mine.values()):
            yield group
        left |= {name: left[name] - taken for name, taken in mine.items()}


def _shrink_model(model: dict[str, Any], cut: int) -> None:
    given = dict(model)
    model |= {"dropout": 0.0, "compile": False, "num_layers": _layers(model)}
    heads = cut * max(1, math.ceil(2 / cut))
    if "num_heads" in model:
        model["num_heads"] = heads
    model["hidden_size"] = heads * HEAD_WIDTH
    if model["kind"] == "decoder":
        _shrink_decoder(model, cut, given)
    if model["kind"] in ("gpt2", "decoder", "bert"):
        model |= {"sequence_length": TOKENS, "vocab_size": VOCABULARY}
        if "end_of_text_id" in model:
            model["end_of_text_id"] = VOCABULARY - 1
        if (model.get("head") or {}).get("kind") == "classification":
            model["head"] |= {"num_classes": CLASSES, "dropout": 0.0}
    else:
        model |= {"image_size": PIXELS, "patch_size": PATCH, "num_classes": CLASSES}
        model["drop_path"] = 0.0
        if model.get("pre_logits") is not None:
            model["pre_logits"] = heads * HEAD_WIDTH


def _shrink_decoder(model: dict[str, Any], cut: int, given: dict[str, Any]) -> None:
    """Reduces heads and units; which heads share keys, and whether processes do, is kept.

    Args:
        model: the model to shrink.
        cut: number of processes that share a layer.
        given: the original model.
    """
    heads, layers = given["num_heads"], model["num_layers"]
    groups = given["num_key_value_heads"] or heads
    if given["latent_attention"] is None:
        few = min(groups, 2 * cut) if groups % cut == 0 else groups
        model["num_key_value_heads"] = few
        model["num_heads"] = few if groups == heads else 2 * max(few, cut)
        size = given["head_size"] or given["hidden_size"] // heads
        wider = size * heads != given["hidden_size"]  # all heads together wider than the stream
        model["head_size"] = HEAD_WIDTH
        model["hidden_size"] = HEAD_WIDTH * (model["num_heads"] + wider)
    else:
        latent = {"key_value_rank": 12, "plain_size": 6, "rotated_size": 4, "value_size": 5}
        latent["query_rank"] = given["latent_attention"]["query_rank"] and 14
        model["latent_attention"] = latent
    if model["sliding_window"] is not None:
        model["sliding_window"] = min(model["sliding_window"], WINDOW)
    if isinstance(blocks := model["sliding_window_blocks"], list):
        model["sliding_window_blocks"] = [b for b in blocks if b < layers] or [layers - 1]
    if model["pad_id"] is not None:
        model["pad_id"] = min(model["pad_id"], VOCABULARY - 1)


def _layers(model: dict[str, Any]) -> int:
    """Two layers, or as many as needed to have blocks with experts and blocks without."""
    most = model["num_layers"]
    sections = [model.get(name, {}) for name in FEED_FORWARDS]
    placed = [section.get("placement", section.get("blocks", 1)) for section in sections]
    placed.append(model.get("sliding_window_blocks", 1))
    periods = [placement for placement in placed if isinstance(placement, int)]
    return int(min(most, max(2, *periods, 2)))


def _shrink_experts(section: dict[str, Any], cut: int, fewest: int, layers: int) -> None:
    inner = 3 * HEAD_WIDTH * cut
    if section["kind"] == "dense":
        section["hidden_size"] = inner
    elif section["kind"] == "mumoe":
        section |= {"hidden_size": inner, "expert_dropout": 0.0}
        _shrink_factors(section, cut)
    elif section["kind"] in ("mxd", "transcoder"):
        levels = [4 * cut, *[4] * (len(section["num_experts"]) - 1)]
        section |= {"num_experts": levels, "top_k": min(section["top_k"], 3)}
        if section["kind"] == "mxd":
            section["hidden_size"] = inner
    elif section["kind"] == "smoe":
        top, groups = min(section["top_k"], 4), min(section["num_groups"], 2)
        several = math.lcm(fewest, groups)
        # A group has as many experts as a token uses.
        experts = several * math.ceil(max(4, top + 1, groups * top) / several)
        experts = min(section["num_experts"], experts)
        section |= {"top_k": top, "num_experts": experts, "expert_hidden_size": inner}
        section |= {"num_groups": groups, "top_groups": min(section["top_groups"], groups)}
        section |= {"router_noise": 0.0, "expert_dropout": 0.0, "dense_hidden_size": inner}
        if section["shared_hidden_size"] is not None:
            section["shared_hidden_size"] = inner
        if section["final_top_k"] is not None:
            section["final_top_k"] = min(section["final_top_k"], experts)
        if section["pool"] != "none":  # fixed size: every process would draw differently
            size = max(section["final_top_k"] or top, experts // 2)
            section |= {"pool_least": size, "pool_most": size}
        if section["score_width"] is not None:
            section["score_width"] = HEAD_WIDTH
        if isinstance(section["placement"], list):  # a block with experts, after one without
            section["placement"] = [layers - 1]
    elif section["kind"] == "emoe":
        top = min(section["top_k"], 3)
        experts = fewest * math.ceil((top + 1) / fewest)
        section |= {"top_k": top, "num_experts": experts, "router_noise": 0.0}
        section["hidden_size"] = experts * cut * HEAD_WIDTH
        if section["score_width"] is not None:
            section["score_width"] = HEAD_WIDTH
        if isinstance(section["blocks"], list):
            section["blocks"] = [layers - 1]


def _shrink_factors(section: dict[str, Any], cut: int) -> None:
    experts = (5, 3, 2)
    given = section["num_experts"]
    section["num_experts"] = [min(n, experts[min(i, 2)]) for i, n in enumerate(given)]
    section["rank"] = 6 * cut
    section["expert_rank"] = min(section["expert_rank"], 3)
