"""What a run will do, checked before a process group exists or memory is taken."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.text.mixture import TrainingData
from model.build import build_model
from parallel.checkpoint.checkpoint import Checkpoint
from parallel.checkpoint.verification import newest_that_opens
from parallel.dims import Dims
from parallel.huggingface import HuggingFaceWeights
from parallel.weights import Weights, open_weights
from train.config.environment import check_compiler
from train.config.resolve import check_tokenizer, data_named, resolve, tokenizer_of
from train.config.rules import refuse_changes, validate
from train.config.run import RunConfig, load_config, parse_config
from train.errors import ConfigError
from train.guard.room import check_room
from train.guard.run_folder import LOCK_FILE, check_place
from train.loop.optimizer import state_tensors

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
    return plan_of(open_inputs(path, overrides, world_size))


def plan_of(inputs: Inputs) -> Plan:
    """As `plan_run`, of what `open_inputs` gave."""
    config, data = inputs.config, inputs.data
    model = build_model(config.model)
    resume = find_resume(config, data)
    init = None
    if resume is not None:
        check_resume(config, resume)
    elif config.checkpoint.init_from is not None:
        init = _open_init(config, data)
    check_room(config, model, resume)
    return Plan(config=config, dims=inputs.dims, data=data, resume=resume, init=init)


def check_resume(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Whether a run finds in a checkpoint all that it needs to go on.

    Raises:
        CheckpointError: the checkpoint is of another model, or lacks something.
    """
    checkpoint.check_model(build_model(config.model))
    checkpoint.check_resume(state_tensors(config.optimizer))


def _open_init(config: RunConfig, data: TrainingData) -> Weights:
    """What a new run takes its weights from, if it is of this model and knows these token ids."""
    weights = open_weights(Path(config.checkpoint.init_from or ""))
    if isinstance(weights, HuggingFaceWeights):
        weights.check_config(config.model)
    else:
        weights.check_model(build_model(config.model))
    if isinstance(weights, Checkpoint):
        fingerprint = weights.state.tokenizer_fingerprint
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
    if check_place(folder, "run.folder") <= {LOCK_FILE, LAUNCH_FOLDER}:
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
    if checkpoint.state.data_fingerprint != data.fingerprint:
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
