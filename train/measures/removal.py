"""`polyad experts prune`: writes a model with fewer experts, and measures the cost.

Experts are chosen on text of the train split, or of other data (`--calibrate`), such as examples of
one domain; the cost is measured on held-out text, and compared with equally many random experts.

All layers that route keep the same number, since other libraries have one number for all layers. A
removed expert's row of the router is removed with it, and the next best experts take its tokens.
Every weight of merged experts, including the router's, is a weighted mean, although their units are
not aligned, as in the published methods (Chen et al. 2024, HC-SMoE).

Shapes: E experts of a layer, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyad.model.build import build_model
from polyad.model.foreign import TheirExperts
from polyad.model.settings import ModelSettings
from polyad.model.smoe.config import SparseMoEConfig
from polyad.model.smoe.layer import SparseMoE
from polyad.parallel import comm
from polyad.parallel.families import Origin
from polyad.parallel.foreign import COUNTS, TheirWeights, write_with_fewer
from polyad.parallel.weights import Weights
from polyad.train.errors import ConfigError
from polyad.train.exchange.change import Change, Changed
from polyad.train.exchange.convert import check_adapters, convert, format_of, refuse_what_is_there
from polyad.train.experts.information import Moments
from polyad.train.experts.interventions import Intervention, intervened
from polyad.train.experts.probing import RoutedLayer, routed_layers
from polyad.train.measures.knockout import knock_out
from polyad.train.measures.measure import Analysis
from polyad.train.reading import TOKENS, EvaluationContext, Subject, open_evaluated
from polyad.train.results import Tables
from polyad.train.tasks.samples import losses
from polyad.train.tasks.text import TextTask

By = Literal["atlas", "reap", "mone", "frequency", "probability"]
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

    @property
    def text(self) -> str:
        """The options that choose the experts."""
        return f"--by {self.by} --keep {self.keep:g}" + " --merge" * self.merge

    def check(self, opened: EvaluationContext) -> None:
        """Checks that every layer can keep the share of its experts."""
        opened.need(f"experts {self.name}", TextTask)
        sparse = _sparse(build_model(opened.weights.model_config()))
        if not sparse:
            kind = opened.weights.model_config().known_feed_forward().kind
            raise ConfigError(
                f"experts {self.name}: {opened.weights.folder}: model.feed_forward.kind: {kind}: "
                "only sparse experts (smoe) can be left out"
            )
        for layer, each in sparse.items():
            if self.merge and each.num_groups > 1:
                raise ConfigError(
                    f"--merge: is not allowed with {layer.name}.num_groups: {each.num_groups}; "
                    "experts of different groups cannot be merged"
                )
        left = {_left_of(each, self.keep) for each in sparse.values()}
        if len(left) > 1 or any(each.num_experts in left for each in sparse.values()):
            raise ConfigError(
                f"--keep: {self.keep:g} leaves {' and '.join(map(str, left))} experts: all layers "
                "must keep equally many, and fewer than they have"
            )
        refuse_what_is_there(self.output)
        if isinstance(opened.weights, TheirWeights):
            return
        check_adapters(opened.weights, format_of(opened.weights), merge=False)
        # Made of any experts: whatever is wrong with the smaller model is known before the reading.
        kept = [{expert: 1.0} for expert in range(*left)]
        Changed(opened.weights, Pruning({"": kept}, self.text))

    def run(self, opened: EvaluationContext, model: nn.Module, world: comm.World) -> Tables:
        """Reads text to choose, writes, and reads other text with the models before and after."""
        import pandas as pd

        if world.size > 1:
            raise ConfigError(
                f"experts {self.name}: one process does it, and there are {world.size}"
            )
        layers = _sparse(model)
        calibration = opened
        if self.calibrate is not None:
            calibration = open_evaluated(
                opened.weights.folder, self.calibrate, _as_in(opened), opened.choice
            )
        calibration.task.check_split("train")
        text = calibration._replace(split="train").text(self.tokens)
        subject = Subject(model, [*layers], text, calibration.batch_size)
        moments = subject.moments(world)
        scores = self._scores(subject, moments, world)
        groups: Groups = {
            layer.name: (
                _merged(scores[layer.name], moments[layer.name], config, self.keep)
                if self.merge
                else [{expert: 1.0} for expert in _highest(scores[layer.name], config, self.keep)]
            )
            for layer, config in layers.items()
        }
        written = self._write(groups, opened)
        held_out = Subject(model, [], opened.text(self.tokens), opened.batch_size)
        whole, tokens = _mean_loss(held_out, "held-out text")
        smaller = _loss_of_written(opened, self.output, self.tokens)
        costs = {"all experts": whole, "these experts": smaller}
        for number in range(1, RANDOM_CHOICES + 1):
            chance, changes = torch.Generator().manual_seed(number), list[Intervention]()
            for layer, config in layers.items():
                stay = _highest(torch.rand(layer.num_experts, generator=chance), config, self.keep)
                gone = tuple(each for each in range(layer.num_experts) if each not in stay)
                changes.append(Intervention(layer=layer.block, experts=gone, how="prune"))
            with intervened(model, changes):
                label = f"without random experts {number}/{RANDOM_CHOICES}"
                costs[f"random experts {number}"], _ = _mean_loss(held_out, label)
        kept = [
            {"module": name, "expert": expert, "made_of": list(group)}
            for name, each in groups.items()
            for expert, group in enumerate(each)
        ]
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
                    {"model": name, "loss": loss, "change": loss - whole}
                    for name, loss in costs.items()
                ),
            },
            titles={"losses": "loss in nats per token, none of the random choices merged"},
        )

    def _write(self, groups: "Groups", opened: EvaluationContext) -> Mapping[str, Any]:
        """Writes the smaller model, and describes what was written."""
        weights, change = opened.weights, Pruning(groups, self.text)
        if not isinstance(weights, TheirWeights):
            kind = format_of(weights)
            return convert(weights.folder, self.output, kind, change, opened.choice)
        return {
            "destination": str(self.output),
            "format": "huggingface",
            "parameters": write_with_fewer(weights, groups, self.output),
            "notes": change.notes(weights.model_config()),
        }

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
        return {name: each.statistics()[self.by] for name, each in moments.items()}


def _sparse(model: nn.Module) -> dict[RoutedLayer, SparseMoEConfig]:
    """The layers whose experts can be left out, with their configurations."""
    return {
        layer: module.config
        for layer in routed_layers(model)
        if isinstance(module := model.get_submodule(layer.name), SparseMoE | TheirExperts)
    }


def _left_of(config: SparseMoEConfig, keep: float) -> int:
    """The number of experts kept, equally many in each group that a router is limited to."""
    return config.num_groups * round(keep * config.num_experts / config.num_groups)


def _as_in(opened: EvaluationContext) -> tuple[str, ...]:
    """Overrides to read other weights or data in the same way."""
    model: Any = opened.config.model
    return (
        f"train.precision={opened.config.train.precision}",
        f"model.sequence_length={model.sequence_length}",
        f"evaluation.batch_size={opened.batch_size}",
    )


def _highest(score_E: Tensor, config: SparseMoEConfig, keep: float) -> list[int]:
    """The experts with the highest scores, equally many of each group that a router is limited
    to."""
    left, groups = _left_of(config, keep) // config.num_groups, config.num_groups
    kept_GE = score_E.view(groups, -1).argsort(dim=1, descending=True, stable=True)[:, :left]
    first_G1 = torch.arange(groups).unsqueeze(1) * (config.num_experts // groups)
    return sorted((kept_GE + first_G1).flatten().tolist())


def _merged(
    score_E: Tensor, moments: Moments, config: SparseMoEConfig, keep: float
) -> list[dict[int, float]]:
    """Groups experts with similar mean outputs, each weighted by its score.

    Uses average linkage over the distances of mean outputs (Chen et al. 2024, HC-SMoE).
    """
    from scipy.cluster.hierarchy import cut_tree, linkage

    tree = linkage(moments.mean_SD.numpy(), "average")
    groups: dict[int, dict[int, float]] = {}
    for expert, label in enumerate(cut_tree(tree, _left_of(config, keep))[:, 0].tolist()):
        groups.setdefault(label, {})[expert] = max(0.0, float(score_E[expert]))
    for group in groups.values():
        total = sum(group.values())
        group |= {e: share / total if total else 1 / len(group) for e, share in group.items()}
    return list(groups.values())


@torch.inference_mode()
def _mean_loss(subject: Subject, label: str) -> tuple[float, int]:
    """The mean loss of predicted tokens, in nats, and their number."""
    total, tokens = 0.0, 0
    for forward_pass in subject.read(label=label):
        scored_BP = forward_pass.batch.scored_BP
        loss_BP = losses(subject.model, forward_pass.output, forward_pass.batch).double()
        total += float(loss_BP[scored_BP].sum())
        tokens += int(scored_BP.sum())
    return total / max(1, tokens), tokens


def _loss_of_written(opened: EvaluationContext, folder: Path, tokens: int) -> float:
    """The mean loss of the written model, loaded from its files."""
    data: Any = opened.config.data
    written = open_evaluated(folder, str(data.path), _as_in(opened))._replace(split=opened.split)
    why = "it is scored"
    with written.loaded("scoring what was written", opened.split, needs_whole=why) as (model, _):
        subject = Subject(model, [], written.text(tokens), opened.batch_size)
        return _mean_loss(subject, "what was written")[0]


Groups = Mapping[str, Sequence[Mapping[int, float]]]
"""The experts of a smaller model in order, by layer such as blocks.3.feed_forward: the shares of
experts of the first model in each, which sum to 1."""


class Pruning(Change):
    """Reduces the experts of a model.

    Args:
        groups: the experts of the smaller model, equally many in all layers.
        text: how they were chosen.
    """

    name, done = "experts prune", "pruned"

    def __init__(self, groups: Groups, text: str) -> None:
        self.groups, self.text = groups, text
        self.num_experts = len(next(iter(groups.values())))

    def error(self, message: str) -> ConfigError:
        """An error about the options."""
        return ConfigError(f"{self.text}: {message}")

    def notes(self, config: ModelSettings) -> list[str]:
        """Notes how outputs compare with the first model's."""
        if any(len(group) > 1 for groups in self.groups.values() for group in groups):
            return ["merged experts are averages of weights and compute something new"]
        return ["tokens of removed experts go to their next best; the other experts are unchanged"]

    def model_config(self, weights: Weights) -> ModelSettings:
        """The configuration with fewer experts."""
        config = weights.model_config()
        tree = config.model_dump(mode="json")
        for key, section in config.feed_forwards().items():
            if not isinstance(section, SparseMoEConfig):
                continue
            # The default is half of the experts, but existing keys keep their width.
            width = {"score_width": section.score_size()} if section.score != "linear" else {}
            pool = {"pool_least": section.pool_least, "pool_most": section.pool_most}
            bounds = {name: min(d, self.num_experts) for name, d in pool.items() if d is not None}
            tree[key.removeprefix("model.")] |= {"num_experts": self.num_experts} | width | bounds
        return self.validated(tree)

    def made(self, model: Changed, name: str) -> Tensor:
        """The part of a weight or buffer that belongs to the remaining experts."""
        is_weight = name in model.shapes
        value = model.before.whole(name) if is_weight else model.before.buffer(name)
        layer = next(layer for layer in self.groups if name.startswith(f"{layer}."))
        rows = []
        for group in self.groups[layer]:
            share_E = torch.tensor([*group.values()], dtype=torch.float64)
            mean = torch.tensordot(share_E, value[[*group]].double(), 1)
            rows.append(mean.to(value.dtype))
        return torch.stack(rows)

    def origin(self, origin: Origin) -> Origin:
        """The files of the weights' folder, with fewer experts."""
        counts = {key: self.num_experts for key in COUNTS if key in origin.config}
        return origin.model_copy(update={"config": origin.config | counts})
