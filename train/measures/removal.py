"""`polyad experts prune`: writes a model with fewer experts, and measures the cost.

Experts are chosen on text of the train split, or of other data (`--calibrate`), such as examples of
one domain; the cost is measured on held-out text, and compared with equally many random experts.

Shapes: E experts of a layer, D width.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import FamilyWeights
from polyad.parallel.tensor_folder import PlainWeights
from polyad.train.errors import ConfigError
from polyad.train.exchange.convert import convert, refuse_what_is_there
from polyad.train.exchange.pruning import Group, Pruning
from polyad.train.exchange.writers import Format
from polyad.train.experts.actions import Action
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.moments import Moments
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.measures.atlas import TOKENS
from polyad.train.measures.knockout import knock_out
from polyad.train.measures.measure import (
    Examination,
    Subject,
)
from polyad.train.reading import Evaluated, moments_of, open_evaluated, read
from polyad.train.results import Tables
from polyad.train.tasks.samples import TextSamples, losses
from polyad.train.tasks.text import TextTask

By = Literal["atlas", "reap", "mone", "frequency", "probability", "mean-norm", "random"]
RANDOM_CHOICES = 3
"""Number of models with random experts with which the cost is compared."""


@dataclass(frozen=True, kw_only=True)
class RemovalOptions:
    """What to write, and how to choose its experts."""

    output: Path
    by: By
    keep: float
    merge: bool = False
    calibrate: str | None = None
    """Prepared data on whose train split experts are chosen; None: the model's."""
    tokens: int = TOKENS
    seed: int = 0

    @property
    def text(self) -> str:
        """The options that choose the experts."""
        return f"--by {self.by} --keep {self.keep:g}" + " --merge" * self.merge


class Removal(Examination):
    """Chooses experts, writes the smaller model, and measures its cost."""

    name = "prune"
    doing = "choosing experts"
    needs_whole = "experts are left out of a whole model"

    @classmethod
    def checked(cls, opened: Evaluated, split: str, **options: Any) -> RemovalOptions:
        """The fields of `RemovalOptions`."""
        opened.need(f"experts {cls.name}", TextTask)
        settings, counts = RemovalOptions(**options), dict[str, int]()
        for key, each in sections_of(f"experts {cls.name}", opened).items():
            if settings.merge and each.num_groups > 1:
                raise ConfigError(
                    f"--merge: is not allowed with {key}.num_groups: {each.num_groups}; experts of "
                    "different groups cannot be merged"
                )
            check_share(key, each, settings.keep)
            counts[key] = left_of(each, settings.keep)
        if len(set(counts.values())) > 1:
            counted = ", ".join(f"{left} in {key}" for key, left in counts.items())
            raise ConfigError(
                f"--keep: {settings.keep:g} leaves {counted}, but all layers must keep equally many"
            )
        format_of(opened)
        refuse_what_is_there(settings.output)
        # Made of any experts: whatever is wrong with the smaller model is known before the reading.
        kept = [Group.alone(expert) for expert in range(min(counts.values()))]
        Pruning({"": kept}, settings.text).of(opened.weights)
        return settings

    @classmethod
    def take(
        cls,
        opened: Evaluated,
        split: str,
        settings: RemovalOptions,
        model: nn.Module,
        world: comm.World,
    ) -> Tables:
        """Reads text to choose, writes, and reads other text with the models before and after."""
        import pandas as pd

        if world.size > 1:
            raise ConfigError(
                f"experts {cls.name}: one process does it, and there are {world.size}"
            )
        layers = sparse_layers(model)
        calibration = calibration_of(opened, settings.calibrate)
        scores, moments = scored(
            *(calibration, model, layers, world),
            by=settings.by,
            tokens=settings.tokens,
            seed=settings.seed,
        )
        choose = _merged if settings.merge else highest
        groups = {
            layer.name: choose(
                scores[layer.name], moments[layer.name], config_of(model, layer), settings.keep
            )
            for layer in layers
        }
        form = format_of(opened)
        written = convert(
            opened.weights.folder,
            settings.output,
            form,
            Pruning(groups, settings.text),
            opened.choice,
        )
        samples = text_of(opened, split, settings.tokens)
        whole, tokens = mean_loss(model, samples, opened.batch_size, "held-out text")
        at_random = []
        for number in range(RANDOM_CHOICES):
            seed, changes = settings.seed + 1 + number, []
            for layer in layers:
                config = config_of(model, layer)
                others = random_experts(config, settings.keep, f"{layer.name} {seed}")
                changes.append(without_others(layer, others))
            with intervened(model, changes):
                label = f"without random experts {number + 1}/{RANDOM_CHOICES}"
                at_random.append(mean_loss(model, samples, opened.batch_size, label)[0])
        smaller = _loss_of_written(opened, settings.output, split, settings.tokens)
        kept = [
            {"module": name, "expert": expert, "made_of": list(group.experts)}
            for name, each in groups.items()
            for expert, group in enumerate(each)
        ]
        costs = [("all experts", whole), ("these experts", smaller)]
        costs += [(f"random experts {n + 1}", loss) for n, loss in enumerate(at_random)]
        return Tables(
            facts={
                "by": settings.by,
                "merged": settings.merge,
                "calibrated_on": f"train of {calibration.task.name}",
                "experts": layers[0].num_experts,
                "experts_left": len(next(iter(groups.values()))),
                "tokens_scored": tokens,
                "written": written["destination"],
                "format": written["format"],
                "parameters": written["parameters"],
                "notes": list(written["notes"]),
            },
            frames={
                "kept": pd.DataFrame(kept),
                "losses": pd.DataFrame(
                    {"model": name, "loss": loss, "change": loss - whole} for name, loss in costs
                ),
            },
            titles={"losses": "loss in nats per token, none of the random choices merged"},
        )


def format_of(opened: Evaluated) -> Format:
    """The weights' format, in which the smaller model is written, too."""
    if isinstance(opened.weights, FamilyWeights):
        return "huggingface"
    if isinstance(opened.weights, PlainWeights):
        return "safetensors"
    if isinstance(opened.weights, Checkpoint):
        return "polyad"
    raise ConfigError(
        f"{opened.weights.folder}: holds adapters; first merge them into the weights with `polyad "
        "convert --merge`"
    )


def sections_of(name: str, opened: Evaluated) -> dict[str, SparseMoEConfig]:
    """Returns the sections of sparse experts by key.

    Args:
        name: name of the command.
        opened: the weights.

    Raises:
        ConfigError: the model has none.
    """
    given = opened.weights.model_config().feed_forwards()
    sections = {key: each for key, each in given.items() if isinstance(each, SparseMoEConfig)}
    if not sections:
        kinds = ", ".join(f"{key}.kind: {each.kind}" for key, each in given.items())
        raise ConfigError(
            f"{name}: {opened.weights.folder}: {kinds}: only sparse experts (smoe) can be left out"
        )
    return sections


def check_share(key: str, config: SparseMoEConfig, keep: float) -> None:
    """Checks that a share of the experts removes some, and leaves enough for a token.

    Args:
        key: the section's key.
        config: the section.
        keep: the share that is kept.

    Raises:
        ConfigError: it does not.
    """
    left = left_of(config, keep)
    groups = config.num_groups
    # A token's experts are in the best groups, each of which must have enough of them.
    within = max(
        -(-config.top_k // config.top_groups), 2 if config.group_score == "best_two" else 1
    )
    least, most = within * groups, config.num_experts - groups
    if not least <= left <= most:
        used = f"{key}.top_k: {config.top_k}"
        if groups > 1:
            used += f" of {key}.top_groups: {config.top_groups} of num_groups: {groups}"
        allowed = f"{least} to {most} are allowed" if least <= most else "no number is allowed"
        raise ConfigError(
            f"--keep: {keep:g} leaves {left} of {config.num_experts} experts; {allowed} with {used}"
        )


def sparse_layers(model: nn.Module) -> list[RoutedLayer]:
    """The layers of sparse experts."""
    layers = routed_layers(model)
    return [each for each in layers if isinstance(model.get_submodule(each.name), SparseMoE)]


def left_of(config: SparseMoEConfig, keep: float) -> int:
    """The number of experts kept, equally many in each group that a router is limited to."""
    return config.num_groups * round(keep * config.num_experts / config.num_groups)


def config_of(model: nn.Module, layer: RoutedLayer) -> SparseMoEConfig:
    """The section of a layer of sparse experts."""
    module = model.get_submodule(layer.name)
    assert isinstance(module, SparseMoE)
    return module.config


def calibration_of(opened: Evaluated, data: str | None) -> Evaluated:
    """Opens the weights with the text on which experts are chosen; None: their own text."""
    if data is None:
        return opened
    return open_evaluated(opened.weights.folder, data, as_in(opened), opened.choice)


def as_in(opened: Evaluated) -> tuple[str, ...]:
    """Overrides to read other weights or data in the same way."""
    model: Any = opened.config.model
    return (
        f"train.precision={opened.config.train.precision}",
        f"model.sequence_length={model.sequence_length}",
        f"evaluation.batch_size={opened.batch_size}",
    )


def text_of(opened: Evaluated, split: str, tokens: int) -> TextSamples:
    """Returns the text of a split, as it is scored.

    Args:
        opened: weights with text.
        split: name of the split.
        tokens: approximate number of tokens to read.
    """
    assert isinstance(opened.task, TextTask)
    return TextSamples(opened.task, split, tokens, hidden=True)


def scored(
    calibration: Evaluated,
    model: nn.Module,
    layers: Sequence[RoutedLayer],
    world: comm.World,
    *,
    by: By,
    tokens: int,
    seed: int,
) -> tuple[Mapping[str, Tensor], Mapping[str, Moments]]:
    """Returns the scores of each layer's experts [E], of which the highest are kept, and moments.

    Args:
        calibration: the weights with the text whose train split is read.
        model: the weights' model.
        layers: layers of sparse experts.
        world: this process, alone.
        by: the criterion.
        tokens: approximate number of tokens to read.
        seed: seed of random choices.
    """
    calibration.task.check_split("train")
    text = text_of(calibration, "train", tokens)
    subject = Subject(model, layers, text, calibration.batch_size)
    moments = moments_of(*subject, world)
    if by == "atlas":
        sets = [[(expert,) for expert in range(layer.num_experts)] for layer in layers]
        scores = {
            each.layer.name: torch.tensor(each.of_all()).double()
            for each in knock_out(subject, sets, world=world)
        }
    elif by == "random":
        chance = torch.Generator().manual_seed(seed)
        scores = {each.name: torch.rand(each.num_experts, generator=chance) for each in layers}
    else:
        name_of = by.replace("-", "_")
        scores = {name: each.statistics()[name_of] for name, each in moments.items()}
    return scores, moments


def highest(score_E: Tensor, moments: Moments, config: SparseMoEConfig, keep: float) -> list[Group]:
    """The experts with the highest scores, equally many of each group that a router is limited
    to."""
    left, groups = left_of(config, keep) // config.num_groups, config.num_groups
    kept_GE = score_E.view(groups, -1).argsort(dim=1, descending=True, stable=True)[:, :left]
    first_G1 = torch.arange(groups).unsqueeze(1) * (config.num_experts // groups)
    return [Group.alone(expert) for expert in sorted((kept_GE + first_G1).flatten().tolist())]


def _merged(score_E: Tensor, moments: Moments, config: SparseMoEConfig, keep: float) -> list[Group]:
    """Groups experts with similar mean outputs, each weighted by its score.

    Uses average linkage over the distances of mean outputs (Chen et al. 2024, HC-SMoE).
    """
    from scipy.cluster.hierarchy import cut_tree, linkage

    tree = linkage(moments.mean_SD.numpy(), "average")
    labels = cut_tree(tree, left_of(config, keep))[:, 0].tolist()
    groups = []
    for label in dict.fromkeys(labels):
        experts = [expert for expert, each in enumerate(labels) if each == label]
        weights = score_E[experts].double().clamp_min(0)
        total = float(weights.sum())
        shares = (weights / total).tolist() if total > 0 else [1 / len(experts)] * len(experts)
        groups.append(Group(experts, shares))
    return groups


def random_experts(config: SparseMoEConfig, keep: float, seed: str) -> set[int]:
    """Random experts, equally many of each group that a router is limited to."""
    chance, size = random.Random(seed), config.num_experts // config.num_groups
    left = left_of(config, keep) // config.num_groups
    firsts = range(0, config.num_experts, size)
    return {first + each for first in firsts for each in chance.sample(range(size), left)}


def without_others(layer: RoutedLayer, kept: Collection[int]) -> Intervention:
    """An intervention that removes all other experts of a layer."""
    gone = tuple(each for each in range(layer.num_experts) if each not in kept)
    return Intervention(layer=layer.block, experts=gone, action=Action(how="prune"))


@torch.inference_mode()
def mean_loss(
    model: nn.Module, samples: TextSamples, batch_size: int, label: str
) -> tuple[float, int]:
    """Computes the mean loss of predicted tokens, in nats, and their number.

    Args:
        model: in evaluation mode, whole on this process.
        samples: the samples to read.
        batch_size: windows per forward pass.
        label: label on the console.
    """
    total, tokens = 0.0, 0
    for reading in read(model, [], samples, batch_size=batch_size, label=label):
        scored_BP = reading.batch.scored_BP
        loss_BP = losses(model, reading.output, reading.batch).double()
        total += float(loss_BP[scored_BP].sum())
        tokens += int(scored_BP.sum())
    return total / max(1, tokens), tokens


def _loss_of_written(opened: Evaluated, folder: Path, split: str, tokens: int) -> float:
    """The mean loss of the written model, loaded from its files."""
    data: Any = opened.config.data
    written = open_evaluated(folder, str(data.path), as_in(opened))
    with written.loaded("scoring what was written", split, needs_whole="it is scored") as (
        model,
        _,
    ):
        samples = text_of(written, split, tokens)
        return mean_loss(model, samples, opened.batch_size, "what was written")[0]
