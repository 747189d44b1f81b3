"""`polyad train`: wires a run together, in the order of the data's way. Nothing else."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from data.sampler import micro_batches
from data.text.dataset import TokenStream
from data.text.windows import EvaluationWindows, SpreadWindows
from model.build import build_model
from model.gpt2 import flops_per_token
from parallel import comm
from parallel.checkpoint.checkpoint import Checkpoint, WeightsOnly
from parallel.checkpoint.commit import Retention, complete_checkpoints, remove_leftovers
from parallel.checkpoint.saver import Saver
from parallel.checkpoint.verification import newest_verified
from parallel.checkpoint.writer import TokenizerCopy
from parallel.fragments import Source
from parallel.imports import import_libraries
from parallel.parallelize import InitialWeights, parallelize
from parallel.zero import Engine
from train.config.beginning import nothing_is_left, say_first_line
from train.config.environment import write_environment
from train.config.plan import Plan, check_resume, open_inputs, plan_of
from train.config.run import RunConfig
from train.experts.fluctuation import FluctuationLog
from train.guard.data_check import DataCheck
from train.guard.memory import explain_out_of_memory, to_build, to_train, to_validate
from train.guard.rewind import Rewind, add_batches_left_out, restore_random_numbers, start_state
from train.guard.run_folder import RunLock
from train.guard.stopping import StopSignals
from train.guard.watchdog import Watchdog
from train.loop.device import Prefetch, allow_tf32
from train.loop.loop import Hooks, TrainLoop
from train.loop.metrics import Metrics
from train.loop.optimizer import build_optimizer
from train.loop.startup import Startup
from train.state import TrainState
from train.tasks.loss import token_losses
from train.tasks.scoring import score_windows


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
    startup.lap("imports")  # since the process began
    with StopSignals(comm.environment_world_size(), launched=launched) as stop:
        return _run(path, overrides, startup, stop)


def _run(path: Path, overrides: Sequence[str], startup: Startup, stop: StopSignals) -> TrainState:
    inputs = open_inputs(path, overrides, comm.environment_world_size())
    stop.limit(inputs.config.monitor.grace_seconds, lambda: _what_is_kept(inputs.config))
    startup.lap("data")
    import_libraries()
    startup.lap("imports")
    plan = plan_of(inputs)
    config, dims = plan.config, plan.dims
    world = comm.initialize(
        config.parallel.timeout_minutes, dims.tensor_parallel_size, dims.expert_parallel_size
    )
    allow_tf32(config.train.tf32, world.device)
    folder = Path(config.run.folder)
    lock = RunLock(folder, world)
    plan = _with_verified(plan, folder / "checkpoints")
    state = start_state(plan, plan.resume)
    if world.is_main:
        say_first_line(plan, state)
    if nothing_is_left(plan, state):
        lock.release()
        return state
    add_batches_left_out(state, folder, world)
    batches = _batches(plan, world, state)  # before the engine: loader workers start beside it
    with explain_out_of_memory(
        lambda: "building the engine", world, to_build(config, dims), folder / "checkpoints"
    ):
        engine = _build_engine(plan, world)
        saver = _saver(engine, config)
    restore_random_numbers(config.seed, state, plan.resume, world)
    startup.lap("engine")
    metrics = _open_run_folder(config, state, world, startup)
    watchdog = Watchdog(folder, world, config.monitor.stall_minutes)
    hooks = _hooks(engine, saver, plan, world, stop, watchdog)
    if plan.resume is not None and hooks.fluctuation and state.step < config.train.steps:
        hooks.fluctuation()  # the weights are those of the checkpoint that the next one follows
    startup.lap("run_folder")
    explained = explain_out_of_memory(
        lambda: f"in step {state.step + 1}", world, to_train(config, dims), folder / "checkpoints"
    )
    stop.wait_for_steps()
    data_check = DataCheck(plan.data, config.data, world, stop.fail)
    try:
        with watchdog, data_check, explained:
            batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
            startup.lap("data")
            loop = TrainLoop(
                engine,
                Prefetch(watchdog.over(batches), world.device),
                state,
                config,
                accumulation_steps=dims.accumulation_steps(
                    config.train.global_batch_size, config.train.micro_batch_size
                ),
                flops_per_token=flops_per_token(config.model),
                world=world,
                hooks=hooks,
                metrics=metrics,
            )
            signal = loop.run()
            if signal:
                comm.barrier()  # everybody has saved
                stop.stop(signal)
            data_check.finish()
            stop.end_if_failed()
    finally:
        saver.close()
        if metrics is not None:
            metrics.close()
        lock.release()
    return state


def _with_verified(plan: Plan, checkpoints: Path) -> Plan:
    """With every byte of the checkpoint verified; an older one is looked at like the newest."""
    resume = newest_verified(plan.resume, checkpoints)
    if resume is not None and resume is not plan.resume:
        check_resume(plan.config, resume)
    return replace(plan, resume=resume)


def _what_is_kept(config: RunConfig) -> str:
    """Where a run that was interrupted will go on."""
    found = complete_checkpoints(Path(config.run.folder) / "checkpoints")
    if not found:
        return "no checkpoint was written yet; the same command begins at step 0"
    return f"the same command goes on from {found[-1]}"


def _batches(plan: Plan, world: comm.World, state: TrainState) -> Iterator[Tensor]:
    """This process's micro-batches from where the run stands to its end."""
    config = plan.config
    return micro_batches(
        plan.data.samples(config.model.sequence_length, config.seed),
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
        token_losses=token_losses,
        compile_model=config.model.compile,
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
    config: RunConfig, state: TrainState, world: comm.World, startup: Startup
) -> Metrics | None:
    folder = Path(config.run.folder)
    if not world.is_main:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / "checkpoints")
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    write_environment(folder, world.size)
    done = state.step - (state.unfinished is not None)  # that step's record is written anew
    return Metrics(folder, config.log, done, config.train.steps, startup)


def _hooks(
    engine: Engine,
    saver: Saver,
    plan: Plan,
    world: comm.World,
    stop: StopSignals,
    watchdog: Watchdog,
) -> Hooks:
    config = plan.config
    checkpoints = Path(config.run.folder) / "checkpoints"
    parts = plan.data.validation()
    windows = {part.name: _windows(plan, part.stream) for part in parts}
    # Read at the start: the data may be gone from where it is when the run ends.
    file = plan.data.tokenizer.file
    content = plan.data.tokenizer_path.read_bytes() if world.is_main else None
    tokenizer = TokenizerCopy(file, content) if content is not None else None

    def go_on(share: float) -> None:
        watchdog.at(f"validation, {share:.0%} done")
        stop.check()

    def validate_now() -> dict[str, float]:
        engine.train(False)
        batch_size = config.evaluation.batch_size or config.train.micro_batch_size
        with explain_out_of_memory(
            lambda: "in validation", world, to_validate(config, plan.dims), checkpoints
        ):
            losses = {
                name: score_windows(
                    engine,
                    split,
                    batch_size=batch_size,
                    world=world,
                    losses=engine.token_losses,
                    report=go_on,
                ).loss
                for name, split in windows.items()
            }
        mean = sum(part.share * losses[part.name] for part in parts)
        each = {f"validation_loss/{name}": loss for name, loss in losses.items()}
        return {"validation_loss": mean} | (each if len(plan.data.parts) > 1 else {})

    def save_now(state: TrainState) -> None:
        values: dict[str, Any] = state.to_json()
        with explain_out_of_memory(
            lambda: f"saving step {state.step}", world, to_build(config, plan.dims), checkpoints
        ):
            saver.save(state.step, values, config.to_yaml(), tokenizer)

    samples = plan.data.samples(config.model.sequence_length, config.seed)

    def documents(batch: int) -> dict[str, list[int]]:
        size = config.train.global_batch_size
        return plan.data.documents(samples, range(batch * size, (batch + 1) * size))

    def following(state: TrainState) -> Iterator[Tensor]:
        return Prefetch(watchdog.over(_batches(plan, world, state)), world.device)

    return Hooks(
        go_back=Rewind(engine, saver, plan, world, following),
        documents=documents,
        stop=stop,
        at=watchdog.at,
        validate=validate_now if parts else None,
        save=save_now,
        saving=saver.poll,
        saved=saver.finish,
        fluctuation=_fluctuation(engine, plan, world) if config.log.fluctuation else None,
    )


def _fluctuation(engine: Engine, plan: Plan, world: comm.World) -> Callable[[], dict[str, float]]:
    config, length = plan.config, plan.config.model.sequence_length
    end = plan.data.tokenizer.end_of_text_id
    parts = [EvaluationWindows(part.stream, length, length, end) for part in plan.data.validation()]
    log = FluctuationLog(
        engine,
        SpreadWindows(parts, config.log.fluctuation_tokens),
        config.evaluation.batch_size or config.train.micro_batch_size,
    )
    checkpoints = Path(config.run.folder) / "checkpoints"

    def measure() -> dict[str, float]:
        with explain_out_of_memory(
            lambda: "comparing routing", world, to_validate(config, plan.dims), checkpoints
        ):
            return log()

    return measure


def _windows(plan: Plan, split: TokenStream) -> EvaluationWindows:
    config = plan.config
    return EvaluationWindows(
        split,
        config.model.sequence_length,
        config.evaluation.stride or config.model.sequence_length,
        plan.data.tokenizer.end_of_text_id,
        max_windows=config.evaluation.max_windows,
    )
