"""Combines adapters and their base: presents the checkpoint of a LoRA run as whole weights.

Such a checkpoint has no frozen weights: `checkpoint.init_from` in its configuration says where they
are, and `base_digest` in `state.json` identifies them.
"""

from collections.abc import Collection
from pathlib import Path

import torch
import xxhash
from pydantic import ValidationError

from polyad.model.build import build_model
from polyad.model.lora import AdaptConfig, LoRAConfig, adapters, add_lora, of_base
from polyad.parallel.checkpoint.format import (
    CONFIG_FILE,
    OF_WEIGHTS,
    Box,
    CheckpointError,
    Contents,
    damaged,
    fault_of,
)
from polyad.parallel.checkpoint.load import Checkpoint
from polyad.parallel.source import StoredWeights


def digest_of(base: StoredWeights, names: Collection[str]) -> str:
    """Identifies a base: the xxh3 of names, shapes and fp32 values.

    Args:
        base: the weights; each is read once, one at a time.
        names: the names to include: the frozen weights.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(names):
        value = base.whole(name).contiguous()
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.view(-1).numpy().data)
    return digest.hexdigest()


def check_base(origin: Path, trained_on: str | None, base: StoredWeights, found: str) -> None:
    """Checks that a checkpoint's adapters belong to these weights.

    Args:
        origin: the checkpoint's folder.
        trained_on: the digest in the checkpoint.
        base: the weights.
        found: the digest of these weights.

    Raises:
        CheckpointError: the adapters belong to other weights.
    """
    if trained_on != found:
        raise CheckpointError(
            f"{origin}: its adapters belong to a different base model: digest {trained_on} there, "
            f"{found} in {base.folder}; checkpoint.init_from must name the weights that they were "
            "trained on"
        )


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint of adapters with its base, whose weights are whole with the adapters merged in.

    Args:
        folder: the folder of the checkpoint.
        contents: its small files.
        base: the weights that its configuration names, of the same model.
        lora: the adapters.

    Raises:
        CheckpointError: its adapters belong to another base.
    """

    def __init__(
        self, folder: Path, contents: Contents, base: StoredWeights, lora: LoRAConfig
    ) -> None:
        super().__init__(folder, contents)
        self.base, self.lora = base, lora
        model = build_model(self.model_config())
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        add_lora(model, lora)
        self.frozen = of_base(model)
        """Names of the weights that come from the base."""
        self.adapters = {weight: (path, adapter) for weight, path, adapter in adapters(model)}
        """By adapted weight: the adapter's own name, and the adapter."""
        self.base_digest = digest_of(base, self.frozen)
        check_base(folder, self.state.base_digest, base, self.base_digest)
        self._last: tuple[str, torch.Tensor] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns global shapes of the model's weights by name."""
        return self._shapes

    def read(self, box: Box) -> torch.Tensor:
        """Reads a box like `Checkpoint.read`; adapters are merged into weights."""
        if box.field not in OF_WEIGHTS or box.name not in self._shapes:
            return super().read(box)
        if self._shapes[box.name] != tuple(box.shape):
            raise CheckpointError(
                f"{self.folder}: {box.name} has shape {list(self._shapes[box.name])} there, "
                f"{list(box.shape)} in this model"
            )
        return self.whole(box.name)[box.slices].clone()

    def whole(self, name: str, field: str | None = None) -> torch.Tensor:
        """Reads a tensor like `Checkpoint.whole`; adapters are merged into weights."""
        if name not in self._shapes or not (field is None or field in OF_WEIGHTS):
            return self.own(name, field)
        if self._last is None or self._last[0] != name:
            value = self.base.whole(name) if name in self.frozen else self.own(name)
            if name in self.adapters:
                path, adapter = self.adapters[name]
                value = value + adapter.delta(self.own(f"{path}.A"), self.own(f"{path}.B"))
            self._last = name, value
        return self._last[1]

    def take_average(self) -> None:
        """See `Checkpoint.take_average`; the base has not changed."""
        super().take_average()
        self._last = None


def lora_of(checkpoint: Checkpoint) -> LoRAConfig | None:
    """Returns the adapters of a checkpoint, from its configuration; None if it has whole weights.

    Raises:
        CheckpointError: another version wrote its configuration.
    """
    try:
        return AdaptConfig.model_validate(checkpoint.section("adapt")).lora
    except ValidationError as error:
        raise damaged(checkpoint.folder / CONFIG_FILE, f"adapt.{fault_of(error)}") from None
