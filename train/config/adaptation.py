"""The model of a run: with its adapters, and with what is not trained frozen."""

from typing import Any, NamedTuple

from torch import nn

from polyad.model.build import build_model
from polyad.model.decoder import DecoderSettings
from polyad.model.lora import adapters, add_lora, of_base
from polyad.model.mxd.layer import SparseTable
from polyad.model.settings import ModelSettings
from polyad.model.smoe.layer import SelectingMoE
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.frozen_experts import kept_experts
from polyad.parallel.source import InitialWeights, Source, WeightsOnly, begun_anew, on_base
from polyad.parallel.weights import Weights
from polyad.train.config.run import RunConfig
from polyad.train.loop.optimizer import freeze
from polyad.train.tasks.task import Task

GRAPH = ".router.graph."
"""The part that names of what a graph of tokens has contain."""
OF_STEPS = (
    f"{GRAPH}started", ".gate.activation.is_softmax", ".router.selection.num_selected",
)  # fmt: skip
"""How the names end of buffers that go by the steps of a run: whether a graph is on, which
activation a gate has, and how many experts are selected."""


def model_of(config: RunConfig) -> nn.Module:
    """The model of a run on the meta device.

    Args:
        config: the run's, with all that the data decides filled in.

    Raises:
        ValueError: with an `exit_status` of 2: a pattern of adapters or groups matches nothing.
    """
    model = build_model(config.model)
    if config.adapt.lora is not None:
        add_lora(model, config.adapt.lora)
    if config.distill.blocks is not None:
        trained = replaced_names(config.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(trained))
    freeze(model, config.optimizer)
    return model


def replaced_names(model: ModelSettings, there: ModelSettings | None = None) -> tuple[str, ...]:
    """How the names of parameters begin that replaced feed-forwards have.

    Args:
        model: their model.
        there: another one, whose replaced blocks do not count; None: all do.
    """
    ours, theirs = (
        set(each.replaced_blocks()) if isinstance(each, DecoderSettings) else set[int]()
        for each in (model, there)
    )
    return tuple(f"blocks.{block}.feed_forward." for block in sorted(ours - theirs))


def unused_parameters(model: nn.Module) -> int:
    """Counts the parameters of the experts that one token does not use once a run is done, output
    biases included; of a sparse gate's table the rows beyond top_k."""
    unused = 0
    for module in model.modules():
        if isinstance(module, SelectingMoE):
            of_all = sum(parameter.numel() for parameter in module.parameters_by_expert())
            config = module.experts.config
            idle = config.num_experts - config.known_final_top_k()
            unused += of_all * idle // config.num_experts
        elif isinstance(module, SparseTable):
            unused += (
                module.table.numel()
                // len(module.table)
                * (len(module.table) - module.config.top_k)
            )
    return unused


def begins_anew(task: Task[Any], weights: Weights, config: RunConfig) -> tuple[str, ...]:
    """How the names begin of what starts from the seed, not from weights.

    Args:
        task: of the run.
        weights: that it starts from.
        config: of the run.

    Returns:
        What the task says, the feed-forwards of blocks that this run replaces, the statistics of
        graphs of tokens that come with it, and what goes by its steps. With distill.blocks the
        replaced feed-forwards alone.
    """
    model = config.model
    replaced = replaced_names(model, weights.model_config())
    if config.distill.blocks is not None:
        return replaced
    new, _ = graph_statistics(weights, model)
    begins = {name for name, _ in persistent_buffers(build_model(model)) if name.endswith(OF_STEPS)}
    others = {name for name in {*new, *begins} if not name.startswith(replaced or ("/",))}
    return (*task.begins_anew(weights), *replaced, *sorted(others))


def graph_statistics(
    weights: Weights, model: ModelSettings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Running statistics of graphs of tokens: those that only the run has, and only the weights.

    Returns:
        Beginnings of names.
    """
    theirs, ours = (
        {name for name, _ in persistent_buffers(build_model(config)) if GRAPH in name}
        for config in (weights.model_config(), model)
    )
    return tuple(sorted(ours - theirs)), tuple(sorted(theirs - ours))


def source_of(
    config: RunConfig, resume: Checkpoint | None, init: Weights | None, anew: tuple[str, ...]
) -> Source:
    """Where weights, moments and buffers of a run start from.

    Args:
        config: the run's.
        resume: the checkpoint that it continues from.
        init: the weights of checkpoint.init_from, of a new run or one with adapters.
        anew: how names begin that these lack, and that start from the seed.
    """
    model = model_of(config)
    start: Source | None = WeightsOnly(init) if isinstance(init, Checkpoint) else init
    plain_model = build_model(config.model)
    if start is not None and anew:
        start = begun_anew(start, InitialWeights(plain_model, config.seed), anew)
    if config.adapt.lora is None:
        return resume or start or InitialWeights(model, config.seed)
    assert start is not None
    if resume is not None:
        return on_base(start, resume, of_base(model), buffers=resume)
    plain = [name for name, _ in plain_model.named_parameters()]
    return on_base(start, InitialWeights(model, config.seed), plain, buffers=start)


class Counts(NamedTuple):
    """Numbers of parameters."""

    adapters: int
    adapted_layers: int
    """Weights with an adapter beside them."""
    trained: int
    """Parameters that are trained, those of adapters among them."""
    frozen: int

    def in_words(self) -> str:
        """These counts, for a person."""
        beside = ""
        if self.adapters:
            beside = f" ({self.adapters:,} in adapters of {self.adapted_layers} weights)"
        return f"trains {self.trained:,} parameters{beside}; {self.frozen:,} are frozen"


def counts(model: nn.Module) -> Counts:
    """Counts what is trained of a model, and what is not."""
    beside = [adapter for *_, adapter in adapters(model)]
    trained = sum(_num_trained(p) for p in model.parameters())
    return Counts(
        adapters=sum(p.numel() for adapter in beside for p in adapter.parameters()),
        adapted_layers=len(beside),
        trained=trained,
        frozen=sum(p.numel() for p in model.parameters()) - trained,
    )


def _num_trained(parameter: nn.Parameter) -> int:
    """How many of its numbers are trained: of stacked experts some may be frozen."""
    if not parameter.requires_grad:
        return 0
    kept = kept_experts(parameter)
    return parameter.numel() - (len(kept) * parameter[0].numel() if kept else 0)
