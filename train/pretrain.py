"""`polyad train`: opens the inputs of a run, builds its parts in order, and starts the loop."""

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polyad.parallel import comm
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.saving import Saver
from polyad.parallel.checkpoint.storage import reason_of
from polyad.parallel.checkpoint.writing import SaveError
from polyad.parallel.zero import Engine, import_libraries
from polyad.train.config.agreement import agreed_facts
from polyad.train.config.beginning import nothing_is_left, say_first_line
from polyad.train.config.distillation import set_teacher
from polyad.train.config.parts import (
    batches_of,
    build_engine,
    loop_config,
    open_run_folder,
    saver_of,
    what_is_kept,
    with_verified,
)
from polyad.train.config.plan import Plan, open_inputs, plan_together
from polyad.train.config.smaller import memory_of
from polyad.train.errors import OUTPUT_ERRORS, RunError
from polyad.train.experts.fluctuation import FluctuationLog
from polyad.train.guard.data_check import DataCheck
from polyad.train.guard.memory import RunMemory
from polyad.train.guard.rewind import Rewind, add_batches_left_out, restore_random_numbers
from polyad.train.guard.run_folder import RunLock, gone, put_back_replaced
from polyad.train.guard.stopping import StopSignals
from polyad.train.guard.stragglers import Stragglers
from polyad.train.guard.watchdog import Watchdog
from polyad.train.loop.device import Prefetch, allow_tf32
from polyad.train.loop.hooks import Checkpoints, Hooks, Validation, sources_of
from polyad.train.loop.loop import TrainLoop
from polyad.train.loop.startup import Startup
from polyad.train.state import TrainState
from polyad.train.tasks.task import Kept


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
        try:
            return _run(path, overrides, startup, stop)
        except (OSError, SaveError) as error:
            if isinstance(error, OSError) and error.errno not in OUTPUT_ERRORS:
                raise
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise RunError(f"{reason}; {stop.kept()}") from error


def _run(path: Path, overrides: Sequence[str], startup: Startup, stop: StopSignals) -> TrainState:
    inputs = open_inputs(path, overrides, comm.environment_world_size())
    stop.limit(inputs.config.monitor.grace_seconds, lambda: what_is_kept(inputs.config))
    startup.lap("data")
    import_libraries()
    startup.lap("imports")
    config, dims, kept = inputs.config, inputs.dims, inputs.task.kept()
    world = comm.initialize(
        config.parallel.timeout_minutes,
        dims.tensor_parallel_size,
        dims.expert_parallel_size,
        agreed_facts(config, inputs.task) if dims.world_size > 1 else None,
    )
    allow_tf32(config.train.tf32, world.device)
    put_back_replaced(Path(config.run.folder), world)
    plan = plan_together(inputs, world)
    lock = RunLock(plan.folder, world)
    plan = with_verified(plan)
    state = plan.start_state(plan.resume, kept)
    if world.is_main:
        say_first_line(plan, state)
    if nothing_is_left(plan, state):
        lock.release()
        return state
    add_batches_left_out(state, plan.folder, world)
    batches = batches_of(plan, world, state)  # before the engine: loader workers start beside it
    memory = memory_of(config, dims, world)
    with memory.building("building the engine"):
        engine = build_engine(plan, world)
        saver = saver_of(engine, config)
        set_teacher(plan.teacher, config, plan.task, world.device)
    restore_random_numbers(config.seed, state, plan.resume, world)
    startup.lap("engine")
    metrics = open_run_folder(plan, state, world, startup)
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
            loop = TrainLoop(
                engine,
                plan.task,
                Prefetch(watchdog.over(batches), world.device),
                state,
                loop_config(config),
                accumulation_steps=dims.accumulation_steps(
                    config.train.global_batch_size, config.train.micro_batch_size
                ),
                hooks=hooks,
                metrics=metrics,
            )
            del batches  # the loop alone has them: where it goes back, their loader ends
            signal = loop.run()
            if signal:
                comm.barrier()  # until all processes have saved
                stop.stop(signal)
            data_check.finish()
            stop.end_if_failed()
    except (OSError, SaveError):
        if not plan.folder.exists():
            raise gone(plan.folder) from None
        raise
    finally:
        saver.close()
        try:
            if metrics is not None:
                metrics.close()
        finally:
            lock.release()
    return state


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
        return Prefetch(watchdog.over(batches_of(plan, world, state)), world.device)

    def start(checkpoint: Checkpoint) -> TrainState:
        return plan.start_state(checkpoint, kept)

    validation = Validation(task, engine, batch_size, memory, stop, watchdog)
    fluctuation: Callable[[], dict[str, float]] | None = None
    if config.log.fluctuation:
        probe_set = task.probe(config.log.fluctuation_tokens)
        fluctuation = FluctuationLog(engine, probe_set, batch_size, memory)
    return Hooks(
        validate=validation if task.has_validation else None,
        checkpoints=Checkpoints(
            saver, config.to_yaml(), kept.files, task, memory, config.checkpoint.keep_best
        ),
        go_back=Rewind(engine, saver, plan.checkpoints, config.seed, start, following),
        sources=sources_of(task, config.train.global_batch_size),
        stop=stop,
        at=watchdog.at,
        fluctuation=fluctuation,
        stragglers=Stragglers(
            config.monitor.stragglers, comm.from_all(socket.gethostname()), engine.world
        ),
    )
