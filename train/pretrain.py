"""`polyad train`: opens the inputs of a run, builds its parts in order, and starts the loop.

YAML and overrides -> RunConfig -> the model -> its layout -> the loop -> metrics, checkpoints
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from polyad.parallel import comm
from polyad.parallel.checkpoint.manage import reason_of
from polyad.parallel.checkpoint.save import SaveError
from polyad.parallel.zero import Engine, import_engine
from polyad.train.config.beginning import nothing_is_left, say_first_line
from polyad.train.config.distillation import set_teacher
from polyad.train.config.parts import (
    batches_of,
    build_engine,
    meet,
    open_run_folder,
    restore_random_numbers,
    saver_of,
)
from polyad.train.config.plan import Plan, find_start_together, open_plan, verify_start
from polyad.train.errors import OUTPUT_ERRORS, RunError
from polyad.train.experts.fluctuation import FluctuationLog
from polyad.train.guard.memory import RunMemory
from polyad.train.guard.run_folder import RunLock, gone, put_back_replaced
from polyad.train.guard.stalls import explain_stall
from polyad.train.guard.stopping import StopSignals
from polyad.train.loop.device import allow_tf32
from polyad.train.loop.loop import TrainLoop
from polyad.train.state import TrainState
from polyad.train.tasks.samples import probe_of


def main(path: Path, overrides: Sequence[str] = (), *, launched: bool = False) -> TrainState:
    """Runs a configuration to its end, from its newest checkpoint if it has one.

    Args:
        path: the configuration.
        overrides: `key=value`.
        launched: whether torchrun or another command of `polyad` started this process.

    Returns:
        The run's state at its end.
    """
    with StopSignals(comm.environment_world_size(), launched=launched) as stop:
        try:
            return _run(path, overrides, stop)
        except (OSError, SaveError) as error:
            if isinstance(error, OSError) and error.errno not in OUTPUT_ERRORS:
                raise
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise RunError(f"{reason}; {stop.kept()}") from error


def _run(path: Path, overrides: Sequence[str], stop: StopSignals) -> TrainState:
    """Checks that all processes agree on the run and that no other start is active, and trains."""
    plan = open_plan(path, overrides, comm.environment_world_size())
    stop.limit(plan.config.monitor.grace_seconds, plan.what_is_kept)
    import_engine()
    world = meet(plan)
    put_back_replaced(plan.folder, world)
    plan = find_start_together(plan, world)
    with RunLock(plan.folder, world):
        plan = verify_start(plan)
        state = plan.start_state(plan.resume)
        if world.is_main:
            say_first_line(plan, state)
        if not nothing_is_left(plan, state):
            _train(plan, state, world, stop)
    return state


def _train(plan: Plan, state: TrainState, world: comm.World, stop: StopSignals) -> None:
    """Builds the model in its layout and trains it, updating the state."""
    config, task = plan.config, plan.task
    allow_tf32(config.train.tf32, world.device)
    batches = batches_of(plan, world, state)  # before the engine: loader workers start meanwhile
    memory = RunMemory(world=world, checkpoints=plan.checkpoints)
    with memory.during(lambda: "building the engine"):
        engine = build_engine(plan, world)
        saver = saver_of(plan, engine)
        set_teacher(plan.teacher, config, task, engine)
    restore_random_numbers(plan, state, plan.resume, world)
    metrics = open_run_folder(plan, state, world)
    fluctuation = _fluctuation(plan, state, engine, memory)
    stop.wait_for_steps()
    timeout = config.parallel.timeout_minutes
    try:
        with explain_stall(timeout), memory.during(lambda: f"in step {state.step + 1}"):
            loop = TrainLoop(
                engine=engine,
                task=task,
                micro_batches=batches,
                accumulation_steps=plan.accumulation_steps,
                state=state,
                folder=plan.folder,
                train=config.train,
                optimizer=config.optimizer,
                schedule=config.schedule,
                loss=config.loss,
                evaluation=config.evaluation,
                checkpoint=config.checkpoint,
                monitor=config.monitor,
                log=config.log,
                saver=saver,
                config_yaml=config.to_yaml(),
                files=plan.kept.files,
                fluctuation=fluctuation,
                memory=memory,
                timeout_minutes=timeout,
                stop=stop,
                metrics=metrics,
            )
            signal = loop.run()
            if signal:
                comm.barrier()  # until all processes have saved
                stop.stop(signal)
    except (OSError, SaveError):
        if not plan.folder.exists():
            raise gone(plan.folder) from None
        raise
    finally:
        saver.close()
        if metrics is not None:
            metrics.close()


def _fluctuation(
    plan: Plan, state: TrainState, engine: Engine, memory: RunMemory
) -> Callable[[], dict[str, float]] | None:
    """Returns a comparison of routing at checkpoints, if configured; a resumed run starts from its
    own."""
    config = plan.config
    if not config.log.fluctuation:
        return None
    samples = probe_of(plan.task, config.log.fluctuation_tokens)
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size
    compare = FluctuationLog(engine, samples, batch_size, memory)
    if plan.resume is not None and state.step < config.train.steps:
        compare()
    return compare
