"""`polyad train`: wires a run together, in the order of the data's way. Nothing else."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from data.dataset import TokenStream
from data.mixture import TrainingData
from data.sampler import micro_batches
from data.windows import EvaluationWindows, SpreadWindows
from model.build import build_model
from model.gpt2 import flops_per_token
from parallel import comm
from parallel.checkpoint import Checkpoint, WeightsOnly
from parallel.checkpoint_writer import TokenizerCopy
from parallel.commit import Retention, complete_checkpoints, remove_leftovers
from parallel.dims import Dims
from parallel.fragments import Source
from parallel.huggingface import HuggingFaceWeights
from parallel.imports import import_libraries
from parallel.parallelize import InitialWeights, parallelize
from parallel.saver import Saver
from parallel.verification import newest_that_opens, newest_verified
from parallel.weights import Weights, open_weights
from parallel.zero import Engine
from train.config import RunConfig, load_config, parse_config, refuse_changes, validate
from train.device import Prefetch, allow_tf32
from train.environment import check_compiler, write_environment
from train.errors import ConfigError
from train.fluctuation import FluctuationLog
from train.loop import Hooks, train_loop
from train.loss import token_losses
from train.memory import explain_out_of_memory, to_build, to_train, to_validate
from train.metrics import Metrics
from train.optimizer import build_optimizer
from train.resolve import check_tokenizer, data_named, resolve, tokenizer_of
from train.room import check_room
from train.run_folder import LOCK_FILE, RunLock
from train.scoring import score_windows
from train.startup import Startup
from train.state import TrainState

LAUNCH_FOLDER = "launch"
"""In a run's folder: what `polyad launch` writes there, perhaps before the run has begun."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that was checked and can start."""

    config: RunConfig
    """Resolved: nothing is left to the data."""
    dims: Dims
    data: TrainingData
    resume: Checkpoint | None
    """What the run goes on from."""
    init: Weights | None
    """What a new run takes its weights from."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is asked to do, and with which data: both checked, and nothing built."""

    config: RunConfig
    """Resolved."""
    dims: Dims
    data: TrainingData


def open_inputs(path: Path, overrides: Sequence[str], world_size: int) -> Inputs:
    """Reads the configuration and opens the data, which takes no library that is slow to import.

    Args:
        path: the configuration.
        overrides: `key=value`.
        world_size: processes.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    config = load_config(path, overrides)
    dims = validate(config, world_size)
    check_compiler(config)
    data = TrainingData.open(config.data)
    if config.log.fluctuation and not data.validation():
        raise ConfigError(
            f"log.fluctuation: true is not allowed with {data_named(config.data)}, which has no "
            f"validation split to compare routing on"
        )
    config = resolve(config, data.tokenizer.vocab_size)
    data.samples(config.model.sequence_length, config.seed)
    return Inputs(config=config, dims=dims, data=data)


def plan_run(path: Path, overrides: Sequence[str], world_size: int) -> Plan:
    """Everything that can be checked before a process group exists or memory is taken.

    Args:
        path: the configuration.
        overrides: `key=value`.
        world_size: processes.

    Raises:
        ValueError: with an `exit_status` of 2: one line says what is wrong.
    """
    return _plan(open_inputs(path, overrides, world_size))


def _plan(inputs: Inputs) -> Plan:
    config, data = inputs.config, inputs.data
    model = build_model(config.model)
    resume = find_resume(config, data)
    init = None
    if resume is not None:
        resume.check_model(model)
    elif config.checkpoint.init_from is not None:
        init = _open_init(config, data)
    check_room(config, model, resume)
    return Plan(config=config, dims=inputs.dims, data=data, resume=resume, init=init)


def _open_init(config: RunConfig, data: TrainingData) -> Weights:
    """What a new run takes its weights from, if it is of this model and knows these token ids."""
    weights = open_weights(Path(config.checkpoint.init_from or ""))
    if isinstance(weights, HuggingFaceWeights):
        weights.check_config(config.model)
    else:
        weights.check_model(build_model(config.model))
    if isinstance(weights, Checkpoint):
        fingerprint = weights.state["tokenizer_fingerprint"]
    else:
        tokenizer = tokenizer_of(weights)
        fingerprint = tokenizer.fingerprint if tokenizer else None
    check_tokenizer(
        data_named(config.data),
        data.parts[0].data,
        fingerprint,
        "checkpoint.init_from",
        lambda: tokenizer_of(weights),
    )
    return weights


def find_resume(config: RunConfig, data: TrainingData) -> Checkpoint | None:
    """The newest complete checkpoint of the run's folder, if the folder is this run's.

    Raises:
        ConfigError: the folder holds another run, or something that is no run.
    """
    folder = Path(config.run.folder)
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run.folder: {folder}: {nearest} is a file, a folder is needed")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run.folder: {folder}: {nearest} cannot be written to")
    if not folder.exists() or {path.name for path in folder.iterdir()} <= {
        LOCK_FILE,
        LAUNCH_FOLDER,
    }:
        return None
    saved = folder / "config.yaml"
    if not saved.exists():
        raise ConfigError(f"run.folder: {folder} holds files of something that is not a run")
    checkpoint = newest_that_opens(folder / "checkpoints")
    if checkpoint is None:
        refuse_changes(load_config(saved), config, folder)
        return None
    origin = str(checkpoint.folder)
    refuse_changes(parse_config(checkpoint.config_yaml, origin=origin), config, folder)
    if checkpoint.state["data_fingerprint"] != data.fingerprint:
        weights = " or mixes it by other weights" if config.data.mixture else ""
        raise ConfigError(
            f"{data_named(config.data)} holds other data{weights} than {folder} was trained on so "
            "far"
        )
    if checkpoint.training_step > config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} is less than the {checkpoint.training_step} steps "
            f"that {folder} has done; at least as many are allowed"
        )
    return checkpoint


def main(path: Path, overrides: Sequence[str] = ()) -> TrainState:
    """Runs a configuration to its end, from its newest checkpoint if it has one.

    Args:
        path: the configuration.
        overrides: `key=value`.

    Returns:
        Where the run stands at its end.
    """
    startup = Startup()
    startup.lap("imports")  # since the process began
    inputs = open_inputs(path, overrides, comm.environment_world_size())
    startup.lap("data")
    import_libraries()
    startup.lap("imports")
    plan = _plan(inputs)
    config, dims = plan.config, plan.dims
    world = comm.initialize(
        config.parallel.timeout_minutes, dims.tensor_parallel_size, dims.expert_parallel_size
    )
    allow_tf32(config.train.tf32, world.device)
    lock = RunLock(Path(config.run.folder), world)
    checkpoints = Path(config.run.folder) / "checkpoints"
    plan = replace(plan, resume=newest_verified(plan.resume, checkpoints))
    _say_what_is_not_used(plan)
    state = _start_state(plan)
    batches = _batches(plan, world, state)  # before the engine: loader workers start beside it
    with explain_out_of_memory(
        lambda: "building the engine", world, to_build(config, dims), checkpoints
    ):
        engine = _build_engine(plan, world)
        saver = _saver(engine, config)
    _restore_random_numbers(plan, world, state)
    startup.lap("engine")
    metrics = _open_run_folder(config, state, world, startup)
    hooks = _hooks(engine, saver, plan, world)
    if plan.resume is not None and hooks.fluctuation and state.step < config.train.steps:
        hooks.fluctuation()  # the weights are those of the checkpoint that the next one follows
    startup.lap("run_folder")
    explained = explain_out_of_memory(
        lambda: f"in step {state.step + 1}", world, to_train(config, dims), checkpoints
    )
    try:
        batches = itertools.chain(list(itertools.islice(batches, 1)), batches)
        startup.lap("data")
        with explained:
            train_loop(
                engine,
                Prefetch(batches, world.device),
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
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_kept(config)) from None
    finally:
        saver.close()
        if metrics is not None:
            metrics.close()
        lock.release()
    return state


def _say_what_is_not_used(plan: Plan) -> None:
    """One line for who set `checkpoint.init_from` of a run that has a checkpoint by now."""
    start = plan.config.checkpoint.init_from
    if plan.resume is not None and start is not None and int(os.environ.get("RANK", "0")) == 0:
        print(
            f"the run goes on from step {plan.resume.training_step:,} of {plan.config.run.folder}; "
            f"checkpoint.init_from: {start} is for a new run, and not used",
            file=sys.stderr,
            flush=True,
        )


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
    )


def _start_state(plan: Plan) -> TrainState:
    state = TrainState.from_json(plan.resume.state) if plan.resume else TrainState()
    tokenizer = plan.data.tokenizer
    state.data_fingerprint = plan.data.fingerprint
    state.tokenizer_fingerprint = tokenizer.fingerprint
    state.end_of_text = tokenizer.end_of_text
    state.vocab_size = tokenizer.vocab_size
    state.world_size = plan.dims.world_size
    return state


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


def _restore_random_numbers(plan: Plan, world: comm.World, state: TrainState) -> None:
    """Dropout goes on where it was, or starts from (seed, step, rank) where nothing was saved."""
    comm.seed_random(plan.config.seed, state.step, world)
    if plan.resume is not None:
        plan.resume.restore_random_states(world.device)


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
    return Metrics(folder, config.log, state.step, config.train.steps, startup)


def _hooks(engine: Engine, saver: Saver, plan: Plan, world: comm.World) -> Hooks:
    config = plan.config
    checkpoints = Path(config.run.folder) / "checkpoints"
    parts = plan.data.validation()
    windows = {part.name: _windows(plan, part.stream) for part in parts}
    # Read at the start: the data may be gone from where it is when the run ends.
    file = plan.data.tokenizer.file
    content = plan.data.tokenizer_path.read_bytes() if world.is_main else None
    tokenizer = TokenizerCopy(file, content) if content is not None else None

    def validate_now() -> dict[str, float]:
        engine.train(False)
        batch_size = config.evaluation.batch_size or config.train.micro_batch_size
        with explain_out_of_memory(
            lambda: "in validation", world, to_validate(config, plan.dims), checkpoints
        ):
            losses = {
                name: score_windows(
                    engine, split, batch_size=batch_size, world=world, losses=engine.token_losses
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

    return Hooks(
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
