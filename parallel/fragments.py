"""Which weights a process optimizes, and where it keeps them, under every ZeRO stage.

A fragment is a row-major range of one parameter's elements. Together the fragments of all processes
cover every parameter; under data parallelism without ZeRO they cover it once per process.
This is the only file that reads DeepSpeed's internals (its version is pinned for that reason).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from polyad.model.build import buffers_changed
from polyad.parallel.checkpoint.box import MASTER, Box
from polyad.parallel.shard import Placement, placement_of
from polyad.parallel.source import Source
from polyad.parallel.zero import Engine


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements start .. start + numel, row-major, of this process's shard of a parameter."""

    parameter: nn.Parameter
    placement: Placement
    """Where the shard lies in the global tensor."""
    key: torch.Tensor
    """The fp32 tensor that the optimizer steps, under which it keeps its state."""
    state: dict[str, Any]
    fields: tuple[str, ...]
    """Names of its tensors of the weight's shape: `Engine.state_fields`, or fewer."""
    position: int
    """First element of the fragment in `key`."""
    start: int
    numel: int

    def view(self, field: str) -> torch.Tensor:
        """The fragment's elements of the master weight, of its moving average or of an optimizer
        state, flat, in place.

        Call `Engine.about_to_change` before writing to it.
        """
        whole = self.key if field == MASTER else self.state[field]
        return whole.detach().view(-1)[self.position : self.position + self.numel]


def fragments(engine: Engine) -> dict[str, Fragment]:
    """This process's fragments of what is trained, by name. Nothing is sent, nothing copied.

    Optimizer state that does not exist yet (before the first step) is created, as zeros.
    """
    held: dict[str, Fragment] = {}
    locate = {0: _locate_replicated, 1: _locate_flat, 2: _locate_flat, 3: _locate_partitioned}
    find = locate[engine.stage](engine)
    state = engine.deepspeed.basic_optimizer.state
    fields_by_weight = engine.fields_by_weight()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if (found := find(parameter)) is None or found[3] <= 0:
            continue
        key, position, start, numel = found
        fields = fields_by_weight.get(id(key), engine.state_fields)
        for field in fields:
            if not isinstance(state[key].get(field), torch.Tensor):
                state[key][field] = torch.zeros_like(key)
        if "exp_avg" in engine.state_fields:
            state[key].setdefault("step", torch.zeros((), device=_step_device(engine, key)))
        held[name] = Fragment(
            parameter=parameter,
            placement=placement_of(parameter),
            key=key,
            state=state[key],
            fields=fields,
            position=position,
            start=start,
            numel=numel,
        )
    return held


class Partitions(NamedTuple):
    """How ZeRO 3 cuts parameters over the processes of a group: each into equal parts."""

    names: list[str]
    placements: list[Placement]
    numels: list[int]
    """Elements of this process's shard of each, before ZeRO cuts it."""
    sizes: list[int]
    """Elements of a part; the last parts have less, or none."""
    group: Any


def partitions(engine: Engine) -> Partitions:
    """How ZeRO 3 has cut what is trained; the same on every process of the group."""
    found = Partitions([], [], [], [], None)
    optimizer = engine.deepspeed.optimizer
    named: list[tuple[str, Any]] = list(engine.module.named_parameters())
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        _, _, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        found.names.append(name)
        found.placements.append(placement_of(parameter))
        found.numels.append(parameter.ds_numel)
        found.sizes.append(size)
        found = found._replace(group=parameter.ds_process_group)
    return found


@torch.no_grad()
def fill(engine: Engine, source: Source, *, frozen: bool = True) -> None:
    """Sets master weights, optimizer state and step counters, then the weights of the forward pass.

    Every process reads the boxes of its own fragments and no others.

    Args:
        engine: whose weights are set.
        source: what they are set to.
        frozen: whether frozen weights are set as well, which have no masters and never change.
    """
    engine.about_to_change()
    held = fragments(engine)
    for name, fragment in held.items():
        for field in (MASTER, *fragment.fields):
            view = fragment.view(field)
            stop = fragment.start + fragment.numel
            for first, (offset, size) in fragment.placement.boxes(fragment.start, stop):
                box = Box(name, field, fragment.placement.global_shape, offset, size)
                place = fragment.placement.values(view, first - fragment.start, size)
                place.copy_(source.read(box))
        if "step" in fragment.state:
            fragment.state["step"].fill_(source.step(name))
    _refresh(engine, held, _fill_frozen(engine, source) if frozen else [])
    for name, buffer in persistent_buffers(engine.module):
        buffer.copy_(source.buffer(name))
    buffers_changed(engine.module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to a model's state, by name; every process holds them whole."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            if name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _fill_frozen(engine: Engine, source: Source) -> list[tuple[Any, torch.Tensor]]:
    """Sets frozen weights, which have no masters, and keeps those that this process writes.

    Returns:
        At stage 3, where weights are set in `_refresh`: parameters, and the values of this
        process's part of each.
    """
    parts: list[tuple[Any, torch.Tensor]] = []
    named = [(n, p) for n, p in engine.module.named_parameters() if not p.requires_grad]
    owners = _owners_of_frozen(engine, named)
    engine.frozen.clear()
    for name, parameter in named:
        placement = placement_of(parameter)
        whole = math.prod(placement.shape)
        if engine.stage == 3:
            size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            start = size * dist.get_rank(parameter.ds_process_group)  # type: ignore[attr-defined]
            part = torch.zeros(max(0, min(size, whole - start)), device=engine.device)
            _read_range(part, name, placement, start, source)
            parts.append((parameter, part))
        else:
            _read_range(parameter.detach().view(-1), name, placement, 0, source)
        if name in owners:
            exact = engine.stage < 3 and parameter.dtype == torch.float32
            if exact:
                engine.frozen[name] = parameter.detach().view(-1)
            else:
                engine.frozen[name] = torch.zeros(whole)  # on the host: nothing computes with it
                _read_range(engine.frozen[name], name, placement, 0, source)
    return parts


def _read_range(
    flat: torch.Tensor, name: str, placement: Placement, start: int, source: Source
) -> None:
    """Sets elements of a shard, from `start` on, to the values of a source."""
    for first, (offset, size) in placement.boxes(start, start + flat.numel()):
        box = Box(name, MASTER, placement.global_shape, offset, size)
        placement.values(flat, first - start, size).copy_(source.read(box))


def _owners_of_frozen(engine: Engine, named: Sequence[tuple[str, nn.Parameter]]) -> set[str]:
    """Which frozen weights this process writes: each whole, by one of those that have it."""
    world, mine, at = engine.world, set[str](), dict[tuple[int, bool], int]()
    kept = [(n, placement_of(p)) for n, p in named if n not in engine.left_out]
    totals: dict[tuple[int, bool], int] = {}
    for _, placement in kept:
        kind = placement.expert_parallel_size, placement.replicated
        totals[kind] = totals.get(kind, 0) + math.prod(placement.shape)
    for name, placement in kept:
        kind = parts, replicated = placement.expert_parallel_size, placement.replicated
        rank, copies = world.data_parallel_rank // parts, world.data_parallel_size // parts
        if replicated:
            rank = rank * world.tensor_parallel_size + world.tensor_parallel_rank
            copies *= world.tensor_parallel_size
        if at.get(kind, 0) * copies // totals[kind] == rank:
            mine.add(name)
        at[kind] = at.get(kind, 0) + math.prod(placement.shape)
    return mine


def _refresh(
    engine: Engine, held: dict[str, Fragment], frozen: Sequence[tuple[Any, torch.Tensor]]
) -> None:
    """Makes the forward pass use the master weights, and at stage 3 the frozen ones."""
    optimizer = engine.deepspeed.optimizer
    if engine.stage == 0:
        for fragment in held.values():
            fragment.parameter.copy_(fragment.key)
    elif engine.stage == 3:
        optimizer.checkpoint_event_prologue()  # drops the whole copies of small parameters
        for fragment in held.values():
            partition: torch.Tensor = fragment.parameter.ds_tensor  # type: ignore[attr-defined]
            partition[: fragment.numel] = fragment.view(MASTER)
        for parameter, part in frozen:
            parameter.ds_tensor[: part.numel()] = part
        optimizer.checkpoint_event_epilogue()  # gathers them again
    else:
        optimizer.update_lp_params()


def _step_device(engine: Engine, key: torch.Tensor) -> torch.device:
    """Fused and capturable optimizers count steps on the device, the others on the CPU."""
    defaults = engine.deepspeed.basic_optimizer.defaults
    return (
        key.device if defaults.get("fused") or defaults.get("capturable") else torch.device("cpu")
    )


# Each of these returns a function: parameter -> (key, position, start, numel), or None.


def _locate_replicated(engine: Engine) -> Any:
    """Stage 0: the whole parameter on every process; in bf16 with DeepSpeed's fp32 master."""
    working, masters = (
        [p for group in getattr(engine.deepspeed.optimizer, groups, []) for p in group]
        for groups in ("fp16_groups", "fp32_groups")
    )
    master_of = {id(p): master for p, master in zip(working, masters, strict=True)}
    return lambda p: (master_of.get(id(p), p), 0, 0, p.numel())


def _locate_flat(engine: Engine) -> Any:
    """Stages 1 and 2: an equal part of each flattened parameter group."""
    # Not the optimizer's own groups: while it steps, DeepSpeed shows it one group at a time.
    masters = engine.deepspeed.optimizer.single_partition_of_fp32_groups

    def find(parameter: Any) -> tuple[torch.Tensor, int, int, int] | None:
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        key = masters[mapping.param_group_index]
        whole, part = mapping.hp_fragment_address, mapping.lp_fragment_address
        return key, whole.start, part.start, part.numel

    return find


def _locate_partitioned(engine: Engine) -> Any:
    """Stage 3: an equal part of every parameter, the last one padded."""
    optimizer = engine.deepspeed.optimizer

    def find(parameter: Any) -> tuple[torch.Tensor, int, int, int]:
        group, position, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * dist.get_rank(parameter.ds_process_group)
        key = optimizer.fp32_partitioned_groups_flat[group]
        return key, position, start, min(size, parameter.ds_numel - start)

    return find
