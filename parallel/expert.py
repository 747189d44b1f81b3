"""Expert parallelism: whole experts on different ranks, with an all-to-all exchange of tokens.

The router is on every rank. Each sends the rows of its tokens to the ranks of their experts, and
gets the outputs back: two exchanges forward and two backward, of K T D (EP - 1) / EP values each
with even routing, and no gathering. Under tensor parallelism the inner width of every expert is
split, too: ranks that share tokens each compute a part of the same rows.

Shapes: B batch, T tokens in a sequence, N tokens, K experts of a token, M rows, E experts, D width,
F inner width of an expert, P ranks that share the experts, X experts of each.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from polyad.model.feedforward import NOTHING_ELSE, BlockInput
from polyad.model.kernels.grouped import take
from polyad.model.smoe.experts import Experts, StackedExperts
from polyad.model.smoe.graph import AttentionGraph, Mixed, head_entropies
from polyad.model.smoe.layer import Dispatcher, DispatchRegions, Plan, SelectingMoE, make_plan
from polyad.parallel import comm
from polyad.parallel.regions import Group, OwnDropout, copy, sum_parts, tensor_group
from polyad.parallel.shard import Axis, Placement, cut, placement_of
from polyad.parallel.zero import expert_group, import_deepspeed


def parallelize_experts(
    layer: SelectingMoE, world: comm.World, *, stack_gates: bool = False
) -> None:
    """Distributes the experts of one layer over the ranks, in place.

    Args:
        layer: the layer on the meta device.
        world: this rank, with its expert-parallel and tensor-parallel ranks.
        stack_gates: whether trained gates are stacked with the other first layer; see `Experts`.
    """
    experts = layer.experts
    both: list[nn.Parameter] = []
    if stack_gates and isinstance(experts, Experts) and experts.up_lora is None:
        weights = (experts.gate, experts.up)
        both = [each for each in weights if each is not None and each.requires_grad]
    for name, inner in experts.inner_axes.items():
        if (whole := getattr(experts, name)) is not None:
            cut(experts, name, Placement.of_experts(tuple(whole.shape), world, inner))
    if len(both) == 2:
        of_up = placement_of(experts.get_parameter("up"))
        axes = (*of_up.axes[:2], Axis.uncut(2), of_up.axes[2])
        cut(experts, "up", replace(of_up, axes=axes, stacked=("gate", "up")))
        experts.register_parameter("gate", None)
    if world.expert_parallel_size > 1:
        layer.dispatcher = _expert_parallel_dispatcher()(
            experts.config.num_experts, world.expert_parallel_size
        )
    if world.tensor_parallel_size > 1:
        group = tensor_group()
        # Each rank computes a part of every output, so gradients of both inputs are summed.
        layer.dispatcher.regions = DispatchRegions(
            tokens=copy,
            weights=copy,
            output=sum_parts,
            unit_mean=group.mean,
        )
        experts.dropout = OwnDropout(experts.dropout.p, world)
        layer.router.selection.agreed = group.of_first
        if layer.router.pool is not None:
            layer.router.pool.agreed = group.of_first
        graph = layer.router.graph
        if isinstance(graph, AttentionGraph):
            layer.router.graph = TensorParallelAttentionGraph(graph, world)


class TensorParallelAttentionGraph(AttentionGraph):
    """The attention graph with its heads split over tensor-parallel ranks.

    The rank with the chosen head computes the mixture, and the others receive it. The choice is in
    a buffer on the device and is never read on the CPU: all ranks run the same operations. A fixed
    head is in a buffer, too.

    Args:
        graph: the whole graph.
        world: this rank.
    """

    def __init__(self, graph: AttentionGraph, world: comm.World) -> None:
        with torch.device("meta"):
            super().__init__(graph.config, graph.context)
        self._heads_here = self.num_heads // world.tensor_parallel_size
        self._first_head = self._heads_here * world.tensor_parallel_rank

    def attention_head(self) -> Tensor:
        """Returns the chosen head; if another rank has it, any head of this rank."""
        return (self.chosen_head() - self._first_head).clamp(0, self._heads_here - 1)

    def forward(self, scores_BTE: Tensor, u_BTD: Tensor, given: BlockInput = NOTHING_ELSE) -> Mixed:
        """See `Graph.forward`."""
        attention = given.attention
        assert attention is not None
        assert given.cache is None  # generation runs in one process
        measures = {"attention_head": self.chosen_head().squeeze(0)}
        if self.chooses:
            measures["head_entropy_A"] = sum_parts(self._own_entropies(given))
        head = self.chosen_head() - self._first_head
        is_here = (head >= 0) & (head < self._heads_here)
        whole = attention._replace(output_BTD=copy(attention.output_BTD))
        if attention.output_bias_D is not None:
            whole = whole._replace(output_bias_D=copy(attention.output_bias_D))
        mixed = self.mix(self.features(whole), copy(scores_BTE), given)
        mixed_BTE = sum_parts(torch.where(is_here, mixed.scores_BTE, 0.0))
        for name, value in mixed.measures.items():
            measures[name] = sum_parts(torch.where(is_here, value, 0.0).squeeze(0))
        return Mixed(mixed_BTE, measures)

    def _own_entropies(self, given: BlockInput) -> Tensor:
        """Returns [A], 0 for heads of other ranks."""
        assert given.attention is not None
        own_A = head_entropies(given.attention, self.context.causal, given.real)
        entropy_A = own_A.new_zeros(self.num_heads)
        entropy_A[self._first_head : self._first_head + self._heads_here] = own_A
        return entropy_A


class Counts(NamedTuple):
    """Numbers of rows to exchange."""

    arriving_PX: Tensor
    """The rows from each rank for each expert of this one, on the device."""
    numbers: Tensor
    """[2, P]: sent and received, possibly still being copied to the CPU."""
    wait: Callable[[], None] = lambda: None
    """Returns when the numbers are on the CPU."""


class RowExchange(Dispatcher):
    """Sends rows to the ranks of their experts, and returns the outputs.

    Args:
        num_experts: E.
        parts: number of ranks that share them.
    """

    group: Group
    """The ranks; set once the engine has created their group."""

    def __init__(self, num_experts: int, parts: int) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.num_local_experts = num_experts, num_experts // parts
        self.parts = parts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed once its engine may create the group."""
        self.group = Group.of(expert_group(self.parts))

    def unit_means(self, means: Tensor) -> Tensor:
        """Averages as `Dispatcher.unit_means`, for the experts of all processes."""
        return self.group.all_parts(super().unit_means(means))

    def begin(self, plan: Plan) -> Counts:
        """Exchanges the numbers of rows, and starts copying them to the CPU."""
        even = [self.num_local_experts] * self.parts
        arriving_PX = self.group.exchange(plan.counts_E, even, even).view(self.parts, -1)
        leaving_PX = plan.counts_E.view(self.parts, -1)
        numbers = torch.stack([leaving_PX.sum(1), arriving_PX.sum(1)])
        if numbers.is_cuda and not torch.compiler.is_compiling():
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = pinned.copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            return Counts(arriving_PX, numbers, copied.synchronize)
        return Counts(arriving_PX, numbers)

    def compute(
        self, rows_MD: Tensor, plan: Plan, experts: StackedExperts, begun: Counts
    ) -> Tensor:
        """Exchanges rows with the processes that have their experts, as `Dispatcher.compute`."""
        # The only place where the CPU synchronizes with the GPU.
        begun.wait()
        numbers = begun.numbers
        if numbers.is_cuda:  # compiled; `tolist` would copy them one by one
            numbers = numbers.cpu()
        send, receive = numbers.tolist()
        num_rows, num_sent = rows_MD.shape[0], sum(send)
        if plan.drops:
            rows_MD = rows_MD[:num_sent]
        arrived_MD = self.group.exchange(rows_MD, receive, send)
        done_MD = self._through_experts(arrived_MD, begun.arriving_PX, sum(receive), experts)
        done_MD = self.group.exchange(done_MD, send, receive)
        return pad(done_MD, (0, 0, 0, num_rows - num_sent)) if plan.drops else done_MD

    def _through_experts(
        self, arrived_MD: Tensor, counts_PX: Tensor, total: int, experts: StackedExperts
    ) -> Tensor:
        """Runs rows, sorted by sender and then by expert, through this rank's experts."""
        here = counts_PX.shape[1]
        if here == 1:
            return experts(arrived_MD, counts_PX.sum(0))
        expert_E = torch.arange(here, device=counts_PX.device).repeat(self.parts)
        expert_M = expert_E.repeat_interleave(counts_PX.flatten(), output_size=total)
        counts_X = counts_PX.sum(0)
        order_M, place_M, *_ = make_plan(expert_M.unsqueeze(1), counts_X)
        sorted_MD = experts(take(arrived_MD, order_M, place_M, 1), counts_X)
        return take(sorted_MD, place_M, order_M, 1)


@functools.cache
def _expert_parallel_dispatcher() -> type:
    """Defines the dispatcher class, a subclass of DeepSpeed's `MoE`, for which its engine looks."""
    import_deepspeed()
    from deepspeed.moe.layer import MoE

    class ExpertParallelDispatcher(RowExchange, MoE):
        pass

    return ExpertParallelDispatcher
