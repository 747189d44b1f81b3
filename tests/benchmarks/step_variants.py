"""Variants of `step.py`: training steps of GPT-2 that differ in one thing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from polyad.model.block import FeedForwardConfig
from polyad.model.build import build_model, compile_model, materialize
from polyad.model.decoder import Decoder
from polyad.model.decoder_config import GPT2Config
from polyad.model.feedforward import DenseFeedForwardConfig
from polyad.model.mumoe.config import MuMoEConfig
from polyad.model.output import RoutingStats
from polyad.model.smoe.config import SparseMoEConfig
from polyad.parallel.tensor import pad_vocabulary
from polyad.parallel.zero import DTYPES
from polyad.train.loop.losses import LossConfig, routing_loss
from polyad.train.loop.optimizer import OptimizerConfig, build_optimizer
from polyad.train.tasks.distillation import cross_entropy

Step = Callable[[], None]
Call = Callable[[Tensor, Tensor], tuple[Tensor, tuple[RoutingStats, ...]]]
"""From token ids and targets [B, T] to the mean loss, and what routers did."""
FEED_FORWARDS = ("dense", "mumoe-cp", "mumoe-tr", "smoe-16", "smoe-64")
"""Variants that differ in the feed-forward alone."""
LOSSES = LossConfig(load_balance=0.01, router_z=0.001)
"""Auxiliary losses of the routers, as in the shipped configurations."""


def feed_forward_of(name: str, width: int) -> FeedForwardConfig:
    """A feed-forward that costs a token as much as the dense one.

    Args:
        name: One of `FEED_FORWARDS`.
        width: D of the model.

    Returns:
        256 factorized experts of the rank that matches the dense one's parameters, or sparse ones
        of which two are as wide.
    """
    kind, _, which = name.partition("-")
    if kind == "mumoe":
        return MuMoEConfig(factorization="cp" if which == "cp" else "tr", num_experts=(256,))
    if kind == "smoe":
        return SparseMoEConfig(num_experts=int(which), top_k=2, expert_hidden_size=2 * width)
    return DenseFeedForwardConfig()


def goal_of(name: str, device: str) -> float | None:
    """How many times the dense step a variant's is to take at most; None: no goal is set.

    Args:
        name: One of `FEED_FORWARDS`.
        device: `cpu` or `cuda`.
    """
    if name.startswith("mumoe"):
        return 1.15 if device == "cuda" else 1.10
    return 1.25 if name.startswith("smoe") and device == "cuda" else None  # 80% of the tokens


def model_of(name: str, config: GPT2Config) -> GPT2Config:
    """The model of a variant, with its feed-forward in the place of the given one's."""
    if name not in FEED_FORWARDS:
        return config
    feed_forward = feed_forward_of(name, config.hidden_size)
    return config.model_copy(update={"feed_forward": feed_forward})


def make_step(
    name: str,
    config: GPT2Config,
    precision: str,
    *,
    device: str,
    batch_size: int,
    sequence_length: int,
    compiled: bool,
) -> Step:
    """A training step of one variant; both have random weights and see the same tokens.

    In bf16 the optimizer steps fp32 masters, as in training.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, sequence_length + 1)
    tokens = torch.randint(config.vocab_size or 0, shape, generator=generator).to(device)
    make = _theirs if name == "transformers" else _ours
    module, call = make(config, device, precision)
    if compiled:
        _compile(module)
    else:  # a compiler would have to follow hooks
        _mark_loss(module.get_submodule("lm_head" if name == "transformers" else "head"))
    weights = dict(module.named_parameters())
    masters = {n: nn.Parameter(p.detach().float()) for n, p in weights.items()}
    if precision == "fp32":
        masters = weights
    named = [(n, p, p.dim()) for n, p in masters.items()]
    optimizer = build_optimizer(OptimizerConfig(), named)

    def step() -> None:
        loss, routing = call(tokens[:, :-1], tokens[:, 1:])
        of_routing = routing_loss(routing, LOSSES)
        loss = loss if of_routing is None else loss + of_routing
        loss.backward()  # type: ignore[no-untyped-call]
        with record_function("optimizer"), torch.no_grad():
            if masters is not weights:
                for name, master in masters.items():
                    gradient = weights[name].grad
                    master.grad = None if gradient is None else gradient.float()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if masters is not weights:
                torch._foreach_copy_(list(weights.values()), list(masters.values()))
                module.zero_grad(set_to_none=True)

    return step


def _compile(module: nn.Module) -> None:
    """Compiles every block: ours by the trainer's own function, theirs alike."""
    if isinstance(module, Decoder):
        compile_model(module)
        return
    for block in module.get_submodule("transformer.h").children():
        block.compile()


def _mark_loss(head: nn.Module) -> None:
    """Has a profiler count the output head's forward pass, and ours is all of the loss, as loss."""
    regions: list[record_function] = []

    def enter(*_: object) -> None:
        regions.append(record_function("loss"))
        regions[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: object) -> None:
        regions.pop().__exit__(None, None, None)

    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)


def _ours(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    module = build_model(config)
    pad_vocabulary(module)  # as in training
    materialize(module, seed=0, device=device, dtype=DTYPES[precision])

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        output = module(ids_BT, target_ids_BT=targets_BT)
        return output.logits, output.routing

    return module, call


def _theirs(config: GPT2Config, device: str, precision: str) -> tuple[nn.Module, Call]:
    import transformers

    dropout = {name: config.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    reference = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.sequence_length,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        use_cache=False,
        attn_implementation="sdpa",
        **dropout,
    )
    module: nn.Module = transformers.GPT2LMHeadModel(reference).to(device, DTYPES[precision])

    def call(ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, tuple[RoutingStats, ...]]:
        logits_BTV = module(ids_BT).logits
        with record_function("loss"):
            return cross_entropy(logits_BTV, targets_BT.contiguous()).mean(), ()

    return module.train(), call
