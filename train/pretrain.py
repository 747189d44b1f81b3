"""`polyad train`: opens the inputs of a run, builds its parts in order, and starts the loop."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.sampler import micro_batches
from model.build import build_model
from parallel import comm
from parallel.checkpoint.checkpoint import Checkpoint, WeightsOnly
from parallel.checkpoint.commit import Retention, complete_checkpoints, remove_leftovers
from parallel.checkpoint.saver import Saver
from parallel.checkpoint.verification import newest_verified
from parallel.fragments import Source
from parallel.imports import import_libraries
from parallel.parallelize import InitialWeights, parallelize
from parallel.zero import Engine
from train.config.beginning import nothing_is_left, say_first_line
from train.config.environment import write_environment
from train.config.plan import Plan, check_resume, open_inputs, plan_of
from train.config.run import RunConfig
from train.config.smaller import memory_of
from train.experts.fluctuation import FluctuationLog
from train.guard.data_check import DataCheck
from train.guard.memory import RunMemory
from train.guard.rewind import Rewind, add_batches_left_out, restore_random_numbers
from train.guard.run_folder import RunLock
from train.guard.stopping import StopSignals
from train.guard.watchdog import Watchdog
from train.loop.device import Prefetch, allow_tf32
from train.loop.hooks import Checkpoints, Hooks, Validation, sources_of
from train.loop.loop import LoopConfig, TrainLoop
from train.loop.metrics import Metrics
from train.loop.optimizer import build_optimizer
from train.loop.startup import Startup
from train.state import TrainState
from train.tasks.cross_entropy import cross_entropy
from train.tasks.task import Kept


def main(path: Path, overrides: Sequence[str] = (), *, launched: bool = False) -> TrainState:
    """Runs a configuration to its end, from its newest checkpoint if it has one.

    Args:
        path: the configuration.
        overrides: `key=value`.
        launched: whether torchrun or another command of `polyad` started this process.

    Returns:
        Where the run stands at its end.
    """
    startup = Startup()
    startup.lap("imports")  # the first lap begins with the process itself
    with StopSignals(comm.environment_world_size(), launched=launched) as stop:
        return _run(path, overrides, startup, stop)


def _run(path: Path, overrides: Sequence[str], startup: Startup, stop: StopSignals) -> TrainState:
    inputs = open_inputs(path, overrides, comm.environment_world_size())
    stop.limit(inputs.config.monitor.grace_seconds, lambda: _what_is_kept(inputs.config))
    startup.lap("data")
    import_libraries()
    startup.lap("imports")
    plan = plan_of(inputs)
    config, dims, kept = plan.config, plan.dims, plan.task.kept()
    world = comm.initialize(
        config.parallel.timeout_minutes, dims.tensor_parallel_size, dims.expert_parallel_size
    )
    allow_tf32(config.train.tf32, world.device)
    lock = RunLock(plan.folder, world)
    plan = _with_verified(plan)
    state = plan.start_state(plan.resume, kept)
    if world.is_main:
        say_first_line(plan, state)
    if nothing_is_left(plan, state):
        lock.release()
        return state
    add_batches_left_out(state, plan.folder, world)
    batches = _batches(plan, world, state)  # loader workers start while the engine is built
    memory = memory_of(config, dims, world)
    with memory.building("building the engine"):
        engine = _build_engine(plan, world)
        saver = _saver(engine, config)
    restore_random_numbers(config.seed, state, plan.resume, world)
    startup.lap("engine")
    metrics = _open_run_folder(plan, state, world, startup)
    watchdog = Watchdog(plan.folder, world, config.monitor.stall_minutes)
    hooks = _hooks(engine, saver, plan, kept, memory, stop, watchdog)
    if plan.resume is not None and hooks.fluctuation and state.step < config.train.steps:
        hooks.fluctuation()  # routing at this checkpoint, which the next one is compared with
    startup.lap("run_folder")
    stop.wait_for_steps()
    data_check = DataCheck(plan.task.stored(), world, stop.fail)
    try:
        with watchdog, data_check, memory.training(lambda: f"in step {state.step + 1}"):
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            startup.lap("data")
            signal = TrainLoop(
                engine,
                plan.task,
                Prefetch(watchdog.over(batches), world.device),
                state,
                _loop_config(config),
                accumulation_steps=dims.accumulation_steps(
                    config.train.global_batch_size, config.train.micro_batch_size
                ),
                hooks=hooks,
                metrics=metrics,
            ).run()
            if signal:
                comm.barrier()  # until all processes have saved
                stop.stop(signal)
            data_check.finish()
            stop.end_if_failed()
    finally:
        saver.close()
        if metrics is not None:
            metrics.close()
        lock.release()
    return state


def _with_verified(plan: Plan) -> Plan:
    """The plan with a checkpoint whose every byte was verified: the newest one that is good."""
    resume = newest_verified(plan.resume, plan.checkpoints)
    if resume is not None and resume is not plan.resume:
        check_resume(plan.config, resume)
    return replace(plan, resume=resume)


def _what_is_kept(config: RunConfig) -> str:
    """Where a run that was interrupted will go on."""
    found = complete_checkpoints(Path(config.run.folder) / "checkpoints")
    if not found:
        return "no checkpoint was written yet; the same command begins at step 0"
    return f"the same command goes on from {found[-1]}"


def _batches(plan: Plan, world: comm.World, state: TrainState) -> Iterator[Any]:
    """This process's micro-batches from where the run stands to its end."""
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
        left_out=state.left_out,
    )


def _build_engine(plan: Plan, world: comm.World) -> Engine:
    config = plan.config
    source: Source
    if plan.resume is not None:
        source = plan.resume
    elif isinstance(plan.init, Checkpoint):
        source = WeightsOnly(plan.init)
    elif plan.init is not None:
        source = plan.init
    else:
        source = InitialWeights(build_model(config.model), config.seed)
    return parallelize(
        build_model(config.model),
        plan.dims,
        config.parallel,
        world=world,
        make_optimizer=lambda parameters: build_optimizer(config.optimizer, parameters),
        precision=config.train.precision,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        source=source,
        cross_entropy=cross_entropy,
        compiled=config.model.compile,
    )


def _saver(engine: Engine, config: RunConfig) -> Saver:
    wanted = config.checkpoint
    return Saver(
        engine,
        Path(config.run.folder) / "checkpoints",
        keep=Retention(wanted.keep_last, wanted.keep_every),
        asynchronous=wanted.asynchronous,
    )


def _open_run_folder(
    plan: Plan, state: TrainState, world: comm.World, startup: Startup
) -> Metrics | None:
    if not world.is_main:
        return None
    plan.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(plan.checkpoints)
    (plan.folder / "config.yaml").write_text(plan.config.to_yaml(), encoding="utf-8")
    write_environment(plan.folder, world.size)
    done = state.step - (state.unfinished is not None)  # an unfinished step's record is rewritten
    return Metrics(
        plan.folder,
        plan.config.log,
        done,
        plan.config.train.steps,
        startup,
        unit=plan.task.unit,
        validation_score=plan.task.validation_score,
    )


def _loop_config(config: RunConfig) -> LoopConfig:
    return LoopConfig(
        folder=Path(config.run.folder),
        train=config.train,
        optimizer=config.optimizer,
        schedule=config.schedule,
        loss=config.loss,
        monitor=config.monitor,
        log=config.log,
        validate_every=config.evaluation.every,
        save_every=config.checkpoint.every,
    )


def _hooks(
    engine: Engine,
    saver: Saver,
    plan: Plan,
    kept: Kept,
    memory: RunMemory,
    stop: StopSignals,
    watchdog: Watchdog,
) -> Hooks:
    config, task, world = plan.config, plan.task, engine.world
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size

    def following(state: TrainState) -> Iterator[Any]:
        return Prefetch(watchdog.over(_batches(plan, world, state)), world.device)

    def start(checkpoint: Checkpoint) -> TrainState:
        return plan.start_state(checkpoint, kept)

    validation = Validation(task, engine, batch_size, memory, stop, watchdog)
    fluctuation: Callable[[], dict[str, float]] | None = None
    if config.log.fluctuation:
        probe_set = task.probe(config.log.fluctuation_tokens)
        fluctuation = FluctuationLog(engine, probe_set, batch_size, memory)
    return Hooks(
        validate=validation if task.has_validation else None,
        checkpoints=Checkpoints(saver, config.to_yaml(), kept.files, memory),
        go_back=Rewind(engine, saver, plan.checkpoints, config.seed, start, following),
        sources=sources_of(task, config.train.global_batch_size),
        stop=stop,
        at=watchdog.at,
        fluctuation=fluctuation,
    )
