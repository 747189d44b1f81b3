"""`polyad train`, in order: start reading here.

YAML and overrides -> RunConfig -> the model -> its layout -> the loop -> metrics, checkpoints
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polyad.data.files import write_whole
from polyad.data.sampler import micro_batches
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import CONFIG_FILE
from polyad.parallel.checkpoint.manage import Retention, reason_of, remove_leftovers
from polyad.parallel.checkpoint.save import SaveError, Saver
from polyad.parallel.zero import Engine, import_engine
from polyad.train.config.adaptation import engine_of, reinitialized_prefixes, source_of
from polyad.train.config.distillation import set_teacher
from polyad.train.config.environment import agreed_facts, write_environment
from polyad.train.errors import OUTPUT_ERRORS, RunError, stopped
from polyad.train.experts.fluctuation import FluctuationLog
from polyad.train.guard.run_folder import gone, put_back_replaced, run_lock
from polyad.train.guard.stopping import StopSignals, explain_out_of_memory, explain_stall
from polyad.train.loop.loop import TrainLoop
from polyad.train.loop.metrics import Metrics
from polyad.train.loop.profiling import Prefetch, allow_tf32
from polyad.train.start import (
    Plan,
    find_start_together,
    nothing_is_left,
    open_plan,
    say_first_lines,
    verify_start,
)
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
    world_size = comm.environment_world_size()
    with StopSignals(world_size, launched=launched) as stop:
        try:
            plan = open_plan(path, overrides, world_size)
            config, dims = plan.config, plan.dims
            stop.kept = plan.what_is_kept
            import_engine()
            world = comm.initialize(
                config.parallel.timeout_minutes,
                dims.tensor_parallel_size,
                dims.expert_parallel_size,
                agreed_facts(config, plan.task) if world_size > 1 else None,
            )
            comm.on_main(partial(put_back_replaced, plan.folder))
            plan = find_start_together(plan, world)
            with run_lock(plan.folder, world):  # no other start is active
                plan = verify_start(plan)
                state = plan.start_state()
                if world.is_main:
                    say_first_lines(plan, state)
                if not nothing_is_left(plan, state):
                    _train(plan, state, world, stop)
            return state
        except (OSError, SaveError) as error:
            if isinstance(error, OSError) and error.errno not in OUTPUT_ERRORS:
                raise
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            raise RunError(f"{reason}; {stop.kept()}") from error


def _train(plan: Plan, state: TrainState, world: comm.World, stop: StopSignals) -> None:
    """Builds the model in its layout and trains it, updating the state."""
    config, task = plan.config, plan.task
    allow_tf32(config.train.tf32, world.device)
    batches = micro_batches(  # before the engine: loader workers start meanwhile
        task.samples,
        start_step=state.step,
        num_steps=config.train.steps - state.step,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_parallel_rank=world.data_parallel_rank,
        data_parallel_size=plan.dims.data_parallel_size,
        num_workers=config.data.num_workers,
        pin_memory=world.device.type == "cuda",
    )
    with explain_out_of_memory(lambda: "building the engine", world):
        anew = () if plan.init is None else reinitialized_prefixes(task, plan.init, config)
        source = source_of(config, plan.resume, plan.init, anew)
        engine = engine_of(config, world, source)
        saver = Saver(
            engine,
            plan.checkpoints,
            keep=Retention(config.checkpoint.keep_last, config.checkpoint.keep_every),
            asynchronous=config.checkpoint.asynchronous,
        )
        set_teacher(plan.teacher, config, task, engine)
    # Dropout's generators: those of the checkpoint, unless the layout has changed.
    comm.seed_random(config.seed, state.step, world)
    if plan.resume is not None:
        plan.resume.restore_random_states(world)
    metrics = _open_run_folder(plan, state) if world.is_main else None
    fluctuation = _fluctuation(plan, state, engine) if config.log.fluctuation else None
    stop.at_once = False
    try:
        with (
            explain_stall(config.parallel.timeout_minutes),
            explain_out_of_memory(lambda: f"in step {state.step + 1}", world),
        ):
            signal = TrainLoop(
                config=config,
                engine=engine,
                task=task,
                batches=Prefetch(batches, engine.device),
                state=state,
                saver=saver,
                fluctuation=fluctuation,
                stop=stop,
                metrics=metrics,
            ).run()
            with stop.saving():
                saver.finish()
            if signal:
                comm.barrier()  # until all processes have saved
                raise stopped(signal, stop.kept())
    except (OSError, SaveError):
        if not plan.folder.exists():
            raise gone(plan.folder) from None
        raise
    finally:
        saver.close()
        if metrics is not None:
            metrics.close()


def _open_run_folder(plan: Plan, state: TrainState) -> Metrics:
    """Writes a run's configuration and environment to its folder, and opens its metrics."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(plan.checkpoints)
    write_whole(plan.folder / CONFIG_FILE, plan.config.to_yaml())
    write_environment(plan.folder, plan.dims.world_size)
    return Metrics(
        plan.folder,
        plan.config.log,
        state.step - (state.unfinished is not None),  # that step's record is rewritten
        plan.config.train.steps,
        unit=plan.task.unit,
        validation_score=plan.task.validation_score,
        about=plan.config.model_dump(mode="json"),
    )


def _fluctuation(plan: Plan, state: TrainState, engine: Engine) -> FluctuationLog:
    """Returns a comparison of routing at checkpoints; a resumed run starts from its own."""
    config = plan.config
    samples = probe_of(plan.task, config.log.fluctuation_tokens)
    batch_size = config.evaluation.batch_size or config.train.micro_batch_size
    compare = FluctuationLog(engine, samples, batch_size)
    if plan.resume is not None and state.step < config.train.steps:
        compare()
    return compare
