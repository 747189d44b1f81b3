"""Keys that reduce the memory of a run, those that cost the least speed first."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from polyad.parallel import comm
from polyad.parallel.dims import Dims, LayoutError
from polyad.train.config.rules import validate
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.guard.memory import RunMemory


def memory_of(config: RunConfig, dims: Dims, world: comm.World) -> RunMemory:
    """Advice for a run that is out of memory."""
    return RunMemory(
        world=world,
        checkpoints=Path(config.run.folder) / "checkpoints",
        smaller={
            "build": partial(to_build, config, dims),
            "train": partial(to_train, config, dims),
            "validate": partial(to_validate, config, dims),
        },
    )


def to_train(config: RunConfig, dims: Dims) -> list[str]:
    """Returns keys that reduce the memory of a training step, least loss of speed first.

    Each of them alone is a valid configuration that continues the same run.

    Args:
        config: the run's configuration.
        dims: its layout.

    Returns:
        `key=value (now value)`, as on a command line.
    """
    micro = range(config.train.micro_batch_size - 1, 0, -1)
    return [
        *_first_valid(config, dims, "train.micro_batch_size", micro),
        *_first_valid(config, dims, "model.recompute", ["block"]),
        *to_build(config, dims),
    ]


def to_build(config: RunConfig, dims: Dims) -> list[str]:
    """Keys that reduce the memory of weights and optimizer, in the form of `to_train`."""
    stages: range = range(0)
    if dims.data_parallel_size > 1:
        stages = range(config.parallel.zero_stage + 1, 4)
    size = dims.tensor_parallel_size
    degrees = range(2 * size, dims.world_size + 1, size)
    spread = range(2 * dims.expert_parallel_size, dims.data_parallel_size + 1)
    return [
        *_first_valid(config, dims, "parallel.zero_stage", stages),
        *_first_valid(config, dims, "parallel.expert_parallel_size", spread),
        *_first_valid(config, dims, "parallel.tensor_parallel_size", degrees),
    ]


def to_validate(config: RunConfig, dims: Dims) -> list[str]:
    """Keys that reduce the memory of validation, in the form of `to_train`."""
    return [*_smaller_evaluation_batch(config), *to_build(config, dims)]


def to_evaluate(config: RunConfig) -> list[str]:
    """Keys that reduce the memory of `polyad evaluate`, in the form of `to_train`."""
    half = ["train.precision=bf16 (now fp32)"] if config.train.precision == "fp32" else []
    return [*_smaller_evaluation_batch(config), *half]


def _smaller_evaluation_batch(config: RunConfig) -> list[str]:
    now = config.evaluation.batch_size or config.train.micro_batch_size
    return [f"evaluation.batch_size={now // 2} (now {now})"] if now > 1 else []


def _first_valid(config: RunConfig, dims: Dims, key: str, values: Sequence[int | str]) -> list[str]:
    """The first value that is valid for the run, unless it is the current one."""
    section, name = key.split(".")
    part = getattr(config, section)
    now = getattr(part, name)
    for value in values:
        changed = part.model_copy(update={name: value})
        try:
            validate(config.model_copy(update={section: changed}), dims.world_size)
        except (ConfigError, LayoutError):
            continue
        return [f"{key}={value} (now {now})"] if value != now else []
    return []
