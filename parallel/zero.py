"""Converts our configuration to DeepSpeed's, and wraps its engine for the training loop.

The rest of Polyad uses DeepSpeed only through `Engine`, which adds what DeepSpeed lacks in some
stages: one rule for non-finite steps, and a gradient norm. `fragments` locates the weights that a
rank optimizes. This is the only module that reads DeepSpeed's internals, which is why its version
is pinned.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from polyad.model.output import ModelOutput
from polyad.parallel import comm
from polyad.parallel.checkpoint.format import EMA, MASTER, Box
from polyad.parallel.config import ParallelConfig
from polyad.parallel.shard import Placement, group_name, placement_of

Precision = Literal["fp32", "bf16"]
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [..., V], target ids [...]) -> nats [...] in fp32."""
RATE_FACTOR = "learning_rate_factor"
"""The key in an optimizer's parameter group for the factor of its learning rate."""
STATE_TENSORS = "state_tensors"
"""The key in an optimizer's parameter group for the names of the state tensors of each weight."""
LATE = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
"""Modules that optimizers of torch and DeepSpeed import only when they are constructed."""
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StepResult(NamedTuple):
    """The outcome of an optimizer step, the same on every rank."""

    applied: bool
    """False if any rank had a non-finite loss or gradient, or if the step was refused: then nothing
    changed."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping; infinite or NaN if anything was not finite."""


def import_deepspeed() -> Any:
    """Imports DeepSpeed without its banner, its log lines and the C++ collective it would compile.

    That collective (`deepspeed_shm_comm`) only serves inference; building it would need a compiler
    and 20 seconds at the first start on a machine, and checking for it takes a second at each
    start.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings(), comm.quiet():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that are deprecated in newer torch, thousands of times.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.ops.__compatible_ops__ = {}  # skips the check of what could be compiled
    return deepspeed


def import_engine() -> None:
    """Imports libraries that building an engine and its first step need, without their warnings.

    Doing it at one point makes the time measurable. Parts of DeepSpeed, such as its Muon, decorate
    functions, none of which is called here, with `torch.compile`. The first such decorator would
    import all of torch's compiler, which takes more than a second; here the decorators do nothing.
    """

    def as_it_is(function: Any = None, **_: Any) -> Any:
        return (lambda decorated: decorated) if function is None else function

    with warnings.catch_warnings(), patch.object(torch, "compile", as_it_is):
        warnings.simplefilter("ignore")
        import_deepspeed()
        for name in LATE:
            import_module(name)


def deepspeed_config(
    parallel: ParallelConfig,
    *,
    precision: Precision,
    micro_batch_size: int,
    accumulation_steps: int,
    clip_grad_norm: float,
    num_parameters: int,
) -> dict[str, Any]:
    """Builds DeepSpeed's configuration of a run.

    In bf16 gradients accumulate in fp32, and are summed over ranks in fp32.
    """
    stage = parallel.zero_stage
    bucket = min(parallel.bucket_size, max(num_parameters, 1))
    bucket += bucket % 2  # stage 2 requires an even size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": clip_grad_norm,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "communication_data_type": "fp32",  # for gradients; the default is the model's dtype
        # DeepSpeed's timer synchronizes at every forward pass and step; `train/` has its own.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "round_robin_gradients": False,  # checkpoints read DeepSpeed's fragment map
            # Buckets are reduced during the backward pass, each part to the rank that owns it: half
            # of the traffic of an all-reduce. Stage 1 has no buckets; see `FlatGradients`.
            "overlap_comm": stage > 1,
            "use_multi_rank_bucket_allreduce": False,
        },
    }
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": bucket,
            # Smaller parameters are replicated on every rank; none in a small model.
            "stage3_param_persistence_threshold": min(100_000, num_parameters // 10_000),
        }
    if precision == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def partitioner(
    config: dict[str, Any], dtype: torch.dtype, mpu: Any = None
) -> Callable[[nn.Parameter], None]:
    """Returns a function that partitions a parameter for stage 3, keeping only this rank's part.

    Args:
        config: the result of `deepspeed_config`.
        dtype: the dtype of the parameters.
        mpu: describes tensor parallelism to DeepSpeed; None without it.
    """
    init = import_deepspeed().zero.Init(
        data_parallel_group=mpu.get_data_parallel_group() if mpu else None,
        config_dict_or_path=config,
        dtype=dtype,
        mpu=mpu,
    )
    from deepspeed.utils import groups

    groups.mpu = mpu

    def place(parameter: Any) -> None:
        size = placement_of(parameter).expert_parallel_size
        if size > 1:
            # Experts are partitioned among the ranks that have the same ones. The names are those
            # of DeepSpeed's own layer: with them it divides the sum of the gradients by the number
            # of all data-parallel ranks, and adds up the norms of different experts.
            parameter.ds_zero_placement_family = "autoep_expert"
            parameter.ds_zero_partition_group_name = group_name(size)
            expert_group(size)
            parameter.ds_zero_partition_process_group = replica_group(parameter)
        init._convert_to_zero_parameters([parameter])

    return place


def gather_with(reader: nn.Module, owner: nn.Module) -> None:
    """In stage 3 also gathers the parameters of a module while another module computes.

    By default a module's parameters are gathered only during its own forward and backward passes.

    Args:
        reader: The module that reads them.
        owner: The module that owns them, itself or in its children.
    """
    for parameter in owner.parameters():
        import_deepspeed().zero.register_external_parameter(reader, parameter)


class Engine:
    """A model in training over all ranks.

    Args:
        module: the model, with its parameters allocated (and partitioned in stage 3).
        optimizer: the optimizer of these parameters.
        config: the result of `deepspeed_config`.
        world: this rank.
        cross_entropy: the loss for logits as the module returns them, possibly split by vocabulary.
        mpu: describes tensor parallelism to DeepSpeed; None without it.
        average_decay: decay per step of the moving average of the weights; None for no average.
        left_out: names of frozen weights that checkpoints leave out, because they are read again
            from their origin.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        *,
        world: comm.World,
        cross_entropy: CrossEntropy,
        mpu: Any = None,
        average_decay: float | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        deepspeed = import_deepspeed()
        self.module, self.optimizer = module, optimizer
        """What was passed in; DeepSpeed may have replaced tensors in the optimizer's groups."""
        self.left_out = left_out
        self.frozen: list[Fragment] = []
        """Frozen weights that this rank writes to checkpoints: exact, fp32."""
        self.world, self.device = world, world.device
        self.cross_entropy = cross_entropy
        self.stage: int = config["zero_optimization"]["stage"]
        self._before_change: list[Callable[[], None]] = []
        self._refuse_above = math.inf
        self._refused: bool | None = False
        """Whether the step is refused; None until its norm is known."""
        self._clip_in_update = 0.0
        """Maximum norm, where a fused update clips; 0: DeepSpeed does, in a pass of its own."""
        self._replicas = 1
        """Divisor of DeepSpeed's gradients: 1 if they are means, else the number of summands."""
        # In every stage DeepSpeed computes the norm, lets this optimizer update masters and moments
        # group by group, and then updates the weights of the forward pass.
        optimizer.register_step_pre_hook(self._before_update)
        with comm.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed.utils.groups.mpu = None  # forgets that of an earlier engine in this process
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            with _changed_deepspeed():
                self.deepspeed, *_ = deepspeed.initialize(
                    model=module, optimizer=optimizer, config=config, mpu=mpu
                )
        assert self.deepspeed.basic_optimizer is optimizer
        assert self.deepspeed.module is module
        if self.stage == 3:
            # Experts are split over tensor-parallel ranks, too: their norms are summed like those
            # of all split parameters.
            self.deepspeed.optimizer._grad_norm_counts_every_rank = lambda *_: False
        if self.stage in (1, 2):
            # DeepSpeed refuses a norm that is not finite, as it is where any gradient is not; to
            # look for one before would wait for the device once more.
            self.deepspeed.optimizer.has_overflow = lambda *_: False
        if self.stage == 1:
            FlatGradients(self.deepspeed.optimizer, world.data_parallel_size)
            if optimizer.defaults.get("fused"):
                zero = self.deepspeed.optimizer
                self._clip_in_update, zero.clip_grad = zero.clip_grad, 0.0
        else:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            InOneOrder(self.deepspeed.optimizer, trained)
        if config["bf16"]["enabled"] and self.stage == 2:
            # DeepSpeed would divide by the number of ranks in bf16 before it sums in fp32, which
            # rounds unless the number is a power of two.
            self.deepspeed.optimizer.gradient_average = False
            self._replicas = world.data_parallel_size
        # DeepSpeed converts buffers to bf16: running means would stand still, and values that no
        # source sets again would be rounded.
        for path, value in buffers.items():
            prefix, _, name = path.rpartition(".")
            owner = self.module.get_submodule(prefix)
            owner._buffers[name] = value.to(self.module.get_buffer(path).device)
        self._average_decay = average_decay
        averaged = () if average_decay is None else (EMA,)
        self.state_fields = (*state_fields(self.optimizer), *averaged)

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> ModelOutput:
        """Runs the model's forward pass on this rank's micro-batch."""
        return self.deepspeed(*inputs, **named)

    def train(self, mode: bool = True) -> None:
        """Switches dropout on or off."""
        self.deepspeed.train(mode)

    def before_change(self, callback: Callable[[], None]) -> None:
        """Registers a function to be called once, before weights, masters or moments next change.

        They change in an applied optimizer step, after the forward and backward passes, and in
        `fill`; buffers (running means, balancing biases) change in between. Until the call, a
        thread may read weights, masters and moments.

        Args:
            callback: called once even if it is registered several times. It must not communicate,
                since not every rank may have registered one.
        """
        if callback not in self._before_change:
            self._before_change.append(callback)

    def about_to_change(self) -> None:
        """Must be called before weights, masters or moments are changed."""
        callbacks, self._before_change = self._before_change, []
        for callback in callbacks:
            callback()

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass of one micro-batch; DeepSpeed averages over those of a step.

        The loss is multiplied by 1, or by NaN if it is not finite: then the gradients are NaN too,
        and every rank skips the step, whichever micro-batch it was.
        """
        self.deepspeed.backward(loss * (1 + 0 * loss.detach()))

    def step(self, learning_rate: float, refuse_above: float = math.inf) -> StepResult | None:
        """Must be called after every `backward`; the last call of a step updates the weights.

        Args:
            learning_rate: the learning rate of all parameters, times the factor of each group.
            refuse_above: the same on all ranks: if the gradient norm before clipping is larger, the
                step is not applied, like a non-finite one.

        Returns:
            The step's result at the end of the accumulation window, before that None.
        """
        boundary = self.deepspeed.is_gradient_accumulation_boundary()
        if not boundary:
            self.deepspeed.step()
            return None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE_FACTOR, 1.0)
        if self._replicas > 1:
            for sums in self.deepspeed.optimizer.averaged_gradients.values():
                torch._foreach_div_(list(sums), self._replicas)
        self._refuse_above, self._refused = refuse_above, None
        self.deepspeed.step()
        applied = self.deepspeed.was_step_applied() and not self._refused
        if applied and self._average_decay is not None:
            self._average(1 - self._average_decay)
        return StepResult(applied, self._grad_norm())

    @torch.no_grad()
    def _average(self, share: float) -> None:
        """Updates the averages, which are stored with the optimizer's state, from the masters."""
        self.about_to_change()
        state = self.optimizer.state
        pairs = [(values[EMA], key) for key, values in state.items() if EMA in values]
        if not pairs:  # with few trained parameters a rank may have none
            return
        averages, masters = zip(*pairs, strict=True)
        torch._foreach_lerp_(averages, masters, share)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before the optimizer updates a group; takes its gradients if the step is refused:
        then it changes nothing."""
        if self._refused is None:  # in the first group of a step
            norm = self._grad_norm()
            self._refused = not math.isfinite(norm) or norm > self._refuse_above
            if self._clip_in_update:
                divisor = (norm + 1e-6) / self._clip_in_update  # as DeepSpeed's
                scale = torch.tensor(divisor, device=self.device) if divisor > 1 else None
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
        if self._refused:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.grad = None
        self.about_to_change()

    def _grad_norm(self) -> float:
        norm = float(self.deepspeed.optimizer._global_grad_norm)
        return norm if norm >= 0 else math.nan  # DeepSpeed's -1: a part of it is not finite


@contextmanager
def _changed_deepspeed() -> Iterator[None]:
    """A context in which DeepSpeed builds our engines.

    - In stage 1 in bf16 it uses stage 2's optimizer as well, whose methods `FlatGradients`
      replaces, in place of one of its own for bf16 weights with fp32 gradients.
    - It accepts a model with experts of which none is trained. Its optimizer of stages 1 and 2
      requires a parameter group of experts without needing it.
    - In stage 3 it accepts experts other than its own layer's. Its optimizer can partition them: a
      parameter's process group may differ from that of the rest (see `partitioner`). It only
      rejects its older layer class, by which stages 1 and 2 recognize experts.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kind_of = DeepSpeedEngine._do_optimizer_sanity_check
    configure = DeepSpeedZeroOptimizer._configure_moe_settings

    def kind(engine: Any, optimizer: Any) -> Any:
        usual = kind_of(engine, optimizer)
        return ZERO_OPTIMIZATION if engine.zero_optimization() else usual

    def configure_if_trained(optimizer: Any) -> None:
        groups = optimizer.optimizer.param_groups
        if any(group.get("moe") for group in groups):
            configure(optimizer)
        else:
            optimizer.is_moe_param_group = [False] * len(groups)

    with (
        patch.object(DeepSpeedEngine, "_do_optimizer_sanity_check", kind),
        patch.object(DeepSpeedZeroOptimizer, "_configure_moe_settings", configure_if_trained),
        patch.object(DeepSpeedEngine, "_validate_zero3_moe_compatibility", lambda _: None),
    ):
        yield


def state_fields(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Returns the names of the tensors that an optimizer keeps for every weight, or for some."""
    return tuple(sorted({field for g in optimizer.param_groups for field in g[STATE_TENSORS]}))


class FlatGradients:
    """Gradients of stage 1 in one flat fp32 tensor per group, laid out as the group's weights are.

    DeepSpeed adds micro-batches up in a tensor per parameter, copies these into buckets at the end
    of a step, and cuts each bucket by the ranks that own its parts, waiting for the device every
    time. Here they are added up where they are sent from: one reduce-scatter per group gives every
    rank the sum of its part, which the optimizer takes as it is.

    Args:
        optimizer: DeepSpeed's of stage 1, whose methods are replaced.
        replicas: divisor of the sums over ranks: the number of data-parallel ranks, for experts
            too, since those of a rank see the tokens of all ranks that share them.
    """

    def __init__(self, optimizer: Any, replicas: int) -> None:
        self._optimizer, self._replicas = optimizer, replicas
        self._flat: dict[int, torch.Tensor] = {}
        """The sums of a step so far, by group, from the first gradient to the reduction."""
        groups = zip(
            optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets, strict=True
        )
        self._offsets = {
            id(p): offset for group in groups for p, offset in zip(*group, strict=True)
        }
        optimizer.process_gradients = self.add
        optimizer.reduce_gradients = self.reduce

    def add(self, parameter: nn.Parameter, group: int) -> None:
        """Called when the gradient of a micro-batch is complete.

        Compiled blocks also call this for weights without a gradient: those are skipped.
        """
        if parameter.grad is None:
            return
        start, numel = self._offsets[id(parameter)], parameter.numel()
        self._of_group(group)[start : start + numel].add_(parameter.grad.reshape(-1))
        parameter.grad = None

    def reduce(self, pipeline_parallel: bool = False) -> None:
        """Called after the last backward pass of a step: sums over ranks, and divides."""
        from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

        optimizer = self._optimizer
        for group, process_group in enumerate(optimizer.real_dp_process_group):
            part = self._of_group(group)
            del self._flat[group]
            if dist.get_world_size(process_group) > 1:
                whole, part = part, part.new_empty(optimizer.partition_size[group])
                dist.reduce_scatter_tensor(part, whole, group=process_group)
            if self._replicas > 1:
                part.div_(self._replicas)
            # Of each parameter alone, since the norm counts those that tensor-parallel ranks share
            # once.
            own = [p._hp_mapping.hp_fragment_address for p in optimizer.params_in_partition[group]]
            views = [part[each.start : each.start + each.numel] for each in own]
            optimizer.averaged_gradients[group] = GradPartitionBufferGroup(views, part)

    def _of_group(self, group: int) -> torch.Tensor:
        if group not in self._flat:
            weights = self._optimizer.bit16_groups_flat[group]
            self._flat[group] = torch.zeros_like(weights, dtype=torch.float32)
        return self._flat[group]


class InOneOrder:
    """Passes gradients on in reverse parameter order, which is nearly the order of autograd.

    DeepSpeed puts gradients into a bucket in the order in which autograd computes them, and reduces
    bucket by bucket, so all ranks must compute in the same order. They do not if graphs differ:
    torch.compile may break a graph on one rank alone, and returns the gradients of each graph all
    at once. Then gradients of different parameters would be summed, without an error.

    A gradient that arrives early is kept until those before it have arrived; missing ones are
    skipped at the end of the backward pass.

    Args:
        optimizer: DeepSpeed's of stages 2 and 3, whose methods are replaced.
        parameters: the model's parameters, the same on every rank.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
        self._place = {id(parameter): n for n, parameter in enumerate(reversed(parameters))}
        self._reduce = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.reduce_ready_partitions_and_remove_grads = self.arrive
        optimizer.overlapping_partition_gradients_reduce_epilogue = self.end
        self._arrived: dict[int, tuple[Any, ...]] = {}
        self._next = 0

    def arrive(self, parameter: nn.Parameter, *group: int) -> None:
        """Called when a gradient is complete; stage 2 also passes the index of its group.

        Compiled blocks also call this for weights without a gradient: those are skipped.
        """
        if parameter.grad is None and getattr(parameter, "grad_accum", None) is None:
            return
        self._arrived[self._place[id(parameter)]] = (parameter, *group)
        while self._next in self._arrived:
            self._reduce(*self._arrived.pop(self._next))
            self._next += 1

    def end(self) -> None:
        """Called when the backward pass of a micro-batch has ended."""
        for place in sorted(self._arrived):
            self._reduce(*self._arrived[place])
        self._arrived.clear()
        self._next = 0
        self._finish()


def replica_group(parameter: Any) -> Any:
    """Returns the ranks that hold the same parameter and see other samples."""
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    if is_moe_param(parameter):
        return groups._get_expert_data_parallel_group(parameter.group_name)
    return groups._get_sequence_data_parallel_group()


class Fragment(NamedTuple):
    """Elements of this rank's shard of a parameter, row-major."""

    name: str
    parameter: nn.Parameter
    start: int
    """The position of the first element in the shard."""
    values: Mapping[str, torch.Tensor]
    """The elements of the master weight, of its moving average and of each optimizer state, flat,
    by field; these are views: call `Engine.about_to_change` before writing to them."""
    counter: torch.Tensor | None = None
    """The optimizer's step count of the weight; None if it keeps none."""

    @property
    def placement(self) -> Placement:
        """The position of the shard in the global tensor."""
        return placement_of(self.parameter)

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yields boxes of global tensors, and views of their values here."""
        for field, flat in self.values.items():
            yield from self.placement.views(self.name, field, flat, self.start)


def fragments(engine: Engine) -> dict[str, Fragment]:
    """Returns this rank's fragments of trained parameters, by name, without communication or
    copies.

    Optimizer state that does not exist yet (before the first step) is created, as zeros.
    """
    held: dict[str, Fragment] = {}
    state = engine.optimizer.state
    fields_of_weight = {
        id(weight): tuple(f for f in engine.state_fields if f in (*group[STATE_TENSORS], EMA))
        for group in engine.optimizer.param_groups
        for weight in group["params"]
    }
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if (located := _located(engine, parameter)) is None or located[3] <= 0:
            continue
        key, position, start, numel = located
        fields = fields_of_weight.get(id(key), engine.state_fields)
        for field in fields:
            if not isinstance(state[key].get(field), torch.Tensor):
                state[key][field] = torch.zeros_like(key)
        if "exp_avg" in engine.state_fields:
            place = key.device if engine.optimizer.defaults.get("fused") else torch.device("cpu")
            state[key].setdefault("step", torch.zeros((), device=place))
        tensors = {MASTER: key} | {field: state[key][field] for field in fields}
        here = slice(position, position + numel)
        values = {field: whole.detach().view(-1)[here] for field, whole in tensors.items()}
        held[name] = Fragment(name, parameter, start, values, state[key].get("step"))
    return held


def own_range(parameter: Any) -> tuple[int, int]:
    """Returns this rank's elements of a parameter's shard in stage 3: first, one past the last."""
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    return start, min(start + size, parameter.ds_numel)


def refresh(engine: Engine, held: Iterable[Fragment]) -> None:
    """Copies the master weights, and in stage 3 the frozen ones, to the forward pass's weights."""
    optimizer = engine.deepspeed.optimizer
    if engine.stage == 3:
        optimizer.checkpoint_event_prologue()  # drops the gathered copies of small parameters
        for fragment in held:
            parameter: Any = fragment.parameter
            values = fragment.values[MASTER]
            parameter.ds_tensor[: values.numel()] = values
        optimizer.checkpoint_event_epilogue()  # gathers them again
    else:
        optimizer.update_lp_params()


def _located(engine: Engine, parameter: Any) -> tuple[torch.Tensor, int, int, int] | None:
    """Returns where this rank's elements of a parameter are: a master tensor, their position in it,
    and the first of them and their number in the parameter's shard; None if there are none."""
    optimizer = engine.deepspeed.optimizer
    if engine.stage == 3:  # an equal part of every parameter, the last one padded
        group, position, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, stop = own_range(parameter)
        return optimizer.fp32_partitioned_groups_flat[group], position, start, stop - start
    if (mapping := parameter._hp_mapping) is None:  # an equal part of each flattened group
        return None
    # Not the optimizer's own groups: during a step DeepSpeed shows it one group at a time.
    key = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    part = mapping.lp_fragment_address
    return key, mapping.hp_fragment_address.start, part.start, part.numel


# Experts: DeepSpeed reduces their gradients over the ranks that have the same ones.


def expert_group(expert_parallel_size: int) -> Any:
    """Returns the group of the ranks that together have all experts.

    It is created if needed, and so are the groups of ranks with the same experts.
    """
    from deepspeed.utils import groups

    groups._create_expert_data_and_model_parallel(expert_parallel_size, mpu=groups.mpu)
    return groups._get_expert_parallel_group(group_name(expert_parallel_size))


def forget_expert_groups(tensor_parallel_size: int) -> None:
    """Makes DeepSpeed recreate its expert groups if they belong to another layout."""
    import_deepspeed()
    from deepspeed.utils import groups

    if groups.expert_tensor_parallel_world_size != tensor_parallel_size:
        groups._EXPERT_PARALLEL_GROUP.clear()
        groups._EXPERT_PARALLEL_GROUP_RANKS.clear()
        groups._EXPERT_DATA_PARALLEL_GROUP.clear()
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS.clear()


def split_expert_groups(optimizer: torch.optim.Optimizer) -> None:
    """Moves experts to separate parameter groups, as DeepSpeed requires, in place.

    Args:
        optimizer: the optimizer before its first step.
    """
    import_deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    for number, group in enumerate(optimizer.param_groups):
        group["name"] = f"group {number}"
    split = split_params_into_different_moe_groups_for_optimizer(optimizer.param_groups)
    optimizer.param_groups = [group for group in split if group["params"]]


def connect_without_engine(layers: Iterable[Any], tensor_parallel_size: int = 1) -> None:
    """Lets DeepSpeed use the process group, and layers exchange rows, as building an engine does.

    Args:
        layers: mixtures of experts from `parallelize_experts`. All ranks call it.
        tensor_parallel_size: number of ranks that share each layer.
    """
    deepspeed = import_deepspeed()
    from deepspeed.utils import groups

    forget_expert_groups(tensor_parallel_size)
    with comm.quiet():
        deepspeed.init_distributed(verbose=False)
    groups.mpu = comm.deepspeed_mpu() if tensor_parallel_size > 1 else None
    for layer in layers:
        layer.dispatcher.set_deepspeed_parallelism()


def forget_world() -> None:
    """Makes DeepSpeed forget the process group and all groups that it has created."""
    import deepspeed.comm.comm
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups.mpu = None
    for name, value in list(vars(groups).items()):
        if name.startswith("_") and name.isupper() and "GROUP" in name:
            setattr(groups, name, {} if isinstance(value, dict) else None)
