"""The configuration of a run: every room's part in one tree.

    defaults in the classes  <  the YAML file  <  dotted overrides: `train.steps=100`

Every key is known, typed and checked before anything is allocated. Rules that cross sections stand
in `validate`.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from data.config import DataConfig
from model.build import ModelConfig
from model.config import Config
from model.smoe.config import SparseMoEConfig
from parallel.config import CheckpointConfig, ParallelConfig
from parallel.dims import Dims
from parallel.zero import Precision
from train.errors import ConfigError
from train.loss import LossConfig
from train.metrics import LogConfig
from train.monitor import MonitorConfig
from train.optimizer import OptimizerConfig
from train.schedule import ScheduleConfig
from train.scoring import EvaluationConfig

Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class RunFolderConfig(Config):
    """Where a run lives."""

    folder: str
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
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


# Keys, or whole sections, that a run may change when it goes on. All others make it another run.
MAY_CHANGE_ON_RESUME = (
    # What the data is, by path or mixture, its fingerprint says.
    "run", "data.path", "data.mixture", "data.num_workers", "train.steps",
    "train.micro_batch_size", "train.max_skipped_steps", "optimizer.learning_rate", "schedule",
    "parallel", "checkpoint", "evaluation", "monitor", "log", "model.recompute",
    "model.compile",
)  # fmt: skip


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 6e-4 is a number, and a key stands once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


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
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_config(text, overrides, origin=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, origin: str) -> RunConfig:
    """As `load_config`, from the text of a file called `origin`."""
    tree = parse_yaml(text, origin)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: holds {type(tree).__name__}, a mapping of keys is needed")
    for override in overrides:
        apply_override(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {describe(error)}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Sets one `dotted.key=value` in a tree, in place.

    Raises:
        ConfigError: it is no such thing.
    """
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(f"{override!r}: overrides are written key=value, as in train.steps=100")
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        if inner is None:
            inner = tree[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {section} is a value and has no keys below it")
        tree = inner
    tree[last] = parse_yaml(value, override)


def parse_yaml(text: str, origin: str) -> Any:
    """Reads YAML as people write it.

    Args:
        text: of a file, or of one value.
        origin: what it is called in an error.

    Raises:
        ConfigError: it is not YAML, or a key stands twice.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{origin}: is nested too deeply") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{origin}: is not YAML: {reason}") from None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def describe(error: ValidationError, tree: type[BaseModel] = RunConfig) -> str:
    """All faults in one line, the first few in full.

    Args:
        error: what pydantic found.
        tree: the configuration class whose keys are known.
    """
    known = set(keys(tree))
    faults = [_fault(fault, known) for fault in error.errors(include_url=False)]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more


def _fault(fault: Any, known: set[str]) -> str:
    # A union puts the member's kind into the location: model.feed_forward.dense.hidden_size.
    parts = [str(part) for part in fault["loc"]]
    kind: str = fault["type"]
    message: str = fault["msg"].removeprefix("Value error, ")
    if not parts:
        return message  # a rule of the whole tree names its keys itself
    *sections, last = parts
    without_kind = [sections[:i] + sections[i + 1 :] for i in range(len(sections))]
    candidates = [s for s in (sections, *without_kind) if not s or _without_index(s) in known]
    key = ".".join([*(candidates[0] if candidates else sections), last])
    if kind == "extra_forbidden" and key in known:  # of another member of the union
        section, chosen = ".".join(sections[:-1]), sections[-1]
        return f"{key}: is not a key of {section}.kind: {chosen}, but of another kind"
    if kind == "extra_forbidden":
        section = _without_index(key.split(".")[:-1])
        siblings = [k for k in known if k.rpartition(".")[0] == section]
        close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
        close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        if close:
            return f"unknown key {key}; the nearest is {close[0]}"
        return f"unknown key {key}; there are {', '.join(sorted(siblings))}"
    if kind == "union_tag_invalid":
        chooser = fault["ctx"]["discriminator"].strip("'")
        tag = fault["ctx"]["tag"]
        *others, other = fault["ctx"]["expected_tags"].replace("'", "").split(", ")
        allowed = " or ".join([", ".join(others), other] if others else [other])
        return f"{key}.{chooser}: {tag!r} is not allowed: {allowed}"
    if kind == "missing":
        return f"{key}: is missing"
    if kind in {"model_type", "model_attributes_type"}:
        return f"{key}: {fault['input']!r} is not allowed: a section of keys is needed"
    if kind == "value_error" and re.match(r"[\w.]+: ", message):
        return message  # the rule names its keys itself
    return f"{key}: {fault['input']!r} is not allowed: {message[0].lower()}{message[1:]}"


def _without_index(sections: list[str]) -> str:
    """The dotted key, without the place in a list: data.mixture.0 is data.mixture."""
    return ".".join(section for section in sections if not section.isdigit())


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a configuration class, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for member in config_classes(field.annotation):
            yield from keys(member, f"{prefix}{name}.")


def config_classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes that a key can hold: none, one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from config_classes(argument)


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = [p.name for p in path.parent.iterdir() if p.suffix in {".yaml", ".yml"}]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; the nearest is {path.parent / close[0]}" if close else ""


def validate(config: RunConfig, world_size: int) -> Dims:
    """Checks what one section cannot know of another.

    Args:
        config: the tree.
        world_size: processes that will run it.

    Returns:
        The layout.

    Raises:
        ConfigError: two keys contradict each other.
        LayoutError: degrees or batch sizes do not fit the processes.
    """
    dims = Dims(
        world_size=world_size,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel_size=config.parallel.expert_parallel_size,
    )
    check_tensor_parallel(config.model, dims.tensor_parallel_size)
    check_experts(config, dims.expert_parallel_size)
    check_fluctuation(config)
    train, schedule = config.train, config.schedule
    dims.accumulation_steps(train.global_batch_size, train.micro_batch_size)
    decay = schedule.decay_steps or train.steps
    if schedule.warmup_steps > decay:
        raise ConfigError(
            f"schedule.warmup_steps: {schedule.warmup_steps} is more than the {decay} steps that "
            f"the schedule has"
        )
    stride = config.evaluation.stride
    if stride is not None and stride > config.model.sequence_length:
        raise ConfigError(
            f"evaluation.stride: {stride} is more than model.sequence_length: "
            f"{config.model.sequence_length}, so tokens would be left out"
        )
    if config.model.compile and config.parallel.zero_stage == 3:
        raise ConfigError(
            "model.compile: true is not allowed with parallel.zero_stage: 3: DeepSpeed's "
            "hooks on every module send the compiler back to eager code; use stage 0, 1 or 2"
        )
    return dims


def check_tensor_parallel(model: ModelConfig, size: int) -> None:
    """Checks that what tensor parallelism cuts has equal parts.

    Raises:
        ConfigError: it does not divide heads, width, inner width or the ranks of factors.
    """
    cuts = [{"model.num_heads": model.num_heads}, {"model.hidden_size": model.hidden_size}]
    cuts += model.known_feed_forward().cut_sizes(model.hidden_size)
    for choices in cuts:
        if all(value % size for value in choices.values()):
            sizes = " nor ".join(f"{key}: {value}" for key, value in choices.items())
            raise ConfigError(f"parallel.tensor_parallel_size: {size} does not divide {sizes}")


def check_experts(config: RunConfig, size: int) -> None:
    """Checks that experts can be spread over processes.

    Raises:
        ConfigError: there are none, they have no equal parts, or ZeRO cannot hold them.
    """
    feed_forward, stage = config.model.feed_forward, config.parallel.zero_stage
    if not isinstance(feed_forward, SparseMoEConfig):
        if size > 1:
            raise ConfigError(
                f"parallel.expert_parallel_size: {size} is not allowed with "
                f"model.feed_forward.kind: {feed_forward.kind}, which has no whole experts to "
                f"spread"
            )
        return
    if feed_forward.num_experts % size:
        raise ConfigError(
            f"parallel.expert_parallel_size: {size} does not divide "
            f"model.feed_forward.num_experts: {feed_forward.num_experts}"
        )
    if stage == 3:
        raise ConfigError(
            "parallel.zero_stage: 3 is not allowed with model.feed_forward.kind: smoe: DeepSpeed "
            "does not partition experts that other processes do not have; use stage 0, 1 or 2"
        )


def check_fluctuation(config: RunConfig) -> None:
    """Checks that there are experts and checkpoints whose routing can be compared.

    Raises:
        ConfigError: there are not.
    """
    if not config.log.fluctuation:
        return
    kind = config.model.feed_forward.kind
    if kind == "dense":
        raise ConfigError(
            "log.fluctuation: true is not allowed with model.feed_forward.kind: dense, which has "
            "no experts that tokens could change"
        )
    if config.checkpoint.every == 0:
        raise ConfigError(
            "log.fluctuation: true is not allowed with checkpoint.every: 0: the one checkpoint at "
            "the end has none before it to be compared with; take 1 or more"
        )


def refuse_changes(saved: RunConfig, now: RunConfig, origin: Path) -> None:
    """Checks that a configuration goes on with the run that another one began.

    Raises:
        ConfigError: keys differ that define the run; they are named with both values.
    """
    before, after = flatten(saved.model_dump(mode="json")), flatten(now.model_dump(mode="json"))
    changed = [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _may_change(key)
    ]
    if changed:
        raise ConfigError(
            f"{origin}: holds another run: {'; '.join(changed[:3])}"
            + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            + ". Take another run.folder, or change the keys back"
        )


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE_ON_RESUME)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
