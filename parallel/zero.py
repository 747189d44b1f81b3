"""Our configuration -> DeepSpeed's dictionary -> an engine that the training loop can drive.

`Engine` is all that the rest of Polyad sees of DeepSpeed. It adds what DeepSpeed does not do at
every stage: one rule for steps that are not finite, and a gradient norm.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from polyad.model.output import ModelOutput
from polyad.parallel import comm
from polyad.parallel.checkpoint.box import EMA
from polyad.parallel.config import ParallelConfig
from polyad.parallel.gradient_order import InOneOrder
from polyad.parallel.gradients import Fp32Gradients
from polyad.parallel.step_hooks import StageZeroHook, ZeroHook

Precision = Literal["fp32", "bf16"]
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [..., V], target ids [...]) -> nats [...] in fp32."""
RATE_FACTOR = "learning_rate_factor"
"""The key of an optimizer's group for what multiplies the learning rate in it."""
STATE_TENSORS = "state_tensors"
"""The key of an optimizer's group for the names of the tensors that it keeps of each weight, where
groups differ in that."""
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class StepResult(NamedTuple):
    """The outcome of an optimizer step, the same on every process."""

    applied: bool
    """False if any process had a loss or gradient that is not finite, or if the step was refused:
    then nothing changed."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping; infinite or NaN if something was not finite.
    """


def import_deepspeed() -> Any:
    """DeepSpeed, without its banner, its log lines and the C++ collective it would compile.

    That collective (`deepspeed_shm_comm`) only serves inference; building it would need a compiler
    and 20 seconds at the first start on a machine, and probing for it a second at each start.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings(), comm.quiet():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.ops
        from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that newer torch renames, thousands of times.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.ops.__compatible_ops__ = {}  # skips the probe for what could be compiled
    return deepspeed


def deepspeed_config(
    parallel: ParallelConfig,
    *,
    precision: Precision,
    micro_batch_size: int,
    accumulation_steps: int,
    clip_grad_norm: float,
    num_parameters: int,
) -> dict[str, Any]:
    """DeepSpeed's dictionary for a run.

    In bf16 gradients accumulate in fp32, and are summed over processes in fp32: by DeepSpeed at
    stages 1 to 3, by `Fp32Gradients` at stage 0, where DeepSpeed has no such mode. Stage 0 clips
    in `StageZeroHook`, because DeepSpeed's own norm there leaves out experts and tensor-parallel
    shards and is not reported.
    """
    stage = parallel.zero_stage
    bucket = min(parallel.bucket_size, max(num_parameters, 1))
    bucket += bucket % 2  # stage 2 refuses an odd size
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": clip_grad_norm if stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "bf16": {"enabled": precision == "bf16"},
        "communication_data_type": "fp32",  # of gradients; otherwise the model's
        # DeepSpeed's waits for the device at every forward pass and step; `train/` has its own.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "round_robin_gradients": False,  # the checkpoint reads DeepSpeed's fragment map
            # Buckets are reduced while the backward pass goes on, each part to the process that
            # owns it: half of what an all-reduce sends.
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "use_multi_rank_bucket_allreduce": False,
        },
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_prefetch_bucket_size": bucket}
    if precision == "bf16" and stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


class Engine:
    """A model in training over all processes.

    Args:
        module: the model, its parameters allocated (and partitioned at stage 3).
        optimizer: over those parameters.
        config: what `deepspeed_config` made.
        clip_grad_norm: largest gradient norm, 0 for no clipping; used at stage 0.
        world: this process.
        cross_entropy: of logits as the module gives them, which may be cut by vocabulary.
        copies: for each parameter, in the optimizer's order, how many processes hold the same part
            of it.
        mpu: tells DeepSpeed of tensor parallelism; None without it.
        average_decay: the share of itself that the moving average of the weights keeps in a step;
            None: there is no average.
        left_out: names of frozen weights that a checkpoint leaves out: they are read again from
            where they came.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        clip_grad_norm: float,
        *,
        world: comm.World,
        cross_entropy: CrossEntropy,
        copies: list[int],
        mpu: Any = None,
        average_decay: float | None = None,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        deepspeed = import_deepspeed()
        self.left_out = left_out
        self.frozen: dict[str, torch.Tensor] = {}
        """Frozen weights that this process writes into checkpoints, by name: exact, flat, fp32."""
        self.world, self.device = world, world.device
        self.cross_entropy = cross_entropy
        self.stage: int = config["zero_optimization"]["stage"]
        self._before_change: list[Callable[[], None]] = []
        if self.stage == 0:
            hook = StageZeroHook(clip_grad_norm, copies, world)
            optimizer.register_step_pre_hook(hook)
        # At every stage DeepSpeed lets this optimizer change masters and moments, and changes the
        # weights of the forward pass after that. Before it, the norm has been checked.
        optimizer.register_step_pre_hook(lambda *_: self.about_to_change())
        with comm.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed.utils.groups.mpu = None  # forgets that of an earlier engine in this process
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            with _one_optimizer_for_stages_1_and_2(), _frozen_experts_allowed():
                self.deepspeed, *_ = deepspeed.initialize(
                    model=module, optimizer=optimizer, config=config, mpu=mpu
                )
        assert self.deepspeed.basic_optimizer is optimizer
        self._hook = hook if self.stage == 0 else ZeroHook(self.deepspeed.optimizer)
        self._order: InOneOrder | None = None
        if self.stage:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            self._order = InOneOrder(self.deepspeed.optimizer, trained)
        if config["bf16"]["enabled"]:
            self._average_in_fp32(config["zero_optimization"]["reduce_bucket_size"])
        _restore_buffers(self.module, buffers)
        self._average_decay = average_decay
        averaged = () if average_decay is None else (EMA,)
        self.state_fields = (*_state_fields(self.deepspeed.basic_optimizer), *averaged)

    def _average_in_fp32(self, bucket_size: int) -> None:
        """Averages gradients in fp32 at the stages where DeepSpeed would round them to bf16."""
        if isinstance(self._hook, StageZeroHook):
            self._hook.gradients = Fp32Gradients(self.deepspeed, bucket_size, self.world)
        elif self.stage in (1, 2):
            # DeepSpeed would divide by the number of processes in bf16 before it sums in fp32,
            # which rounds unless the number is a power of two.
            self.deepspeed.optimizer.gradient_average = False
            self._hook.replicas = self.world.data_parallel_size

    def fields_by_weight(self) -> dict[int, tuple[str, ...]]:
        """Of weights that have not all of `state_fields` those that they have, by their `id`."""
        return {
            id(parameter): tuple(f for f in self.state_fields if f in (*group[STATE_TENSORS], EMA))
            for group in self.deepspeed.basic_optimizer.param_groups
            if STATE_TENSORS in group
            for parameter in group["params"]
        }

    @property
    def module(self) -> nn.Module:
        """The model that was handed in."""
        return self.deepspeed.module

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> ModelOutput:
        """The model's forward pass on this process's micro-batch."""
        return self.deepspeed(*inputs, **named)

    def train(self, mode: bool = True) -> None:
        """Switches dropout on or off."""
        self.deepspeed.train(mode)

    def no_grad(self) -> AbstractContextManager[None]:
        """A context without gradients, for evaluation."""
        return torch.no_grad()

    def before_change(self, callback: Callable[[], None]) -> None:
        """Registers a function to be called once, before weights, masters or moments change next.

        They change in an optimizer's step that is applied, after the forward and backward passes,
        and in `fill`; buffers (running means, biases that balance experts) change in between.
        Until the call, a thread may read weights, masters and moments.

        Args:
            callback: called once even if it is registered several times. It must not communicate:
                not every process may have registered one.
        """
        if callback not in self._before_change:
            self._before_change.append(callback)

    def about_to_change(self) -> None:
        """Call this before changing weights, masters or moments."""
        callbacks, self._before_change = self._before_change, []
        for callback in callbacks:
            callback()

    def largest_weight(self) -> float:
        """The largest magnitude of this process's weights; NaN if a weight is NaN."""
        tensors = [getattr(p, "ds_tensor", p).detach() for p in self.module.parameters()]
        norms = torch._foreach_norm([t for t in tensors if t.numel()], math.inf)
        return torch.stack([norm.float() for norm in norms]).max().item()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch; DeepSpeed averages over those of a step.

        The factor is 1, or NaN where the loss is not finite: then the gradients are too, and
        every process skips the step, wherever in the window it happened.
        """
        if self._order is not None:
            self._order.begin()
        self.deepspeed.backward(loss * (1 + 0 * loss.detach()))

    def step(self, learning_rate: float, refuse_above: float = math.inf) -> StepResult | None:
        """Call it after every `backward`; the last call of a step changes the weights.

        Args:
            learning_rate: for all parameters, times the factor of each group.
            refuse_above: the same on all processes: with a larger norm of the gradient, before
                clipping, the step is not applied, as if it were not finite.

        Returns:
            None inside the window, the step's result at its end.
        """
        boundary = self.deepspeed.is_gradient_accumulation_boundary()
        if not boundary:
            self.deepspeed.step()
            return None
        for group in self.deepspeed.basic_optimizer.param_groups:
            group["lr"] = learning_rate * group.get(RATE_FACTOR, 1.0)
        self._hook.grad_norm, self._hook.refuse_above = None, refuse_above
        self._hook.refused = False
        self.deepspeed.step()
        applied = self.deepspeed.was_step_applied() and not self._hook.refused
        if applied and self._average_decay is not None:
            self._average(1 - self._average_decay)
        return StepResult(applied, self._grad_norm())

    @torch.no_grad()
    def _average(self, share: float) -> None:
        """Moves the averages, which lie where the optimizer's state does, towards the masters."""
        self.about_to_change()
        state = self.deepspeed.basic_optimizer.state
        pairs = [(values[EMA], key) for key, values in state.items() if EMA in values]
        if not pairs:  # of few trained numbers a process may have none
            return
        averages, masters = zip(*pairs, strict=True)
        torch._foreach_lerp_(averages, masters, share)

    def _grad_norm(self) -> float:
        norm = self._hook.grad_norm
        if norm is None and self.stage:
            norm = self.deepspeed.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)


@contextmanager
def _one_optimizer_for_stages_1_and_2() -> Iterator[None]:
    """Inside this context DeepSpeed takes the optimizer of stage 2 for stage 1 in bf16 too.

    It reduces buckets of gradients while the backward pass goes on. The one that DeepSpeed takes
    otherwise for bf16 weights with gradients in fp32 reduces everything after it, all at once.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    usual = DeepSpeedEngine._do_optimizer_sanity_check

    def chosen(engine: Any, optimizer: Any) -> Any:
        kind = usual(engine, optimizer)
        return ZERO_OPTIMIZATION if engine.zero_optimization() else kind

    DeepSpeedEngine._do_optimizer_sanity_check = chosen
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = usual


@contextmanager
def _frozen_experts_allowed() -> Iterator[None]:
    """Inside this context DeepSpeed takes a model with experts of which none is trained.

    Its optimizer of stages 1 and 2 asks for a group of experts, although it needs none.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    usual = DeepSpeedZeroOptimizer._configure_moe_settings

    def configure(optimizer: Any) -> None:
        groups = optimizer.optimizer.param_groups
        if any(group.get("moe") for group in groups):
            usual(optimizer)
        else:
            optimizer.is_moe_param_group = [False] * len(groups)

    DeepSpeedZeroOptimizer._configure_moe_settings = configure
    try:
        yield
    finally:
        DeepSpeedZeroOptimizer._configure_moe_settings = usual


def _restore_buffers(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Undoes what DeepSpeed does to buffers when it makes a model bf16: means would stand still,
    and numbers that no source sets again be rounded."""
    for path, value in buffers.items():
        prefix, _, name = path.rpartition(".")
        owner = module.get_submodule(prefix)
        owner._buffers[name] = value.to(module.get_buffer(path).device)


def _state_fields(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the tensors that an optimizer keeps for every weight, or for some."""
    if all(STATE_TENSORS in group for group in optimizer.param_groups):
        return tuple(sorted({field for g in optimizer.param_groups for field in g[STATE_TENSORS]}))
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    raise TypeError(f"no checkpoint is known for {type(optimizer).__name__}")
