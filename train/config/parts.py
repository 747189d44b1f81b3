"""From a plan to the parts of a run: batches, engine, checkpoints, metrics."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyad.data.files import write_whole
from polyad.data.sampler import micro_batches
from polyad.parallel import comm
from polyad.parallel.checkpoint.finding import newest_verified
from polyad.parallel.checkpoint.format import CONFIG_FILE
from polyad.parallel.checkpoint.keeping import Retention, complete_checkpoints, remove_leftovers
from polyad.parallel.checkpoint.saving import Saver
from polyad.parallel.parallelize import parallelize
from polyad.parallel.zero import Engine
from polyad.train.config.adaptation import begins_anew, model_of, source_of
from polyad.train.config.environment import write_environment
from polyad.train.config.plan import Plan, check_resume
from polyad.train.config.run import RunConfig
from polyad.train.loop.loop import LoopConfig
from polyad.train.loop.metrics import Metrics
from polyad.train.loop.optimizer import build_optimizer
from polyad.train.loop.startup import Startup
from polyad.train.state import TrainState
from polyad.train.tasks.cross_entropy import cross_entropy


def with_verified(plan: Plan) -> Plan:
    """The plan with a checkpoint whose every byte was verified: the newest one that is good."""
    resume = newest_verified(plan.resume, plan.checkpoints)
    if resume is not None and (plan.resume is None or resume.folder != plan.resume.folder):
        check_resume(plan.config, resume)
    return replace(plan, resume=resume)


def what_is_kept(config: RunConfig) -> str:
    """Where a run that was interrupted will go on."""
    found = complete_checkpoints(Path(config.run.folder) / "checkpoints")
    if not found:
        return "no checkpoint was written yet; the same command begins at step 0"
    return f"the same command goes on from {found[-1]}"


def batches_of(plan: Plan, world: comm.World, state: TrainState) -> Iterator[Any]:
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


def build_engine(plan: Plan, world: comm.World) -> Engine:
    """The model in training over all processes, with the weights that the run starts from."""
    config = plan.config
    anew = () if plan.init is None else begins_anew(plan.task, plan.init, config.model)
    return parallelize(
        model_of(config),
        plan.dims,
        config.parallel,
        world=world,
        make_optimizer=lambda parameters: build_optimizer(config.optimizer, parameters),
        precision=config.train.precision,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        clip_grad_norm=config.optimizer.clip_grad_norm,
        source=source_of(config, plan.resume, plan.init, anew),
        cross_entropy=cross_entropy,
        compiled=config.model.compile,
        average_decay=config.train.ema,
    )


def saver_of(engine: Engine, config: RunConfig) -> Saver:
    """Writes the checkpoints of a run."""
    wanted = config.checkpoint
    return Saver(
        engine,
        Path(config.run.folder) / "checkpoints",
        keep=Retention(wanted.keep_last, wanted.keep_every),
        asynchronous=wanted.asynchronous,
    )


def open_run_folder(
    plan: Plan, state: TrainState, world: comm.World, startup: Startup
) -> Metrics | None:
    """Says in the run's folder what runs there; gives the main process its records."""
    if not world.is_main:
        return None
    plan.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(plan.checkpoints)
    write_whole(plan.folder / CONFIG_FILE, plan.config.to_yaml())
    write_environment(plan.folder, world.size)
    done = state.step - (state.unfinished is not None)  # that step's record is written anew
    return Metrics(
        plan.folder,
        plan.config.log,
        done,
        plan.config.train.steps,
        startup,
        unit=plan.task.unit,
        validation_score=plan.task.validation_score,
        about=plan.config.model_dump(mode="json"),
        nodes=comm.environment_nodes(),
    )


def loop_config(config: RunConfig) -> LoopConfig:
    """The sections that the loop reads."""
    return LoopConfig(
        folder=Path(config.run.folder),
        train=config.train,
        optimizer=config.optimizer,
        schedule=config.schedule,
        loss=config.loss,
        monitor=config.monitor,
        log=config.log,
        validate_every=config.evaluation.every,
        patience=config.evaluation.patience,
        keep_best=config.checkpoint.keep_best,
        save_every=config.checkpoint.every,
    )
