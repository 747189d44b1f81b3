"""Comparison of a small model on a layout with one process: losses, gradients and trained weights.

Gradients are read from the momentum of a step of SGD at learning rate 0, as the layout saves it:
Adam would hide a wrong scale. Weights are compared after steps of the configuration's own
optimizer, expert by expert, relative to how far they moved, so that an expert that stands still is
found. What rounding explains is measured on one process, with weights that differ by one rounding.
"""

import math
import os
import re
import signal
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polyad.data.files import temporary_folder
from polyad.model.build import initializer_of
from polyad.model.config import dump_yaml
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import MASTER, Box
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import Retention, step_folder
from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.config import ParallelConfig
from polyad.parallel.source import InitialWeights
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import engine_of, model_of, random_micro_batches
from polyad.train.config.environment import agreed_facts
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig, build_config
from polyad.train.errors import ConfigError, RunError
from polyad.train.loop.optimizer import OptimizerConfig
from polyad.train.loop.profiling import Prefetch
from polyad.train.loop.step import issue_step
from polyad.train.results import aligned
from polyad.train.tasks.random_input import losses_for

MODELS = ("gpt2", "decoder", "bert", "mixer", "vit")
FEED_FORWARDS = ("feed_forward", "token_feed_forward", "channel_feed_forward")
KINDS = ("loss", "gradient norm", "gradient", "weight")
OF_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
WIDTH = 8
"""Units of a head, and in multiples of a feed-forward."""
STEPS, LEARNING_RATE = 3, 1e-2
GRADIENTS = OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.0, clip_grad_norm=0.0)
ALLOWED = 1e-5
"""Largest relative difference from the order of sums in fp32; a wrong scale exceeds it."""
SENSITIVE = 100
"""Multiple of the effect of one rounding that is allowed: a gate after a BatchNorm amplifies it."""
SMALL = 1e-6
"""Gradients below this share of the largest are zero up to rounding, such as a bias before a
softmax."""


class Trial(NamedTuple):
    """Results of a layout."""

    losses: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    gradients: Path
    """A checkpoint of the initial weights, whose momentum is their gradient."""
    trained: Path
    """A checkpoint after the steps."""

    def numbers(self, config: RunConfig) -> Iterator[tuple[str, str, torch.Tensor, float]]:
        """Yields kind, name, numbers [experts or 1, n], and the size below which they are zero."""
        for step, values in enumerate(self.losses, start=1):
            for kind, value in zip(KINDS, values, strict=False):
                yield kind, f"step {step}", torch.tensor([[value]], dtype=torch.float64), 1e-12
        before, after = Checkpoint(self.gradients), Checkpoint(self.trained)
        model, field = model_of(config), "momentum_buffer"
        gradients = {n: before.whole(n, field) for n, has in before.tensors.items() if field in has}
        largest = max(gradient.norm().item() for gradient in gradients.values())
        for name, gradient in sorted(gradients.items()):
            rows = len(gradient) if initializer_of(model, name).per_expert else 1
            yield "gradient", name, gradient.reshape(rows, -1), SMALL * largest
            start, end = (each.whole(name, MASTER).reshape(rows, -1) for each in (before, after))
            rounding = torch.finfo(end.dtype).eps * end.norm().item()
            yield "weight", name, end - start, max(rounding, SMALL)


class Difference(NamedTuple):
    """The largest difference from one process in a loss or tensor, relative to its size."""

    kind: str
    name: str
    relative: float
    expert: int | None
    """None: the tensor does not stack experts."""
    is_wrong: bool
    """Whether it is larger than rounding explains."""


class Nudged(InitialWeights):
    """Initial weights, each changed by at most one rounding of fp32; on one process."""

    def weight(self, box: Box) -> torch.Tensor:
        """A whole parameter's value."""
        value = super().weight(box)
        generator = torch.Generator().manual_seed(zlib.crc32(box.name.encode()))
        up_or_down = torch.randint(-1, 2, value.shape, generator=generator)
        return value * (1 + torch.finfo(torch.float32).eps * up_or_down)


def run_trial(config: RunConfig, world: comm.World, folder: Path, *, nudged: bool = False) -> Trial:
    """Trains on this layout; all processes call it together.

    Args:
        config: a small configuration.
        world: this process.
        folder: for the checkpoints, shared by all processes.
        nudged: whether to start from `Nudged` weights.
    """
    validate(config, world.size)
    start = (Nudged if nudged else InitialWeights)(model_of(config), config.seed)
    engine = engine_of(config, world, start, optimizer=GRADIENTS)
    _step(engine, config, 0, learning_rate=0.0)
    gradients = _save(engine, config, folder / "gradients")
    engine = engine_of(config, world, start)
    losses = [_step(engine, config, step, LEARNING_RATE) for step in range(STEPS)]
    return Trial(losses, gradients, _save(engine, config, folder / "trained"))


def _step(
    engine: Engine, config: RunConfig, step: int, learning_rate: float
) -> tuple[float, float]:
    batches = list(random_micro_batches(config, engine.world, step))
    outcome = issue_step(
        engine,
        losses_for(config.model),
        Prefetch(iter(batches), engine.world.device),
        len(batches),
        learning_rate,
        losses=config.loss,
        progress=(step + 1) / (STEPS + 1),
        record_is_due=step != 1,  # most steps of a run have no record
    )
    return outcome.statistics.numbers.loss, outcome.result.grad_norm


def _save(engine: Engine, config: RunConfig, folder: Path) -> Path:
    model = dump_yaml({"model": config.model.model_dump(mode="json")})
    folder.parent.mkdir(parents=True, exist_ok=True)
    Saver(engine, folder, keep=Retention()).save(STEPS, {}, model, {})
    return folder / step_folder(STEPS)


def trials_alone(config: RunConfig, data_parallel_size: int, folder: Path) -> tuple[Trial, Trial]:
    """Trains on one process without sharding, from the initial weights and from nudged ones.

    Args:
        config: as for `run_trial`.
        data_parallel_size: that of the layout.
        folder: for the checkpoints.
    """
    train = config.train
    if _norms_over_batch(config):  # over the samples of all processes, so it takes them at once
        micro = train.micro_batch_size * data_parallel_size
        train = train.model_copy(update={"micro_batch_size": micro})
    config = config.model_copy(update={"parallel": ParallelConfig(), "train": train})
    with comm.left_again():
        world = comm.initialize()
        trial = run_trial(config, world, folder / "alone")
        return trial, run_trial(config, world, folder / "nudged", nudged=True)


def _leave_group() -> None:
    """Makes a process forget the group of its parent, which handles signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in [*os.environ]:
        if name.startswith("TORCHELASTIC_") or name in OF_GROUP:
            del os.environ[name]


def differences(
    config: RunConfig, ours: Trial, theirs: Trial, nudged: Trial
) -> Iterator[Difference]:
    """Compares all numbers of two trials.

    Args:
        config: configuration of all.
        ours: trial of a layout.
        theirs: trial of one process.
        nudged: trial of one process with weights changed by one rounding.
    """
    trials = (trial.numbers(config) for trial in (theirs, ours, nudged))
    for (kind, name, wanted, least), (*_, mine, _), (*_, moved, _) in zip(*trials, strict=True):
        sizes = wanted.norm(dim=1).clamp(min=least)
        relative = (mine - wanted).norm(dim=1) / sizes
        allowed = (SENSITIVE * (moved - wanted).norm(dim=1) / sizes).clamp(min=ALLOWED)
        wrong = ~(relative <= allowed)  # NaN is wrong, too
        worst = int((relative.nan_to_num(math.inf) + wrong * 1e9).argmax())
        expert = worst if len(relative) > 1 else None
        yield Difference(kind, name, relative[worst].item(), expert, bool(wrong.any()))


def verify(config: RunConfig, run: Path) -> dict[str, Any] | None:
    """Compares a layout with one process; all processes call it together.

    Args:
        config: a small configuration; see `small_config`.
        run: a folder beside which all hosts can write, if there are several.

    Returns:
        JSON values on rank 0; None on the others.
    """
    shape = config.parallel
    degrees = shape.tensor_parallel_size, shape.expert_parallel_size
    world = comm.initialize(shape.timeout_minutes, *degrees, agreed_facts(config, None))
    parent = None if comm.is_one_host() else run.absolute().parent
    made: Any = temporary_folder(".polyad-verify-", parent) if world.is_main else nullcontext()
    compared: list[Difference] = []
    with made as mine:
        folder = comm.from_main(mine)
        ours = run_trial(config, world, folder / "layout")
        if world.is_main:  # the reference is in a process of its own, since this one is in a group
            with ProcessPoolExecutor(1, get_context("spawn"), _leave_group) as alone:
                ranks = world.data_parallel_size
                trials = alone.submit(trials_alone, config, ranks, folder).result()
            compared = [*differences(config, ours, *trials)]
        comm.barrier()
    if not world.is_main:
        return None
    wrong = [each._asdict() for each in compared if each.is_wrong]
    by_kind = {kind: [each.relative for each in compared if each.kind == kind] for kind in KINDS}
    return {
        "processes": world.size,
        "data_parallel_size": world.data_parallel_size,
        **shape.model_dump(exclude={"bucket_size", "timeout_minutes"}),
        "equal": not wrong,
        "differences": {
            kind: {"compared": len(each), "largest_difference": max(each)}
            for kind, each in by_kind.items()
        },
        "wrong": wrong,
    }


def table(result: dict[str, Any]) -> str:
    """Formats the result."""
    rows = [("", "compared", "largest difference")]
    for kind, about in result["differences"].items():
        rows.append((kind, f"{about['compared']}", f"{about['largest_difference']:.1e}"))
    wrong = len(result["wrong"])
    end = (
        f"{wrong} differ from one process" if wrong else "the layout computes what one process does"
    )
    return "\n".join([*aligned(rows), end])


def check(result: dict[str, Any]) -> None:
    """Ends the command with status 1 if the layout's results differ.

    Raises:
        RunError: they do; the line names the first parameter.
    """
    for first in result["wrong"]:
        place = "" if first["expert"] is None else f", expert {first['expert']},"
        raise RunError(
            f"this layout does not compute what one process does: {first['kind']} of "
            f"{first['name']}{place} differs by {first['relative']:.1e} of its size"
        )


def small_config(config: RunConfig, processes: int) -> RunConfig:
    """Returns the configuration with few layers, units, experts, tokens and samples, in fp32.

    Kinds, scores, graphs, capacities, placement and degrees are kept. Randomness is turned off,
    since layouts draw random numbers in different orders, and so are compilation, and groups of
    parameters, which name blocks and experts.

    Args:
        config: a run's configuration.
        processes: number of processes that will run it.

    Raises:
        ValueError: with an `exit_status` of 2: the configuration does not fit the processes.
    """
    dims = validate(config, processes)
    tree: dict[str, Any] = config.model_dump(mode="json")
    model, train, lora = tree["model"], tree["train"], tree["adapt"]["lora"]
    if model["kind"] not in MODELS:
        raise ConfigError(
            f"model.kind: {model['kind']} is not allowed with verify-layout, which makes small "
            f"models and their input for {', '.join(MODELS)}"
        )
    parts, ranks = dims.tensor_parallel_size, dims.expert_parallel_size
    _shrink_model(model, parts)
    sections = [model[name] for name in FEED_FORWARDS if name in model]
    if replaced := model.get("replaced"):
        replaced["blocks"] = [model["num_layers"] - 1]
        sections.append(replaced["feed_forward"])
    if (model.get("head") or {}).get("kind") == "mumoe":
        sections.append(model["head"])
    for section in sections:
        _shrink_experts(section, parts, ranks, model["num_layers"])
    micro = min(train["micro_batch_size"], 2)
    accumulation = dims.accumulation_steps(train["global_batch_size"], train["micro_batch_size"])
    train |= {"precision": "fp32", "tf32": False, "ema": None, "micro_batch_size": micro}
    train["global_batch_size"] = micro * dims.data_parallel_size * min(accumulation, 2)
    if lora is not None:
        lora["rank"] = min(lora["rank"], 2)
        for key in ("targets", "trained"):  # a pattern may name a missing block
            lora[key] = [re.sub(r"(?<![^.])\d+(?![^.])", "*", pattern) for pattern in lora[key]]
    # Loss `load` depends on the router's noise, and one process has no others' micro-batches.
    tree["loss"] |= {"load": 0.0, "load_balance_counts": "process"}
    if _norms_over_batch(config):  # one process has all samples at once; these are per micro-batch
        tree["loss"] |= {"load_balance": 0.0, "importance": 0.0, "sample_similarity": None}
    tree["distill"], tree["optimizer"]["groups"], tree["evaluation"]["stride"] = {}, [], None
    tree["parallel"]["bucket_size"] = min(tree["parallel"]["bucket_size"], 1000)  # several buckets
    return build_config(tree, (), origin="the small model")


def _norms_over_batch(config: RunConfig) -> bool:
    """Whether a gate averages over all samples that processes have at the same time."""
    gates = [*config.model.feed_forwards().values(), getattr(config.model, "head", None)]
    return any(getattr(each, "gate_norm", "") == "batch" for each in gates)


def _replace(section: dict[str, Any], **values: Any) -> None:
    section.update({key: value for key, value in values.items() if key in section})


def _shrink_model(model: dict[str, Any], parts: int) -> None:
    """Reduces sizes; heads stay, since which of them share keys and processes depends on them."""
    heads = model.get("num_heads") or max(2, parts)
    is_wider = heads * (model.get("head_size") or 0) not in (0, model["hidden_size"])
    sections = [model.get(name, {}) for name in FEED_FORWARDS]
    placed = [each.get("placement", each.get("blocks")) for each in sections]
    placed.append(model.get("sliding_window_blocks"))
    layers = max(2, *(each for each in placed if isinstance(each, int)), 0)
    layers = min(model["num_layers"], layers)
    _replace(
        model,
        **{"num_layers": layers, "head_size": WIDTH, "hidden_size": WIDTH * (heads + is_wider)},
        **{"dropout": 0.0, "drop_path": 0.0, "compile": False, "num_classes": 11},
        **{"sequence_length": 17, "vocab_size": 61, "end_of_text_id": 60},
        **{"image_size": 16, "patch_size": 4},
        pre_logits=model.get("pre_logits") and heads * WIDTH,
        sliding_window=model.get("sliding_window") and min(model["sliding_window"], 5),
        pad_id=model.get("pad_id") and min(model["pad_id"], 60),
    )
    _replace(model.get("head") or {}, num_classes=11, dropout=0.0)
    if isinstance(blocks := model.get("sliding_window_blocks"), list):
        model["sliding_window_blocks"] = [b for b in blocks if b < layers] or [layers - 1]
    if latent := model.get("latent_attention"):
        latent |= {"key_value_rank": 12, "plain_size": 6, "rotated_size": 4, "value_size": 5}
        latent["query_rank"] = latent["query_rank"] and 14
        model["head_size"] = None


def _shrink_experts(section: dict[str, Any], parts: int, ranks: int, layers: int) -> None:
    width: int = 3 * WIDTH * parts
    count: Any = section.get("num_experts")
    top, groups = min(section.get("top_k", 1), 4), min(section.get("num_groups", 1), 2)
    if section["kind"] in ("mxd", "transcoder"):
        count = 4 * parts
    elif isinstance(count, list):  # factors of muMoE
        count = [min(each, (5, 3, 2)[min(number, 2)]) for number, each in enumerate(count)]
    elif count is not None:  # a group has as many experts as a token uses
        several = math.lcm(ranks, groups)
        count = min(count, several * math.ceil(max(4, top + 1, groups * top) / several))
        width = count * WIDTH * parts if section["kind"] == "emoe" else width
    _replace(
        section,
        **{"num_experts": count, "top_k": top, "num_groups": groups, "rank": 6 * parts},
        **{"expert_hidden_size": width, "dense_hidden_size": width},
        **{"router_noise": 0.0, "expert_dropout": 0.0},
        top_groups=min(section.get("top_groups", 1), groups),
        expert_rank=min(section.get("expert_rank", 3), 3),
        shared_hidden_size=section.get("shared_hidden_size") and width,
        score_width=section.get("score_width") and WIDTH,
        final_top_k=section.get("final_top_k") and min(section["final_top_k"], count),
    )
    if section["kind"] != "smoe":
        _replace(section, hidden_size=width)
    if section.get("pool", "none") != "none":  # fixed size: every process would draw differently
        size = max(section["final_top_k"] or top, count // 2)
        section |= {"pool_least": size, "pool_most": size}
    for key in ("placement", "blocks"):
        if isinstance(section.get(key), list):  # a block with experts, after one without
            section[key] = [layers - 1]
