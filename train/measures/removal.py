"""`polyad experts prune`: writes a model with fewer experts, and measures the cost.

Experts are chosen on text of the train split, or of other data (`--calibrate`), such as examples of
one domain; the cost is measured on held-out text, and compared with equally many random experts.

All layers that route keep the same number, since other libraries have one number for all layers. A
removed expert's row of the router is removed with it, and the next best experts take its tokens.
Every weight of merged experts, including the router's, is a weighted mean, although their units are
not aligned, as in the published methods (Chen et al. 2024, HC-SMoE).

Shapes: E experts of a layer, D width.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel import comm
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.families import FamilyWeights, Origin
from polyad.parallel.tensor_folder import PlainWeights
from polyad.parallel.weights import Weights
from polyad.train.config.faults import describe
from polyad.train.config.run import RunConfig
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed, Tree
from polyad.train.exchange.convert import convert, refuse_what_is_there
from polyad.train.exchange.writers import Format
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.moments import Moments
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.measures.knockout import knock_out
from polyad.train.measures.measure import Analysis
from polyad.train.reading import TOKENS, Evaluated, Subject, open_evaluated
from polyad.train.results import Tables
from polyad.train.tasks.samples import TextSamples, losses
from polyad.train.tasks.text import TextTask

By = Literal["atlas", "reap", "mone", "frequency", "probability", "mean-norm", "random"]
RANDOM_CHOICES = 3
"""Number of models with random experts with which the cost is compared."""


@dataclass(kw_only=True)
class Removal(Analysis):
    """Chooses experts, writes the smaller model, and measures its cost."""

    name = "prune"
    doing = "choosing experts"
    needs_whole = "experts are left out of a whole model"

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

    def check(self, opened: Evaluated, split: str) -> None:
        """Checks that every layer can keep the share of its experts."""
        opened.need(f"experts {self.name}", TextTask)
        sections, folder = opened.weights.model_config().feed_forwards(), opened.weights.folder
        counts = dict[str, int]()
        for key, each in sections.items():
            if not isinstance(each, SparseMoEConfig):
                continue
            if self.merge and each.num_groups > 1:
                raise ConfigError(
                    f"--merge: is not allowed with {key}.num_groups: {each.num_groups}; experts of "
                    "different groups cannot be merged"
                )
            _check_share(key, each, self.keep)
            counts[key] = _left_of(each, self.keep)
        if not counts:
            kinds = ", ".join(f"{key}.kind: {each.kind}" for key, each in sections.items())
            raise ConfigError(
                f"experts {self.name}: {folder}: {kinds}: only sparse experts (smoe) can be left "
                "out"
            )
        if len(set(counts.values())) > 1:
            counted = ", ".join(f"{left} in {key}" for key, left in counts.items())
            raise ConfigError(
                f"--keep: {self.keep:g} leaves {counted}, but all layers must keep equally many"
            )
        _format_of(opened)
        refuse_what_is_there(self.output)
        # Made of any experts: whatever is wrong with the smaller model is known before the reading.
        kept = [Group.alone(expert) for expert in range(min(counts.values()))]
        Pruning({"": kept}, self.text).of(opened.weights)

    def run(self, opened: Evaluated, split: str, model: nn.Module, world: comm.World) -> Tables:
        """Reads text to choose, writes, and reads other text with the models before and after."""
        import pandas as pd

        if world.size > 1:
            raise ConfigError(
                f"experts {self.name}: one process does it, and there are {world.size}"
            )
        layers = {
            layer: module.config
            for layer in routed_layers(model)
            if isinstance(module := model.get_submodule(layer.name), SparseMoE)
        }
        calibration = opened
        if self.calibrate is not None:
            calibration = open_evaluated(
                opened.weights.folder, self.calibrate, _as_in(opened), opened.choice
            )
        calibration.task.check_split("train")
        text = _text_of(calibration, "train", self.tokens)
        subject = Subject(model, [*layers], text, calibration.batch_size)
        moments = subject.moments(world)
        scores = self._scores(subject, moments, world)
        choose = _merged if self.merge else _highest
        groups = {
            layer.name: choose(scores[layer.name], moments[layer.name], config, self.keep)
            for layer, config in layers.items()
        }
        change, source = Pruning(groups, self.text), opened.weights.folder
        written = convert(source, self.output, _format_of(opened), change, opened.choice)
        held_out = Subject(model, [], _text_of(opened, split, self.tokens), opened.batch_size)
        whole, tokens = _mean_loss(held_out, "held-out text")
        at_random = []
        for number in range(RANDOM_CHOICES):
            seed = self.seed + 1 + number
            changes = [
                _without_random(layer, config, self.keep, f"{layer.name} {seed}")
                for layer, config in layers.items()
            ]
            with intervened(model, changes):
                label = f"without random experts {number + 1}/{RANDOM_CHOICES}"
                at_random.append(_mean_loss(held_out, label)[0])
        smaller = _loss_of_written(opened, self.output, split, self.tokens)
        kept = [
            {"module": name, "expert": expert, "made_of": list(group.experts)}
            for name, each in groups.items()
            for expert, group in enumerate(each)
        ]
        costs = [("all experts", whole), ("these experts", smaller)]
        costs += [(f"random experts {n + 1}", loss) for n, loss in enumerate(at_random)]
        return Tables(
            facts={
                "by": self.by,
                "merged": self.merge,
                "calibrated_on": f"train of {calibration.task.name}",
                "experts": next(iter(layers)).num_experts,
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

    def _scores(
        self, subject: Subject, moments: Mapping[str, Moments], world: comm.World
    ) -> Mapping[str, Tensor]:
        """The scores of each layer's experts [E], of which the highest are kept."""
        layers = subject.layers
        if self.by == "atlas":
            sets = [[(expert,) for expert in range(layer.num_experts)] for layer in layers]
            return {
                each.layer.name: torch.tensor(each.of_all()).double()
                for each in knock_out(subject, sets, world=world)
            }
        if self.by == "random":
            chance = torch.Generator().manual_seed(self.seed)
            return {each.name: torch.rand(each.num_experts, generator=chance) for each in layers}
        statistic = self.by.replace("-", "_")
        return {name: each.statistics()[statistic] for name, each in moments.items()}


def _format_of(opened: Evaluated) -> Format:
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


def _check_share(key: str, config: SparseMoEConfig, keep: float) -> None:
    """Checks that a share of the experts removes some, and leaves enough for a token.

    Args:
        key: the section's key.
        config: the section.
        keep: the share that is kept.

    Raises:
        ConfigError: it does not.
    """
    left = _left_of(config, keep)
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


def _left_of(config: SparseMoEConfig, keep: float) -> int:
    """The number of experts kept, equally many in each group that a router is limited to."""
    return config.num_groups * round(keep * config.num_experts / config.num_groups)


def _as_in(opened: Evaluated) -> tuple[str, ...]:
    """Overrides to read other weights or data in the same way."""
    model: Any = opened.config.model
    return (
        f"train.precision={opened.config.train.precision}",
        f"model.sequence_length={model.sequence_length}",
        f"evaluation.batch_size={opened.batch_size}",
    )


def _text_of(opened: Evaluated, split: str, tokens: int) -> TextSamples:
    """Returns the text of a split, as it is scored.

    Args:
        opened: weights with text.
        split: name of the split.
        tokens: approximate number of tokens to read.
    """
    assert isinstance(opened.task, TextTask)
    return TextSamples(opened.task, split, tokens, hidden=True)


def _highest(
    score_E: Tensor, moments: Moments, config: SparseMoEConfig, keep: float
) -> "list[Group]":
    """The experts with the highest scores, equally many of each group that a router is limited
    to."""
    left, groups = _left_of(config, keep) // config.num_groups, config.num_groups
    kept_GE = score_E.view(groups, -1).argsort(dim=1, descending=True, stable=True)[:, :left]
    first_G1 = torch.arange(groups).unsqueeze(1) * (config.num_experts // groups)
    return [Group.alone(expert) for expert in sorted((kept_GE + first_G1).flatten().tolist())]


def _merged(
    score_E: Tensor, moments: Moments, config: SparseMoEConfig, keep: float
) -> "list[Group]":
    """Groups experts with similar mean outputs, each weighted by its score.

    Uses average linkage over the distances of mean outputs (Chen et al. 2024, HC-SMoE).
    """
    from scipy.cluster.hierarchy import cut_tree, linkage

    tree = linkage(moments.mean_SD.numpy(), "average")
    labels = cut_tree(tree, _left_of(config, keep))[:, 0].tolist()
    groups = []
    for label in dict.fromkeys(labels):
        experts = [expert for expert, each in enumerate(labels) if each == label]
        weights = score_E[experts].double().clamp_min(0)
        total = float(weights.sum())
        shares = (weights / total).tolist() if total > 0 else [1 / len(experts)] * len(experts)
        groups.append(Group(experts, shares))
    return groups


def _without_random(
    layer: RoutedLayer, config: SparseMoEConfig, keep: float, seed: str
) -> Intervention:
    """An intervention that keeps random experts of a layer, equally many of each group that a
    router is limited to."""
    chance, size = random.Random(seed), config.num_experts // config.num_groups
    left = _left_of(config, keep) // config.num_groups
    firsts = range(0, config.num_experts, size)
    kept = {first + each for first in firsts for each in chance.sample(range(size), left)}
    gone = tuple(each for each in range(layer.num_experts) if each not in kept)
    return Intervention(layer=layer.block, experts=gone, how="prune")


@torch.inference_mode()
def _mean_loss(subject: Subject, label: str) -> tuple[float, int]:
    """The mean loss of predicted tokens, in nats, and their number."""
    total, tokens = 0.0, 0
    for reading in subject.read(label=label):
        scored_BP = reading.batch.scored_BP
        loss_BP = losses(subject.model, reading.output, reading.batch).double()
        total += float(loss_BP[scored_BP].sum())
        tokens += int(scored_BP.sum())
    return total / max(1, tokens), tokens


def _loss_of_written(opened: Evaluated, folder: Path, split: str, tokens: int) -> float:
    """The mean loss of the written model, loaded from its files."""
    data: Any = opened.config.data
    written = open_evaluated(folder, str(data.path), _as_in(opened))
    why = "it is scored"
    with written.loaded("scoring what was written", split, needs_whole=why) as (model, _):
        subject = Subject(model, [], _text_of(written, split, tokens), opened.batch_size)
        return _mean_loss(subject, "what was written")[0]


EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Other libraries' names for the number of experts in config.json."""


class Group(NamedTuple):
    """Experts that are merged into one."""

    experts: Sequence[int]
    shares: Sequence[float]
    """The weight of each in the mean; they sum to 1."""

    @classmethod
    def alone(cls, expert: int) -> "Group":
        """A group of a single, unchanged expert."""
        return cls([expert], [1.0])


Groups = Mapping[str, Sequence[Group]]
"""The experts of the smaller model in order, by layer such as blocks.3.feed_forward."""


class Pruning(Change):
    """Reduces the experts of a model.

    Args:
        groups: the groups of experts in each layer; all layers have equally many.
        text: how they were chosen.
    """

    name, done = "experts prune", "pruned"

    def __init__(self, groups: Groups, text: str) -> None:
        self.groups, self.text = groups, text
        self.num_experts = len(next(iter(groups.values())))

    def error(self, message: str) -> ConfigError:
        """An error about the options."""
        return ConfigError(f"{self.text}: {message}")

    def of(self, weights: Weights) -> "Pruned":
        """The smaller model's weights."""
        return Pruned(weights, self)

    def origin(self, origin: Origin) -> Origin:
        """The files of the weights' folder, with fewer experts."""
        config = dict(origin.config)
        for key in EXPERTS_KEYS:
            if key in config:
                config[key] = self.num_experts
        return origin.model_copy(update={"config": config})


class Pruned(Changed):
    """The weights of a model with fewer experts.

    Raises:
        ConfigError: a model cannot have so few.
    """

    def __init__(self, weights: Weights, pruning: Pruning) -> None:
        self._groups = pruning.groups
        super().__init__(weights, pruning, _smaller(weights.model_config(), pruning))

    def whole(self, name: str) -> Tensor:
        """A whole weight, fp32, of the remaining experts."""
        value = self._weights.whole(name)
        return value if tuple(value.shape) == self._shapes[name] else self._kept(name, value)

    def buffer(self, name: str) -> Tensor:
        """A persistent buffer, of the remaining experts."""
        value = self._weights.buffer(name)
        shape = self._model.get_buffer(name).shape
        return value if value.shape == shape else self._kept(name, value).to(value.dtype)

    def _kept(self, name: str, value: Tensor) -> Tensor:
        layer = next(layer for layer in self._groups if name.startswith(f"{layer}."))
        rows = []
        for experts, shares in self._groups[layer]:
            if len(experts) == 1:
                rows.append(value[experts[0]])
            else:
                share_E = torch.tensor(list(shares), dtype=torch.float64)
                rows.append(torch.tensordot(share_E, value[list(experts)].double(), 1).float())
        return torch.stack(rows)

    def notes(self) -> list[str]:
        """Notes how outputs compare with the first model's."""
        if any(len(group.experts) > 1 for groups in self._groups.values() for group in groups):
            return ["merged experts are averages of weights and compute something new"]
        return ["tokens of removed experts go to their next best; the other experts are unchanged"]


def _smaller(config: ModelSettings, pruning: Pruning) -> ModelSettings:
    """The configuration with fewer experts."""
    tree = config.model_dump(mode="json")
    for key, section in config.feed_forwards().items():
        if not isinstance(section, SparseMoEConfig):
            continue
        # The default is half of the experts, but existing keys keep their width.
        width = {"score_width": section.score_size()} if section.score != "linear" else {}
        pool = {"pool_least": section.pool_least, "pool_most": section.pool_most}
        bounds = {name: min(d, pruning.num_experts) for name, d in pool.items() if d is not None}
        tree[key.removeprefix("model.")] |= {"num_experts": pruning.num_experts} | width | bounds
    try:
        return Tree.model_validate({"model": tree}).model
    except ValidationError as error:
        raise pruning.error(describe(error, RunConfig)) from None
