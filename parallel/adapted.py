"""Adapters and their base: the checkpoint of a run with LoRA as whole weights.

A checkpoint of such a run has no frozen weights: its configuration says in `checkpoint.init_from`
where they are, and `state.json` in `base_digest` which they have to be.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.lora import AdaptConfig, LoRAConfig, adapters, add_lora, of_base
from polyad.model.patterns import PatternError
from polyad.parallel.checkpoint.box import MASTER, OF_WEIGHTS, Box
from polyad.parallel.checkpoint.format import CheckpointError, damaged
from polyad.parallel.checkpoint.reading import Checkpoint
from polyad.parallel.checkpoint.verification import Contents
from polyad.parallel.tensor_folder import differing_shapes


class WholeWeights(Protocol):
    """Weights in any format, one whole tensor at a time."""

    folder: Path

    def whole(self, name: str) -> torch.Tensor:
        """A whole weight, fp32."""
        ...

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer of the model, whole."""
        ...


def digest_of(base: WholeWeights, names: Collection[str]) -> str:
    """Tells one base from another: the xxh3 of names, shapes and fp32 values.

    Args:
        base: the weights; each is read once, and one is held at a time.
        names: of those that count: the frozen ones.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(names):
        value = base.whole(name).contiguous()
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.view(-1).numpy().data)
    return digest.hexdigest()


def check_base(origin: Path, trained_on: str | None, base: WholeWeights, found: str) -> None:
    """Checks that a checkpoint's adapters are of these weights.

    Args:
        origin: the checkpoint's folder.
        trained_on: the digest that it has.
        base: the weights.
        found: their digest.

    Raises:
        CheckpointError: they are of others.
    """
    if trained_on != found:
        raise CheckpointError(
            f"{origin}: its adapters belong to a different base model: digest {trained_on} there, "
            f"{found} in {base.folder}; checkpoint.init_from must name the weights that they were "
            "trained on"
        )


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint of adapters with its base: weights are whole, and the adapters merged into them.

    Args:
        folder: the checkpoint's.
        contents: its small files.
        base: the weights that its configuration names, of its model.
        lora: the adapters.

    Raises:
        CheckpointError: it holds other adapters, or they are of another base.
    """

    def __init__(
        self, folder: Path, contents: Contents, base: WholeWeights, lora: LoRAConfig
    ) -> None:
        super().__init__(folder, contents)
        self.base, self.lora = base, lora
        model = build_model(self.model_config())
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        try:
            add_lora(model, lora)
        except PatternError as error:
            raise damaged(folder / "config.yaml", str(error)) from None
        self.frozen = of_base(model)
        """Names of the weights that are the base's alone."""
        self.adapters = {weight: (path, adapter) for weight, path, adapter in adapters(model)}
        """By the weight that each is beside: its own name, and the adapter."""
        ours = {n: tuple(p.shape) for n, p in model.named_parameters() if n not in self.frozen}
        if differing := differing_shapes(super().shapes(), ours):
            raise CheckpointError(
                f"{folder}: holds different adapters than its configuration says: {differing}"
            )
        self.base_digest = digest_of(base, self.frozen)
        check_base(folder, self.state.base_digest, base, self.base_digest)
        self._last: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of the model's weights by name."""
        return self._shapes

    def read(self, box: Box) -> torch.Tensor:
        """Reads like `Checkpoint.read`; weights have their adapters merged into them."""
        if box.field not in OF_WEIGHTS or box.name not in self._shapes:
            return super().read(box)
        if self._shapes[box.name] != tuple(box.shape):
            raise CheckpointError(
                f"{self.folder}: {box.name} has shape {list(self._shapes[box.name])} there, "
                f"{list(box.shape)} in this model"
            )
        return self.whole(box.name)[box.slices].clone()

    def whole(self, name: str, field: str | None = None) -> torch.Tensor:
        """Reads like `Checkpoint.whole`; weights have their adapters merged into them."""
        if name not in self._shapes or not (field is None or field in OF_WEIGHTS):
            return self.own(name, field)
        if self._last is None or self._last[0] != name:
            value = self.base.whole(name) if name in self.frozen else self.own(name)
            if name in self.adapters:
                path, adapter = self.adapters[name]
                value = value + adapter.delta(self.own(f"{path}.A"), self.own(f"{path}.B"))
            self._last = name, value
        return self._last[1]

    def own(self, name: str, field: str | None = None) -> torch.Tensor:
        """A tensor that the checkpoint itself has, whole."""
        field = field or (self._chosen if self._chosen in self.tensors[name] else MASTER)
        return super().read(Box.whole(name, field, self.tensors[name][field].shape))

    def take_average(self) -> None:
        """See `Checkpoint.take_average`; the base has not changed."""
        super().take_average()
        self._last = None


def lora_of(checkpoint: Checkpoint) -> LoRAConfig | None:
    """The adapters that a checkpoint is of, by its configuration; None: it has whole weights.

    Raises:
        CheckpointError: its configuration is damaged.
    """
    section = checkpoint.section("adapt")
    if section is None:
        return None
    try:
        return AdaptConfig.model_validate(section).lora
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(("adapt", *map(str, first["loc"])))
        raise damaged(checkpoint.folder / "config.yaml", f"{key}: {first['msg']}") from None


def base_of(checkpoint: Checkpoint) -> Path:
    """Where the base of a checkpoint of adapters is, by its configuration.

    Raises:
        CheckpointError: its configuration does not say so.
    """
    section = checkpoint.section("checkpoint")
    path = section.get("init_from") if isinstance(section, dict) else None
    if not isinstance(path, str):
        raise damaged(
            checkpoint.folder / "config.yaml",
            "checkpoint.init_from: is missing, but adapters need their base model",
        )
    return Path(path)
