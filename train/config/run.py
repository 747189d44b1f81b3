"""The configuration of a run: the sections of all folders in one tree.

    defaults in the classes  <  the YAML file  <  dotted overrides: `train.steps=100`

Every key is known, typed and checked before anything is allocated. Rules between sections are in
`rules.py`. Configurations shipped with Polyad are found by name: gpt2/124m.
"""

import copy
import difflib
import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError

from polyad.data.config import DataConfig, DataSettings
from polyad.data.errors import prefixed
from polyad.model.build import MODELS
from polyad.model.config import Config, dump_yaml, with_new_names
from polyad.model.lora import AdaptConfig
from polyad.model.settings import ModelSettings
from polyad.parallel import foreign as foreign  # adds a kind of model
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.config import CheckpointConfig, ParallelConfig
from polyad.parallel.weights import open_weights
from polyad.train.config.text import apply_override, describe, parse_yaml
from polyad.train.errors import ConfigError, shown
from polyad.train.guard.run_folder import RunFolderConfig
from polyad.train.guard.spikes import MonitorConfig
from polyad.train.loop.losses import LossConfig
from polyad.train.loop.metrics import LogConfig
from polyad.train.loop.optimizer import OptimizerConfig, ScheduleConfig, TrainConfig
from polyad.train.tasks.distillation import DistillConfig
from polyad.train.tasks.registry import TASKS
from polyad.train.tasks.task import EvaluationConfig, Sections

# The folder `configs` of a clone or an installed package.
SHIPPED = Path(__file__).resolve().parents[2] / "configs"


def shipped_configs() -> list[Path]:
    """Files of the runs and studies that come with Polyad."""
    files = SHIPPED.rglob("*.yaml")
    return sorted(file for file in files if file.parent.name != "launch")


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, which keeps its configuration."""
    return (path / "config.yaml").is_file() and (path / "environment.json").is_file()


def find_config(path: Path) -> Path:
    """Finds the configuration file that a user names.

    Args:
        path: a file, the name of a shipped configuration: `gpt2/124m`, its path in the repository,
            `configs/gpt2/124m.yaml`, or the folder of a run.

    Returns:
        The file; the path itself if neither exists.
    """
    if is_run(path):
        return path / "config.yaml"
    if path.exists() or path.is_absolute() or ".." in path.parts:
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    shipped = SHIPPED / f"{name}.yaml"
    return shipped if shipped.is_file() else path


def near_config(path: Path) -> str:
    """The end of an error about a missing file: the nearest shipped configuration."""
    names = [file.relative_to(SHIPPED).with_suffix("").as_posix() for file in shipped_configs()]
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; the nearest is {close[0]}" if close else ""


def _of_kind(default: str, classes: Sequence[type[Config]]) -> Any:
    """The type of a section whose `kind` selects its class, with a default kind."""

    def with_kind(value: object) -> object:
        return {"kind": default} | value if isinstance(value, dict) else value

    union = functools.reduce(operator.or_, classes)
    return Annotated[union, Field(discriminator="kind"), BeforeValidator(with_kind)]


if TYPE_CHECKING:
    ModelSection: TypeAlias = ModelSettings
    DataSection: TypeAlias = DataSettings
else:
    ModelSection = _of_kind("gpt2", [kind.config for kind in MODELS.values()])
    DataSection = _of_kind("text", [task.data_settings for task in TASKS.values()])


class RunConfig(Config):
    """The complete configuration of a run."""

    seed: Annotated[int, Field(ge=0)] = 1234
    """Random seed for the initial weights, the order of the data, and dropout."""
    run: RunFolderConfig
    model: ModelSection
    data: DataSection
    train: TrainConfig
    adapt: AdaptConfig = AdaptConfig()
    distill: DistillConfig = DistillConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    monitor: MonitorConfig = MonitorConfig()
    log: LogConfig = LogConfig()

    def for_task(self) -> Sections:
        """The sections with which the task is opened."""
        return Sections(
            data=self.data,
            model=self.model,
            evaluation=self.evaluation,
            seed=self.seed,
            init_from=self.checkpoint.init_from,
        )

    def to_yaml(self) -> str:
        """The resolved tree, with every default written out."""
        return dump_yaml(self.model_dump(mode="json"))


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
        path: a YAML file, the name of a shipped one, or the folder of a run; see `find_config`.
        overrides: `dotted.key=value`, the value in YAML.

    Returns:
        The tree, each section checked on its own; `validate` checks them together.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    tree = read_tree(path)
    if {"base", "variants"} <= tree.keys():
        raise ConfigError(f"{path}: is the file of a study; `polyad study {path}` runs it")
    return build_config(tree, overrides, origin=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, origin: str) -> RunConfig:
    """Loads a configuration like `load_config`, from the text of a file called `origin`."""
    return build_config(_tree(text, origin), overrides, origin=origin)


def config_of_checkpoint(checkpoint: Checkpoint) -> RunConfig:
    """Returns the configuration that a checkpoint was written with."""
    origin = f"{checkpoint.folder / 'config.yaml'}"
    return build_config(with_new_names(_tree(checkpoint.config_yaml, origin)), origin=origin)


def read_tree(path: Path) -> dict[str, Any]:
    """Reads the keys of a YAML file, as returned by `parse_yaml`.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        text = find_config(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            reason = f"there is no such file{near_config(path)}"
        raise ConfigError(f"{path}: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tree = _tree(text, str(path))
    if is_run(find_config(path).parent):
        tree = with_new_names(tree)
    if is_run(path):  # it may have been moved
        tree["run"] = {**tree["run"], "folder": str(path if path.name else path.absolute())}
    return tree


def _tree(text: str, origin: str) -> dict[str, Any]:
    tree = parse_yaml(text, origin) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: {shown(tree)} is not allowed: a mapping of keys is needed")
    return tree


def build_config(tree: dict[str, Any], overrides: Sequence[str] = (), *, origin: str) -> RunConfig:
    """Loads a configuration like `load_config`, from keys, which are not modified."""
    tree = copy.deepcopy(tree)
    first = [each for each in overrides if each.startswith("model.from=")]
    for override in first:
        apply_override(tree, override)
    if isinstance(tree.get("model"), dict) and "from" in tree["model"]:
        _take_model(tree)
    for override in overrides:
        if override not in first:
            apply_override(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error, RunConfig)}") from None


KEPT = ("sequence_length", "dropout", "recompute", "compile")
"""Keys of a model that say how it is trained."""
FROM = "model.from"
FROM_IN_WORDS = f"""{FROM}
  A folder of weights, a checkpoint or a run: the model is the one in it, and
  checkpoint.init_from is that folder. Of the section `model` {", ".join(KEPT)}
  stay as they are written."""


def _take_model(tree: dict[str, Any]) -> None:
    """Replaces `model.from`, a folder of weights, by the model in it, and begins from its weights.

    Raises:
        ConfigError: the folder cannot be opened.
    """
    own, folder = tree["model"], str(tree["model"]["from"])
    with prefixed(FROM, ConfigError):
        section = open_weights(Path(folder)).model_config().model_dump(mode="json")
    kept = {key: own[key] for key in KEPT if key in own and key in section}
    lengths = [each["sequence_length"] for each in (section, kept) if "sequence_length" in each]
    if lengths:
        kept["sequence_length"] = min(lengths)
    tree["model"] = section | kept
    tree["checkpoint"] = {**tree.get("checkpoint", {}), "init_from": folder}


def data_overrides(config: RunConfig, data: str) -> tuple[str, ...]:
    """Returns `key=value` overrides that replace a run's data by a folder.

    Args:
        config: the run's configuration.
        data: the folder.

    Raises:
        ConfigError: data of this kind does not come from a folder.
    """
    if "path" not in type(config.data).model_fields:
        raise ConfigError(f"--data: is not allowed with data.kind: {config.data.kind}")
    instead = ("data.mixture=null",) if isinstance(config.data, DataConfig) else ()
    return (f"data.path={json.dumps(data)}", *instead)
