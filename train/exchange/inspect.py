"""`polyad inspect`: shows the contents of a folder of weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyad.model.build import build_model
from polyad.model.smoe.config import SelectingConfig
from polyad.parallel.families import FamilyWeights
from polyad.parallel.weights import open_weights
from polyad.train.config.adaptation import unused_parameters
from polyad.train.results import aligned


@dataclass(frozen=True)
class Tensor:
    """A weight, and its tensors in the folder."""

    name: str
    """Our name."""
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    """Names in the folder; empty if these are ours."""


@dataclass(frozen=True)
class Inspected:
    """Contents of a folder, a checkpoint or a run."""

    folder: str
    family: str
    """The family of models of another library; `Polyad` for our own."""
    model: dict[str, Any]
    """The section `model` of a configuration."""
    parameters: int
    active_parameters: int
    """Parameters active per token."""
    routed_blocks: tuple[int, ...]
    """Numbers of the blocks that select experts."""
    num_experts: int
    """Number of experts in such a block; 0: there is none."""
    top_k: int
    tensors: tuple[Tensor, ...]
    not_read: tuple[str, ...]
    """Tensors in the folder that are not used."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for display, without the tensors."""
        rows = [
            ("folder", self.folder),
            ("family", self.family),
            ("parameters", f"{self.parameters:,}, {self.active_parameters:,} active per token"),
        ]
        if self.num_experts:
            blocks = len(self.routed_blocks)
            said = f"{self.num_experts} in each of {blocks} blocks, {self.top_k} for each token"
            rows.append(("experts", said))
        rows.append(("tensors", f"{len(self.tensors)} here"))
        if self.not_read:
            more = f" and {len(self.not_read) - 3} more" if len(self.not_read) > 3 else ""
            rows.append(("not read", f"{', '.join(self.not_read[:3])}{more}"))
        return rows

    def text(self, tensors: bool = False) -> str:
        """Returns aligned lines.

        Args:
            tensors: whether to add a line for each tensor.
        """
        lines = aligned(self.rows(), "<<")
        if tensors:
            table = [
                (each.name, " x ".join(map(str, each.shape)), _stored_in_words(each.stored))
                for each in self.tensors
            ]
            lines += ["", *aligned([("name", "shape", "in the folder"), *table], "<")]
        return "\n".join(lines)


def inspect(path: Path) -> Inspected:
    """Opens weights, checks that every tensor is accounted for, and describes them.

    Args:
        path: a folder of another library, a checkpoint, a run, or exported weights.

    Raises:
        ValueError: they cannot be opened, or contain something unknown; one line says what.
    """
    weights = open_weights(path)
    config = weights.model_config()
    model = build_model(config)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    parameters = sum(map(math.prod, shapes.values()))
    family, not_read = "Polyad", tuple[str, ...]()
    stored = dict[str, tuple[str, ...]]()
    if isinstance(weights, FamilyWeights):
        family = weights.family.title
        stored = {name: tuple(weights.stored_names(name)) for name in shapes}
        not_read = weights.unread()
    blocks = [
        (number, each)
        for number, each in enumerate(config.block_feed_forwards())
        if isinstance(each, SelectingConfig)
    ]
    experts = blocks[0][1] if blocks else None
    return Inspected(
        folder=str(path),
        family=family,
        model=config.model_dump(mode="json"),
        parameters=parameters,
        active_parameters=parameters - unused_parameters(model),
        routed_blocks=tuple(number for number, _ in blocks),
        num_experts=0 if experts is None else experts.num_experts,
        top_k=0 if experts is None else experts.known_final_top_k(),
        tensors=tuple(Tensor(name, shape, stored.get(name, ())) for name, shape in shapes.items()),
        not_read=not_read,
    )


def _stored_in_words(names: tuple[str, ...]) -> str:
    if len(names) < 3:
        return ", ".join(names) or "the same"
    return f"{names[0]} ... {names[-1]}"
