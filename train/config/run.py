"""The configuration of a run: every room's part in one tree.

    defaults in the classes  <  the YAML file  <  dotted overrides: `train.steps=100`

Every key is known, typed and checked before anything is allocated. Rules that cross sections stand
in `config_rules.py`.
"""

import copy
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from data.config import DataConfig
from data.errors import check_path
from model.build import ModelConfig
from model.config import Config
from model.config_yaml import dump
from parallel.config import CheckpointConfig, ParallelConfig
from parallel.zero import Precision
from train.config.faults import describe
from train.config.text import apply_override, parse_yaml, settle
from train.errors import ConfigError
from train.guard.monitor import MonitorConfig
from train.loop.metrics import LogConfig
from train.loop.optimizer import OptimizerConfig
from train.loop.schedule import ScheduleConfig
from train.tasks.loss import LossConfig
from train.tasks.scoring import EvaluationConfig

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class RunFolderConfig(Config):
    """Where a run lives."""

    folder: Annotated[str, AfterValidator(check_path)]
    """Holds config.yaml, metrics.jsonl, environment.json, tensorboard/ and checkpoints/."""


class TrainConfig(Config):
    """How much is trained on, and in which pieces."""

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Count
    """Samples in an optimizer step, over all processes."""
    micro_batch_size: Count
    """Samples in one forward pass of one process; the rest is accumulated."""
    precision: Precision = "fp32"
    """Of weights and activations in forward and backward; master weights are always fp32."""
    tf32: bool = False
    """Whether a GPU may round the factors of fp32 matrix products to TF32 (10 bits of mantissa
    instead of 23), which is several times as fast. No by default: fp32 is for comparing with other
    layouts and machines, bf16 for speed. Nothing changes in bf16, or on a CPU."""
    max_skipped_steps: Count = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""


class RunConfig(Config):
    """Everything that defines a run."""

    seed: Annotated[int, Field(ge=0)] = 1234
    """Of initial weights, the order of the data, and dropout."""
    run: RunFolderConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitor: MonitorConfig = MonitorConfig()
    log: LogConfig = LogConfig()

    def to_yaml(self) -> str:
        """The resolved tree, with every default written out."""
        return dump(self.model_dump(mode="json"))


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
        path: a YAML file.
        overrides: `dotted.key=value`, the value in YAML.

    Returns:
        The tree, each section checked on its own; `validate` checks them together.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    return config_of(read_tree(path), overrides, origin=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, origin: str) -> RunConfig:
    """As `load_config`, from the text of a file called `origin`."""
    return config_of(_tree(text, origin), overrides, origin=origin)


def read_tree(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, as `parse_yaml` gives them.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near_file(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return _tree(text, str(path))


def _tree(text: str, origin: str) -> dict[str, Any]:
    tree = parse_yaml(text, origin)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else "a value"
        raise ConfigError(f"{origin}: holds {kind}, a mapping of keys is needed")
    return tree


def config_of(tree: dict[str, Any], overrides: Sequence[str] = (), *, origin: str) -> RunConfig:
    """As `load_config`, from the keys of a file called `origin`, which stay as they are."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        apply_override(tree, override)
    try:
        return RunConfig.model_validate(settle(tree, RunConfig))
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error, RunConfig)}") from None


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.iterdir() if p.suffix in {".yaml", ".yml"}]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; the nearest is {path.parent / close[0]}" if close else ""
