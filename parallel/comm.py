"""The process groups: start, shutdown, and the collectives that the training loop needs; what
Polyad uses of megatron-core, and the interface that DeepSpeed expects of it.
"""

import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from polyad.model.initialization import seeded_generator
from polyad.parallel.config import Dims, LayoutError
from polyad.parallel.host_memory import keep_freed_memory

T = TypeVar("T")
TASKS_OF = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables with the number of tasks that a launcher has started, including this process."""
RECORDED = 2000
"""Number of collectives that PyTorch's flight recorder keeps."""
_BUFFER = "TORCH_FR_BUFFER_SIZE"
if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
    _BUFFER = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # older versions of PyTorch know this name alone
RECORDER = {_BUFFER: f"{RECORDED}", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Variables with which NCCL writes the last collectives of each process when one times out."""
STORE = "POLYAD_STORE"
"""The environment variable with a file in a private folder, through which the processes of one host
find each other. torch unpickles a store's content, and asks nobody for a password."""
LOOPBACK = "127.0.0.1"
MAX_SHOWN = 200
"""Maximum number of characters of a value in a message."""


class DisagreementError(ValueError):
    """Processes with different settings: one line with the setting, the values and the hosts."""

    exit_status = 2


class PeerError(RuntimeError):
    """Another process that did not come, cannot be reached or has failed: one line."""

    exit_status = 1


@dataclass(frozen=True, kw_only=True)
class World(Dims):
    """How the processes are divided, and which of them this one is.

    Ranks that share every layer are consecutive, and so are the data-parallel ranks of those that
    have different experts.
    """

    rank: int
    local_rank: int
    device: torch.device

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.world_size

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's rank among the ranks that share its layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's group among those that see different samples."""
        return self.rank // self.tensor_parallel_size

    @property
    def expert_parallel_rank(self) -> int:
        """This process's rank among the ranks that have different experts."""
        return self.data_parallel_rank % self.expert_parallel_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes shared files."""
        return self.rank == 0


def environment_world_size() -> int:
    """Number of processes that torchrun started, 1 without it; reads only the environment.

    `WORLD_SIZE` alone is enough, since a run may be planned for another number of processes.

    Raises:
        LayoutError: the environment has a rank, but only some of torchrun's other variables.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        value = os.environ.get(name)
        if value is not None and not value.isdecimal():
            raise LayoutError(f"{name}: {value!r} in the environment is not a number")
    if "RANK" in os.environ:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise LayoutError(f"{name}: is missing in the environment, though RANK is there")
    _check_not_apart()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_not_apart() -> None:
    """Refuses processes that do not know of one another: each would train the whole run alone.

    Raises:
        LayoutError: srun or mpirun has started several tasks without torchrun.
    """
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    for name, starter in TASKS_OF.items():
        tasks = os.environ.get(name, "1")
        if tasks.isdecimal() and int(tasks) > 1 and nodes == 1:
            world = os.environ.get("WORLD_SIZE", "1")
            raise LayoutError(
                f"{name}: {starter} has started {tasks} tasks, and this process knows a world of "
                f"{world} on 1 host: each task would train alone. Start them with `polyad launch` "
                f"or torchrun (--nnodes {tasks}), or a single task"
            )


def is_one_host() -> bool:
    """Returns whether all processes are on this host, according to the environment."""
    world = os.environ.get("WORLD_SIZE", "1")
    return STORE in os.environ or world in ("1", os.environ.get("LOCAL_WORLD_SIZE"))


def initialize(
    timeout_minutes: float = 30.0,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    facts: Mapping[str, str] | None = None,
) -> World:
    """Joins the processes that torchrun started, or creates a world of one; may be called again.

    Collectives run over NCCL if there is a GPU, otherwise over gloo.

    Args:
        timeout_minutes: timeout of collectives, and of waiting for the other processes.
        tensor_parallel_size: number of ranks that share every layer.
        expert_parallel_size: number of data-parallel ranks that have different experts.
        facts: settings of this process that must be equal on all; None on all: none.

    Raises:
        LayoutError: the environment names processes that do not exist, or this host has more
            processes than GPUs.
        DisagreementError: on every process, if the facts of one differ.
        PeerError: a process did not come in time, or cannot be reached.
    """
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    if on_gpu and local_rank >= torch.cuda.device_count():
        raise LayoutError(
            f"LOCAL_RANK: {local_rank} in the environment is not allowed: this host has "
            f"{torch.cuda.device_count()} GPUs, for as many processes; with CUDA_VISIBLE_DEVICES= "
            f"they compute on the CPU"
        )
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        keep_freed_memory()
    if dist.is_initialized():
        limit_waiting(timeout_minutes)
    else:
        for name, value in RECORDER.items():
            os.environ.setdefault(name, value)
        _join(device, timeout_minutes)
    if facts is not None and size() > 1:
        agree(facts)
    if tensor_parallel_size > 1:
        join_groups(tensor_parallel_size)
    return World(
        world_size=dist.get_world_size(),
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        rank=dist.get_rank(),
        local_rank=local_rank,
        device=device,
    )


def _join(device: torch.device, timeout_minutes: float) -> None:
    """Creates the process group; until it exists, signals end this process."""
    rank, size = int(os.environ.get("RANK", "0")), environment_world_size()
    if size > 1 and "RANK" not in os.environ:
        raise LayoutError(
            f"WORLD_SIZE: {size} in the environment, but RANK is missing, and this process is "
            f"alone: unset it, or start with `polyad launch` or torchrun"
        )
    timeout = timedelta(minutes=timeout_minutes)
    backend = "nccl" if device.type == "cuda" else "gloo"
    _stay_on_loopback()
    try:
        with _ended_by_signals():
            dist.init_process_group(
                backend,
                store=_store(rank, size, timeout),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
    except (RuntimeError, OSError) as error:
        address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise PeerError(
            f"rank {rank} on {socket.gethostname()} did not find all {size} processes at "
            f"{address}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout_minutes:g} min "
            f"(parallel.timeout_minutes): {str(error).splitlines()[0]}; the output of the others "
            f"says why, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network"
        ) from error


def _stay_on_loopback() -> None:
    """Makes gloo and NCCL listen on loopback, if all processes are on this host.

    An interface that the environment names is not changed.
    """
    if not is_one_host():
        return
    for name, addresses in psutil.net_if_addrs().items():
        if LOOPBACK in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return


def _store(rank: int, size: int, timeout: timedelta) -> Store | None:
    """Returns the store of one host's processes; None: torch's own, on all network interfaces."""
    if size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if STORE in os.environ:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the file outlives a restart
        return PrefixStore(restart, FileStore(os.environ[STORE], size))
    if not is_one_host() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    port = int(os.environ["MASTER_PORT"])
    # torch itself would listen on all interfaces.
    listener = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None
    return TCPStore(LOOPBACK, port, size, rank == 0, timeout, master_listen_fd=listener)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A context in which signals take their default action: while torch waits for the others in
    C++, no handler of Python runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def agree(facts: Mapping[str, str]) -> None:
    """Compares settings of all processes; all call this together.

    Raises:
        DisagreementError: on every process, if those of one differ.
    """
    name = f"{socket.gethostname()} (rank {rank()})"
    if differences := comparison(from_all((name, dict(facts)))):
        others = ", ".join(line.partition(":")[0] for line in differences[1:])
        more = f"; {others} differ too" if others else ""
        raise DisagreementError(f"{differences[0]}; all processes need the same{more}")


def comparison(processes: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Lists the differences between processes, one line per fact.

    Args:
        processes: the name of each process, and its facts.

    Returns:
        Lines such as "train.steps: 6 on a, 9 on b"; empty if all are equal.
    """
    lines = []
    for fact in dict.fromkeys(fact for _, facts in processes for fact in facts):
        holders: dict[str, dict[str, None]] = {}
        for process, facts in processes:
            holders.setdefault(facts.get(fact, "nothing"), {})[process] = None
        if len(holders) > 1:
            shown = (f"{value[:MAX_SHOWN]} on {_some([*of])}" for value, of in holders.items())
            lines.append(f"{fact}: {', '.join(shown)}")
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def limit_waiting(timeout_minutes: float) -> None:
    """Sets the collective timeout of all groups that this process is in.

    DeepSpeed and megatron-core create groups of their own, which have torch's default timeout (10
    minutes on NCCL) rather than that of the world.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), group)


def is_joined() -> bool:
    """Returns whether this process has joined the others."""
    return dist.is_initialized()


@contextmanager
def left_again() -> Iterator[None]:
    """A context after which this process leaves the process group that was created inside it."""
    was_in_one = dist.is_initialized()
    try:
        yield
    finally:
        if not was_in_one:
            shutdown()


def shutdown() -> None:
    """Leaves the process group once every rank has called this."""
    if dist.is_initialized():
        dist.barrier()  # a rank still communicating with this one would abort
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """Ends a worker at once, after flushing its output.

    The interpreter's own shutdown can end in SIGABRT if a gloo thread frees its last tensor.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def seed_random(seed: int, step: int, world: World) -> None:
    """Seeds dropout, differently for each group of ranks that sees different samples."""
    torch.manual_seed(seeded_generator(seed, f"{step}/{world.data_parallel_rank}").initial_seed())


def rank() -> int:
    """Returns this process's rank in the world."""
    return dist.get_rank()


def size() -> int:
    """Returns the number of processes in the world."""
    return dist.get_world_size()


def barrier() -> None:
    """Waits for all processes."""
    dist.barrier()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sums a tensor over all ranks; any shape, the same on each."""
    total = values.clone()
    dist.all_reduce(total)
    return total


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Averages a tensor over all ranks, without gradient; any shape, the same on each."""
    return sum_over_ranks(values.detach()) / size()


def sum_over_samples(values: torch.Tensor, world: World) -> torch.Tensor:
    """Sums a tensor over ranks that see different samples.

    Ranks that share layers hold the same values, which are counted once.
    """
    return sum_over_ranks(values) / world.tensor_parallel_size


def max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Returns the elementwise maximum of a tensor over all ranks."""
    total = values.clone()
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total


def highest(number: int) -> int:
    """Returns the maximum of a number over all ranks; the same on all."""
    return int(max_over_ranks(torch.tensor(number, device=_device())).item())


def exchange_with(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Sends a tensor to another rank while receiving one from it, and waits for both."""
    both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    if sent.is_cuda:
        torch.cuda.synchronize(sent.device)


def from_main(value: T | None) -> T:
    """Broadcasts a value of rank 0 (pickled, so only for small values made by this program)."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=_device())
    return box[0]  # type: ignore[return-value]


def on_main(work: Callable[[], T]) -> T | None:
    """Calls a function on rank 0; all processes call this together.

    Args:
        work: the function.

    Returns:
        Its result on rank 0, None on the others.

    Raises:
        Exception: on every process, if it raises on rank 0: on the others of the same kind if that
            is a ValueError, else a PeerError.
    """
    value = None
    if rank() == 0:
        try:
            value = work()
        except Exception as error:
            from_main((type(error) if isinstance(error, ValueError) else PeerError, str(error)))
            raise
    failure: tuple[type[Exception], str] | None = from_main(None)
    if failure is not None:
        raise failure[0](failure[1])
    return value


def from_all(value: T) -> list[T]:
    """Gathers every rank's value in rank order, on every rank (pickled, as in `from_main`)."""
    everyone: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone  # type: ignore[return-value]


def gather_to_main(value: T) -> list[T] | None:
    """Gathers every rank's value in rank order, on rank 0; None on the others."""
    everyone: list[T | None] | None = [None] * size() if rank() == 0 else None
    dist.gather_object(value, everyone, dst=0)
    return everyone  # type: ignore[return-value]


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which libraries, and compilers they start, print nothing to standard output.

    Works on the file descriptor, since some output does not come from Python; standard error is not
    affected.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def join_groups(size: int) -> None:
    """Creates this process's two groups and registers them with megatron-core, unless they exist.

    These are the ranks that share its layers, and the ranks with the same part of other samples.
    megatron-core's own `initialize_model_parallel` creates one for every combination of its kinds
    of parallelism, on every process: 5,915 on 1,024 processes, each with a wait for all of them.

    Args:
        size: number of ranks that share layers; they are consecutive. All processes call it.
    """
    state = megatron().parallel_state
    group = state.get_tensor_model_parallel_group(check_initialized=False)
    if group is not None:
        if group.size() == size:
            return
        forget_groups()
    rank, total = dist.get_rank(), dist.get_world_size()
    first = rank - rank % size
    together, apart = range(first, first + size), range(rank % size, total, size)
    state._TENSOR_MODEL_PARALLEL_GROUP = _new_group(together, "tensor parallel")
    state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = list(together)
    state._DATA_PARALLEL_GROUP = _new_group(apart, "data parallel")
    state._DATA_PARALLEL_GLOBAL_RANKS = list(apart)


def forget_groups() -> None:
    """Makes megatron-core forget its groups."""
    megatron().parallel_state.destroy_model_parallel()


def _new_group(ranks: Iterable[int], name: str) -> Any:
    """Creates a group that contains this process; processes outside of it do not know it.

    All processes create their group of a kind together: NCCL splits the world's communicator once.
    """
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)


def megatron() -> Any:
    """`megatron.core`, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron import core
    return core


def tensor_parallel_group() -> Any:
    """Returns the group of ranks that share this one's layers."""
    return megatron().parallel_state.get_tensor_model_parallel_group()


def data_parallel_group() -> Any:
    """Returns the group of ranks that have the same part of every layer, and other samples."""
    return megatron().parallel_state.get_data_parallel_group()


def deepspeed_mpu() -> Any:
    """Returns the interface through which DeepSpeed learns about tensor parallelism."""
    tensor, data = tensor_parallel_group(), data_parallel_group()
    return SimpleNamespace(
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_rank=tensor.rank,
        get_model_parallel_world_size=tensor.size,
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=data.rank,
        get_data_parallel_world_size=data.size,
    )
