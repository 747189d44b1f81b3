"""Builds the parts of a run from its plan: batches, engine, checkpoints, metrics."""

from collections.abc import Iterator
from typing import Any

from polyad.data.files import write_whole
from polyad.data.sampler import micro_batches
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CONFIG_FILE
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.checkpoint.manage import Retention, remove_leftovers
from polyad.parallel.checkpoint.save import Saver
from polyad.parallel.dims import Dims
from polyad.parallel.parallelize import parallelize
from polyad.parallel.source import Source
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import begins_anew, model_of, source_of
from polyad.train.config.environment import agreed_facts, write_environment
from polyad.train.config.plan import Plan
from polyad.train.config.run import RunConfig
from polyad.train.loop.metrics import Metrics
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.state import TrainState
from polyad.train.tasks.losses import cross_entropy
from polyad.train.tasks.random_input import RandomBatch, random_batch


def meet(plan: Plan) -> comm.World:
    """Joins the run's process group, in which all processes compare what they are about to do."""
    dims, parallel = plan.dims, plan.config.parallel
    return comm.initialize(
        parallel.timeout_minutes,
        dims.tensor_parallel_size,
        dims.expert_parallel_size,
        agreed_facts(plan.config, plan.task) if dims.world_size > 1 else None,
    )


def batches_of(plan: Plan, world: comm.World, state: TrainState) -> Iterator[Any]:
    """This process's micro-batches from the run's state to its end."""
    config = plan.config
    return micro_batches(
        plan.task.samples,
        start_step=state.step,
        num_steps=config.train.steps - state.step,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_parallel_rank=world.data_parallel_rank,
        data_parallel_size=plan.dims.data_parallel_size,
        num_workers=config.data.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def random_micro_batches(config: RunConfig, world: comm.World, step: int) -> Iterator[RandomBatch]:
    """Yields this process's random micro-batches of a step; all together are equal on any layout.

    Args:
        config: resolved configuration.
        world: this process.
        step: the step's number, which is the seed.
    """
    size = config.train.micro_batch_size
    for number in range(config.train.global_batch_size // size):
        if number % world.data_parallel_size == world.data_parallel_rank:
            first = 1_000_000 * step + number * size
            yield random_batch(config.model, range(first, first + size), config.data)


def build_engine(plan: Plan, world: comm.World) -> Engine:
    """Builds the engine over all processes, with the run's initial weights."""
    config = plan.config
    anew = () if plan.init is None else begins_anew(plan.task, plan.init, config)
    source = source_of(config, plan.resume, plan.init, anew)
    return engine_of(config, plan.dims, world, source, compiled=config.model.compile)


def engine_of(
    config: RunConfig,
    dims: Dims,
    world: comm.World,
    source: Source,
    *,
    optimizer: OptimizerConfig | None = None,
    global_batch_size: int | None = None,
    compiled: bool = False,
) -> Engine:
    """Builds the engine of a configuration.

    Args:
        config: Resolved configuration that fits the layout.
        dims: The layout.
        world: This process.
        source: Source of the initial weights, and of moments if it has them.
        optimizer: Replaces the configuration's.
        global_batch_size: Samples per step; replaces the configuration's.
        compiled: Whether blocks run through torch.compile.
    """
    train, wanted = config.train, optimizer or config.optimizer
    engine = parallelize(
        model_of(config),
        dims,
        config.parallel,
        world=world,
        make_optimizer=lambda parameters: build_optimizer(wanted, parameters),
        precision=train.precision,
        global_batch_size=global_batch_size or train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        clip_grad_norm=wanted.clip_grad_norm,
        source=source,
        cross_entropy=cross_entropy,
        compiled=compiled,
        cuda_graph=train.cuda_graph,
        average_decay=train.ema,
    )
    engine.train()
    return engine


def restore_random_numbers(
    plan: Plan, state: TrainState, checkpoint: Checkpoint | None, world: comm.World
) -> None:
    """Restores dropout's generators, or seeds them by seed and step if the layout has changed."""
    comm.seed_random(plan.config.seed, state.step, world)
    if checkpoint is not None:
        checkpoint.restore_random_states(world)


def saver_of(plan: Plan, engine: Engine) -> Saver:
    """Makes the writer of a run's checkpoints."""
    wanted = plan.config.checkpoint
    return Saver(
        engine,
        plan.checkpoints,
        keep=Retention(wanted.keep_last, wanted.keep_every),
        asynchronous=wanted.asynchronous,
    )


def open_run_folder(plan: Plan, state: TrainState, world: comm.World) -> Metrics | None:
    """Writes a run's configuration and environment to its folder; opens metrics on the main
    process."""
    if not world.is_main:
        return None
    plan.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(plan.checkpoints)
    write_whole(plan.folder / CONFIG_FILE, plan.config.to_yaml())
    write_environment(plan.folder, world.size)
    done = state.step - (state.unfinished is not None)  # that step's record is rewritten
    return Metrics(
        plan.folder,
        plan.config.log,
        done,
        plan.config.train.steps,
        unit=plan.task.unit,
        validation_score=plan.task.validation_score,
        about=plan.config.model_dump(mode="json"),
        nodes=comm.environment_nodes(),
    )
