"""What `polyad bench step` compares: training steps of GPT-2 that differ in one thing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.build import build_model, materialize
from model.dense import DenseFeedForwardConfig
from model.feedforward import FeedForwardConfig
from model.gpt2 import GPT2, GPT2Config, compile_blocks
from model.mumoe.config import MuMoEConfig
from parallel.zero import DTYPES
from train.loss import token_losses
from train.optimizer import OptimizerConfig, build_optimizer

Step = Callable[[], None]
FEED_FORWARDS: dict[str, FeedForwardConfig] = {
    "dense": DenseFeedForwardConfig(),
    "mumoe-cp": MuMoEConfig(factorization="cp", num_experts=(256,)),
    "mumoe-tr": MuMoEConfig(factorization="tr", num_experts=(256,)),
}
"""Variants that differ in the feed-forward alone; the ranks match the dense one's parameters."""


def model_of(name: str, config: GPT2Config) -> GPT2Config:
    """The model of a variant, with its feed-forward in the place of the given one's."""
    if name not in FEED_FORWARDS:
        return config
    return config.model_copy(update={"feed_forward": FEED_FORWARDS[name]})


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
    """A training step of one variant; both have random weights and see the same tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, sequence_length + 1)
    tokens = torch.randint(config.vocab_size or 0, shape, generator=generator).to(device)
    make = _theirs if name == "transformers" else _ours
    module, logits_of = make(config, device, precision)
    if compiled:
        _compile(module)
    named = [(n, p, p.dim()) for n, p in module.named_parameters()]
    optimizer = build_optimizer(OptimizerConfig(), named)

    def step() -> None:
        losses = token_losses(logits_of(tokens[:, :-1]), tokens[:, 1:].contiguous())
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _compile(module: nn.Module) -> None:
    """Compiles every block: ours by the trainer's own function, theirs alike."""
    if isinstance(module, GPT2):
        compile_blocks(module)
        return
    for block in module.get_submodule("transformer.h").children():
        block.compile()


def _ours(
    config: GPT2Config, device: str, precision: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    module = build_model(config)
    materialize(module, seed=0, device=device, dtype=DTYPES[precision])
    return module, lambda ids: module(ids).logits


def _theirs(
    config: GPT2Config, device: str, precision: str
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
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
    return module.train(), lambda ids: module(ids).logits
