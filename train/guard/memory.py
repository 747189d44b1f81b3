"""Out of memory: one line that says what was asked for, what is in use, and which keys to lower."""

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from parallel import comm
from parallel.checkpoint.commit import complete_checkpoints
from parallel.dims import Dims, LayoutError
from train.config.rules import validate
from train.config.run import RunConfig
from train.errors import ConfigError, RunError

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ASKED = re.compile(rf"allocate (?P<size>[\d.]+) (?P<unit>{'|'.join(UNITS)})", re.IGNORECASE)
"""In the words of torch's two allocators and of numpy: Tried to allocate 2.00 GiB."""
MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "Cannot allocate memory")
"""What a RuntimeError says that is really one of memory: of torch on a CPU, CUDA and cuBLAS."""


@contextmanager
def explain_out_of_memory(
    doing: Callable[[], str],
    world: comm.World,
    keys: Sequence[str],
    checkpoints: Path | None = None,
) -> Iterator[None]:
    """Turns an error of memory into one line; every other error passes as it is.

    The process then ends, and its launcher ends the ones that wait for it.

    Args:
        doing: says when it happened, as in "in step 3".
        world: this process.
        keys: what can be changed, the first one first: `to_train` and the like.
        checkpoints: the folder that a run saves to.

    Raises:
        RunError: the line.
    """
    try:
        yield
    except RunError:
        raise  # an inner one, which knew better what was being done
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        line = _explanation(error, doing(), world, keys, checkpoints)
        raise RunError(line) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is one of memory, also where a compiler has wrapped it."""
    while not isinstance(error, MemoryError | torch.OutOfMemoryError):
        text = str(error)
        if isinstance(error, RuntimeError | OSError) and any(part in text for part in MESSAGES):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def _explanation(
    error: Exception,
    doing: str,
    world: comm.World,
    keys: Sequence[str],
    checkpoints: Path | None,
) -> str:
    match = ASKED.search(str(error))
    asked = ""
    if match:
        units = {name.lower(): size for name, size in UNITS.items()}
        size = float(match["size"]) * units[match["unit"].lower()]
        asked = f"{_size(size)} more were asked for; "
    advice = ", then ".join(keys) or (
        "no key of this layout: start more processes, or take a smaller model (model.num_layers, "
        "model.hidden_size)"
    )
    line = (
        f"out of memory {doing}, on rank {world.rank} of {world.size}: {asked}"
        f"{_in_use(world.device)}; change {advice}"
    )
    if checkpoints is None:
        return line
    saved = complete_checkpoints(checkpoints)
    step = int(saved[-1].name.removeprefix("step-")) if saved else None
    last = (
        "there is no checkpoint yet" if step is None else f"the last checkpoint is of step {step}"
    )
    return f"{line}; {last}"


def _in_use(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"tensors hold {_size(held)}, {_size(reserved)} are reserved for them, and "
            f"{_size(free)} of the {_size(total)} of {device} are free"
        )
    import psutil  # here alone: the bench's processes time their imports

    process, machine = psutil.Process().memory_info(), psutil.virtual_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = "" if limit == resource.RLIM_INFINITY else (
        f" ({_size(process.vms)} of the {_size(limit)} of addresses it may have)"
    )  # fmt: skip
    return (
        f"the process holds {_size(process.rss)}{limited}, and {_size(machine.available)} of the "
        f"machine's {_size(machine.total)} are free"
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def to_train(config: RunConfig, dims: Dims) -> list[str]:
    """Keys that make a training step smaller, what costs least speed first.

    Each of them alone is a configuration that starts, and goes on with the same run.

    Args:
        config: the run's.
        dims: its layout.

    Returns:
        `key=value (now value)`, as it is given on a command line.
    """
    micro = range(config.train.micro_batch_size - 1, 0, -1)
    return [
        *_first_valid(config, dims, "train.micro_batch_size", micro),
        *_first_valid(config, dims, "model.recompute", ["block"]),
        *to_build(config, dims),
    ]


def to_build(config: RunConfig, dims: Dims) -> list[str]:
    """As `to_train`, of weights and optimizer alone: keys that spread them over processes."""
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
    """As `to_train`, of validation between steps."""
    return [*_smaller_evaluation_batch(config), *to_build(config, dims)]


def to_evaluate(config: RunConfig) -> list[str]:
    """As `to_train`, of `polyad evaluate`, which holds the whole model in every process."""
    half = ["train.precision=bf16 (now fp32)"] if config.train.precision == "fp32" else []
    return [*_smaller_evaluation_batch(config), *half]


def _smaller_evaluation_batch(config: RunConfig) -> list[str]:
    now = config.evaluation.batch_size or config.train.micro_batch_size
    return [f"evaluation.batch_size={now // 2} (now {now})"] if now > 1 else []


def _first_valid(config: RunConfig, dims: Dims, key: str, values: Sequence[int | str]) -> list[str]:
    """The first of the values that the run's own rules allow, if it is another than now."""
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
