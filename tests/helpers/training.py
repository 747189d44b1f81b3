"""Real training of a tiny GPT-2 on random tokens, or of another model on random images, called in
worker processes."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyad.data.images.samples import ImageBatch
from polyad.model.bert import BertConfig
from polyad.model.build import build_model
from polyad.model.decoder import DecoderSettings, GPT2Config
from polyad.model.lora import LoRAConfig, add_lora, of_base
from polyad.model.output import RoutingStats
from polyad.model.vision import ImageModelSettings
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import Box
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import Retention
from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.config import ParallelConfig
from polyad.parallel.parallelize import parallelize
from polyad.parallel.source import InitialWeights, Joined, Source
from polyad.parallel.zero import Engine
from polyad.train.loop.losses import LossConfig
from polyad.train.loop.optimizer import GroupConfig, OptimizerConfig, build_optimizer, freeze
from polyad.train.loop.profiling import Prefetch
from polyad.train.loop.step import issue_step, routing_record
from polyad.train.tasks.distillation import cross_entropy
from polyad.train.tasks.language import TextBatch
from polyad.train.tasks.random_input import losses_for, random_batch

# Odd sizes, so that fragments and padding fall everywhere.
MODEL = GPT2Config(num_layers=2, hidden_size=36, num_heads=4, sequence_length=17, vocab_size=61)
GLOBAL_BATCH, MICRO_BATCH = 8, 2


def _model_with(**feed_forward: Any) -> GPT2Config:
    return GPT2Config.model_validate(MODEL.model_dump() | {"feed_forward": feed_forward})


# The tiny model with another kind of feed-forward in its blocks; keywords say more of it.
moe_model = partial(_model_with, kind="smoe", num_experts=4, top_k=2, expert_hidden_size=24)
emoe_model = partial(_model_with, kind="emoe", num_experts=4, top_k=2, hidden_size=48)
mumoe_model = partial(_model_with, kind="mumoe", num_experts=[5], rank=7, hidden_size=24)
table_model = partial(_model_with, kind="mxd", num_experts=12, top_k=3)


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    learning_rate: float = 1e-2
    clip: float = 1.0
    first_step: int = 0
    last_step: int = 4
    resume: str | None = None
    save_to: str | None = None
    momentum: float = 0.0
    tensor: int = 1
    """Tensor-parallel processes."""
    expert: int = 1
    """Expert-parallel processes."""
    sequence: bool = False
    """Whether tensor-parallel processes share the tokens between the cut layers."""
    losses: LossConfig = field(default_factory=LossConfig)
    total_steps: int = 100
    """Steps of the whole run, for values that change over it."""
    poison: str | None = None
    """`loss` or `gradient`: made NaN on the last rank at `poison_step`, in `poison_micro_batch`."""
    poison_step: int = -1
    poison_micro_batch: int = 0
    skip_data: bool = False
    """Leave the poisoned batch out instead, as the reference."""
    dropout: float = 0.0
    model: DecoderSettings | BertConfig | ImageModelSettings = MODEL
    micro_batch: int = MICRO_BATCH
    cuda_graph: bool = False
    """Whether a GPU replays blocks as CUDA graphs."""
    stack_gates: bool = False
    average: float | None = None
    """Decay of the moving average of the weights."""
    timeout_minutes: float = 30.0
    bucket_size: int = 50_000_000
    lora: LoRAConfig | None = None
    groups: tuple[GroupConfig, ...] = ()
    layer_decay: float | None = None
    report_randomness: bool = False
    """Give, in place of losses, what dropout has done: the rank of each process among those that
    share layers and among those that see other samples, a whole weight, and its next number."""

    def but(self, **changes: Any) -> "Case":
        """The case with some values changed."""
        return replace(self, **changes)


def global_batch(step: int, config: DecoderSettings) -> torch.Tensor:
    """Token ids of a step, [GLOBAL_BATCH, T + 1], the same on any layout."""
    generator = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, config.sequence_length + 1)
    return torch.randint(0, config.vocab_size or 0, shape, generator=generator)


def image_batch(step: int, config: ImageModelSettings) -> ImageBatch:
    """Images of a step with labels, the same on any layout."""
    generator = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, config.channels, config.image_size, config.image_size)
    return ImageBatch(
        torch.randn(shape, generator=generator),
        torch.randint(config.num_classes or 0, (GLOBAL_BATCH,), generator=generator),
        torch.ones(GLOBAL_BATCH),
        torch.zeros(GLOBAL_BATCH, 4, dtype=torch.int16),
    )


def image_losses(model: Any, batch: ImageBatch) -> tuple[torch.Tensor, tuple[RoutingStats, ...]]:
    """The loss of each image, and the routing statistics."""
    logits, routing = model(batch.images_BCHW)
    return cross_entropy(logits, batch.labels_B), routing


def batches_of(step: int, world: comm.World, case: Case) -> list[Any]:
    """This rank's micro-batches of a step, as the losses take them."""
    rank, ranks = world.data_parallel_rank, world.data_parallel_size
    if isinstance(case.model, DecoderSettings):
        pieces = global_batch(step, case.model).split(case.micro_batch)
        return [TextBatch.of(piece) for piece in pieces[rank::ranks]]
    if isinstance(case.model, BertConfig):
        whole: Any = random_batch(case.model, range(GLOBAL_BATCH * step, GLOBAL_BATCH * (step + 1)))
    else:
        whole = image_batch(step, case.model)
    split = [field.split(case.micro_batch) for field in whole]
    return [type(whole)(*piece) for piece in zip(*split, strict=True)][rank::ranks]


def losses_of(case: Case) -> Any:
    """The loss on such a micro-batch."""
    if isinstance(case.model, DecoderSettings | BertConfig):
        return losses_for(case.model)
    return image_losses


def whole_model(case: Case) -> nn.Module:
    """The model of a case on the meta device, with its adapters and what is frozen."""
    model = build_model(case.model.model_copy(update={"dropout": case.dropout}))
    if case.lora is not None:
        add_lora(model, case.lora)
    freeze(model, optimizer_of(case))
    return model


def resumed(case: Case, checkpoint: Checkpoint) -> Source:
    """A checkpoint as a source; frozen weights that it leaves out are the initial ones."""
    model = whole_model(case)
    initial, base = InitialWeights(model, 7), of_base(model)
    return Joined(lambda name: initial if name in base else checkpoint)


def optimizer_of(case: Case) -> OptimizerConfig:
    """The section `optimizer` of a case."""
    return OptimizerConfig(
        kind=case.optimizer,
        learning_rate=case.learning_rate,
        momentum=case.momentum,
        groups=case.groups,
        layer_decay=case.layer_decay,
    )


def build_engine(case: Case, source: Any = None) -> tuple[Engine, comm.World]:
    """An engine for a case, filled from initial weights or from a source."""
    world = comm.initialize(tensor_parallel_size=case.tensor, expert_parallel_size=case.expert)
    if case.model.compile:
        torch.compiler.reset()  # after the programs of 8 models blocks would run uncompiled
    optimizer = optimizer_of(case)
    engine = parallelize(
        whole_model(case),
        ParallelConfig(
            zero_stage=case.stage,
            sequence_parallel=case.sequence,
            timeout_minutes=case.timeout_minutes,
            bucket_size=case.bucket_size,
        ),
        world=world,
        make_optimizer=lambda parameters: build_optimizer(optimizer, parameters),
        precision=case.precision,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=case.micro_batch,
        clip_grad_norm=case.clip,
        source=source or InitialWeights(whole_model(case), 7),
        cross_entropy=cross_entropy,
        compiled=case.model.compile,
        cuda_graph=case.cuda_graph,
        average_decay=case.average,
        stack_gates=case.stack_gates,
    )
    engine.train()
    return engine, world


def has_record(case: Case, step: int) -> bool:
    """Whether a step of a case has a record: the first and the last one, but those between have
    none, as in most steps of a run. With CUDA graphs none has, since a step that measures runs
    without them."""
    return not case.cuda_graph and step in (case.first_step, case.last_step - 1)


def assert_equal_routing(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Compares what both have of each step: parts of a run have records where the whole has none,
    and a record takes means over ranks in another order."""
    for mine, other in zip(ours, wanted, strict=True):
        both = mine.keys() & other.keys()
        assert "routing/load_max" in both
        for name in both:
            assert mine[name] == pytest.approx(other[name], rel=1e-6), name


def take_step(engine: Engine, world: comm.World, case: Case, step: int, **options: Any) -> Any:
    """A step of a case, with options of `issue_step`."""
    batches = batches_of(step, world, case)
    ahead = Prefetch(iter(batches), world.device)
    rate = case.learning_rate
    return issue_step(engine, losses_of(case), ahead, len(batches), rate, **options)


class OneExpert(InitialWeights):
    """Initial weights with which every token chooses the first expert."""

    def weight(self, box: Box) -> torch.Tensor:
        value = super().weight(box)
        if box.name.endswith("router.score.bias"):
            return torch.tensor([100.0, *[0.0] * 99])[box.slices]
        return value


def train_one_expert(case: Case) -> dict[str, Any]:
    """Trains from weights with which every token chooses the first expert; see `train`."""
    return train(case, OneExpert(whole_model(case), 7))


def train(case: Case, source: Source | None = None) -> dict[str, Any]:
    """Trains a case; returns losses, gradient norms and which steps were applied.

    Args:
        case: The case.
        source: What it starts from; None: initial weights, or what it continues from.
    """
    checkpoint = Checkpoint(Path(case.resume)) if case.resume else None
    if checkpoint is not None:
        source = resumed(case, checkpoint)
    engine, world = build_engine(case, source)
    comm.seed_random(5, case.first_step, world)
    if checkpoint is not None:
        checkpoint.restore_random_states(world)
    losses, norms, applied, routing = [], [], [], []
    for step in range(case.first_step, case.last_step):
        if step == case.poison_step and case.skip_data:
            continue
        options = {
            "losses": case.losses, "progress": (step + 1) / case.total_steps,
            "record_is_due": has_record(case, step),
        }  # fmt: skip
        with poisoned(engine, case, world) if step == case.poison_step else nullcontext():
            outcome = take_step(engine, world, case, step, **options)
        losses.append(outcome.statistics.numbers.loss)
        norms.append(outcome.result.grad_norm)
        applied.append(outcome.result.applied)
        routing.append(routing_record(outcome.statistics.numbers.routing))
    if case.save_to:
        Saver(engine, Path(case.save_to), keep=Retention()).save(
            case.last_step, {}, model_yaml(case), {}
        )
    if case.report_randomness:
        return {
            "rank": (world.tensor_parallel_rank, world.data_parallel_rank),
            "norm_weight": engine.module.final_norm.weight.detach().float().cpu().clone(),
            "next_draw": torch.rand(1).item(),
        }
    return {"losses": losses, "norms": norms, "applied": applied, "routing": routing}


def moved_though_frozen(case: Case) -> list[str]:
    """Trains a case; the names of frozen weights that this process does not have as before, and of
    trained ones that it has."""
    engine, world = build_engine(case)
    named = list(engine.module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named}
    for step in range(case.last_step):
        take_step(engine, world, case, step)
    return [n for n, p in named if torch.equal(p, before[n]) == p.requires_grad]


@contextmanager
def poisoned(engine: Engine, case: Case, world: comm.World) -> Iterator[None]:
    """Spoils one micro-batch of the last rank: a NaN loss whose gradients are finite, or a finite
    loss with NaN in one column of one gradient, which under ZeRO one rank owns.
    """
    micro_batches = itertools.count()

    def spoil(head: Any, inputs: Any, loss: torch.Tensor) -> torch.Tensor:
        here = next(micro_batches) == case.poison_micro_batch and world.rank == world.size - 1
        if here and case.poison == "gradient":
            column = torch.tensor(3, device=loss.device)
            inputs[0].register_hook(lambda gradient: gradient.index_fill(-1, column, torch.nan))
        return loss + torch.nan if here and case.poison == "loss" else loss

    handle = engine.module.head.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def model_yaml(case: Case) -> str:
    """The parts of a config that are read with a checkpoint."""
    import yaml

    parallel = {"tensor_parallel_size": case.tensor}
    return yaml.safe_dump({"model": case.model.model_dump(mode="json"), "parallel": parallel})


def resave(case: Case) -> None:
    """Loads a checkpoint into a layout and writes it again, untouched."""
    engine, _ = build_engine(case, resumed(case, Checkpoint(Path(case.resume))))
    Saver(engine, Path(case.save_to), keep=Retention()).save(
        case.first_step, {}, model_yaml(case), {}
    )


def tensors(folder: str | Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a checkpoint by name and field, but random states."""
    checkpoint = Checkpoint(Path(folder))
    return {
        (name, field): checkpoint.whole(name, field)
        for name, fields in checkpoint.tensors.items()
        for field in fields
        if field != "random"
    }


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item()


def inspect_shards(case: Case) -> dict[str, Any]:
    """What dropout leaves of ones, replicated and cut, and what is drawn after that."""
    engine, world = build_engine(case)
    comm.seed_random(5, 0, world)
    attention = engine.module.blocks[0].attention
    replicated = attention.residual_dropout(torch.ones(1000))
    attention.dropout = 0.5
    cut = attention.attend(*torch.ones(3, 50, 2, 4, 9))  # of equal queries, keys and values
    values = {"replicated": replicated, "cut": cut.flatten(), "after": torch.rand(3)}
    return {name: value.tolist() for name, value in values.items()}


def wait_in_vain(case: Case) -> float:
    """Seconds that rank 0 waits, in the group of the engine's gradients, for rank 1 not to come."""
    engine, world = build_engine(case)
    group = engine.deepspeed.data_parallel_group
    started = time.monotonic()
    if world.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            return time.monotonic() - started
        raise AssertionError("it came")
    time.sleep(12)
    return 0.0


def local_losses(case: Case, step: int) -> list[float]:
    """Losses of every token of this process's first micro-batch, and the logits' local width."""
    engine, world = build_engine(case)
    engine.train(False)
    batch = batches_of(step, world, case)[0]
    with torch.no_grad():
        losses = engine.cross_entropy(engine(batch.input_ids_BT).logits, batch.target_ids_BT)
    return losses.flatten().tolist()
