"""Opens a model's weights in any format: a checkpoint, Hugging Face, or plain safetensors; merges
adapters into their base, and streams a decoder that is larger than memory."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import xxhash
from pydantic import ValidationError
from torch import nn

from polyad.model.build import build_model, initial_value, place
from polyad.model.decoder import Decoder, DecoderConfig, DecoderSettings
from polyad.model.lora import AdaptConfig, LoRAConfig, adapters, add_lora, of_base
from polyad.model.settings import ModelSettings
from polyad.parallel.checkpoint.format import (
    CONFIG_FILE,
    OF_WEIGHTS,
    Box,
    CheckpointError,
    Contents,
    NotFiniteError,
    damaged,
    fault_of,
)
from polyad.parallel.checkpoint.load import Checkpoint, find_checkpoint, read_newest
from polyad.parallel.families import FamilyWeights, is_huggingface_folder
from polyad.parallel.foreign import TheirWeights, open_folder
from polyad.parallel.fragments import persistent_buffers
from polyad.parallel.peft import PeftWeights, is_peft_folder
from polyad.parallel.source import StoredWeights
from polyad.parallel.tensor_folder import PlainWeights, is_plain_folder
from polyad.parallel.zero import DTYPES, Precision


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

    Such a checkpoint has no frozen weights: `checkpoint.init_from` in its configuration says where
    they are, and `base_digest` in `state.json` identifies them.

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
        assert self._shapes[box.name] == tuple(box.shape), box.name  # `check_model` has compared
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
        """Uses the averages of the adapters, on the unchanged base."""
        super().take_average()
        self._last = None


Weights: TypeAlias = Checkpoint | FamilyWeights | PlainWeights | TheirWeights
"""A model's weights in any format: names, shapes and whole tensors, read one at a time."""
Choice = Literal["trained", "ema"]
"""The weights of a checkpoint to use: the trained ones, or their moving average (`train.ema`)."""


def is_weights_folder(path: Path) -> bool:
    """Returns whether a path is a folder of weights, of other libraries or under our names, and not
    a checkpoint or run."""
    return is_huggingface_folder(path) or is_peft_folder(path) or is_plain_folder(path)


def open_weights(path: Path, choice: Choice = "trained", base: Path | None = None) -> Weights:
    """Opens the weights at a path: a checkpoint, a run's newest one, another library's folder (a
    decoder, BERT, ViT or CLIP), peft adapters of such a folder, or a folder of
    safetensors under our names.

    Args:
        path: the path.
        choice: the weights to use; folders of weights have no average.
        base: for adapters, the path of their base; None: from their configuration.

    Raises:
        ValueError: with an `exit_status` of 2: it is none of these, or cannot be used.
    """
    if not is_weights_folder(path):
        return open_checkpoint(path, choice, base)
    if choice == "ema":
        raise CheckpointError(
            f"{path}: is a folder of weights, which has no moving average; only checkpoints of "
            "runs with train.ema have one"
        )
    if is_peft_folder(path):
        return PeftWeights(path, base)
    if base is not None:
        raise _without_adapters(path, base)
    return open_folder(path) if is_huggingface_folder(path) else PlainWeights(path)


def _without_adapters(path: Path, base: Path) -> CheckpointError:
    return CheckpointError(
        f"--base: {base} is not allowed: {path} holds no adapters, and only adapters have a base "
        "model"
    )


def origin_of(weights: Weights) -> dict[str, Any] | None:
    """Returns what a run keeps of another library's folder, for a model that is or was trained from
    its decoder: an `Origin` as JSON values; None if the weights do not come from such a folder."""
    if isinstance(weights, FamilyWeights) and isinstance(weights.config, DecoderConfig):
        return weights.origin().model_dump()
    return weights.state.huggingface if isinstance(weights, Checkpoint) else None


def check_fits(weights: Weights, config: ModelSettings, without: tuple[str, ...] = ()) -> None:
    """Checks that weights belong to a model.

    Args:
        weights: weights of any format.
        config: the configuration of the model.
        without: prefixes of names that may be missing.

    Raises:
        ValueError: with an `exit_status` of 2: they belong to another model.
    """
    if isinstance(weights, FamilyWeights):  # what it lacks of replaced blocks is in `without`
        weights.check_config(config.original() if isinstance(config, DecoderSettings) else config)
    else:
        weights.check_model(build_model(config), without)


def open_checkpoint(path: Path, choice: Choice = "trained", base: Path | None = None) -> Checkpoint:
    """Opens a checkpoint, or a run's newest one, and checks its weights against its configuration.

    A checkpoint of adapters is opened with its base, so that its weights are whole.

    Args:
        path: the path.
        choice: the weights to use.
        base: see `open_weights`.

    Raises:
        ValueError: with an `exit_status` of 2: it does not exist, or cannot be used.
    """
    checkpoint = read_newest(path, lambda chosen: Checkpoint(find_checkpoint(chosen)))
    try:
        lora = AdaptConfig.model_validate(checkpoint.section("adapt")).lora
    except ValidationError as error:
        place = checkpoint.folder / CONFIG_FILE
        raise damaged(place, f"adapt.{fault_of(error)}") from None
    if lora is not None:
        checkpoint = _on_base(checkpoint, lora, base)
    elif base is not None:
        raise _without_adapters(checkpoint.folder, base)
    checkpoint.check_model(build_model(checkpoint.model_config()))
    if choice == "ema":
        checkpoint.take_average()
    return checkpoint


def _on_base(checkpoint: Checkpoint, lora: LoRAConfig, base_folder: Path | None) -> Checkpoint:
    """Opens the base of a checkpoint of adapters.

    Args:
        checkpoint: the checkpoint.
        lora: its adapters.
        base_folder: the base's path, if it differs from the configured one.
    """
    config, named = checkpoint.model_config(), "--base"
    if base_folder is None:
        named = "checkpoint.init_from"
        base_folder = Path(checkpoint.section("checkpoint")["init_from"])
    try:
        base = open_weights(base_folder)
        ours = {name for name, _ in build_model(config).named_parameters()}
        unused = base.shapes().keys() - ours  # such as the head of a model with another one
        check_fits(base, config, (*checkpoint.shapes(), *unused))  # it has the former
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.folder}: holds adapters, and their base ({named}) cannot be used: {error}"
        ) from None
    return AdaptedCheckpoint(checkpoint.folder, checkpoint.contents, base, lora)


def load_model(
    source: Path | str | Weights,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
) -> nn.Module:
    """Loads a model with weights on one device, in evaluation mode.

    Args:
        source: an argument or a result of `open_weights`.
        device: the device.
        precision: precision of its parameters.

    Returns:
        The model; no process group is needed.
    """
    if isinstance(source, Path | str):
        return read_newest(
            Path(source), lambda chosen: load_model(open_weights(chosen), device, precision)
        )
    if isinstance(source, TheirWeights):
        return source.load(device, precision)
    model = build_model(source.model_config())
    fill(model, source, device, precision)
    return model.eval()


def fill(
    model: nn.Module,
    stored: Weights,
    device: torch.device | str,
    precision: Precision,
    begins: tuple[str, ...] = ("",),
) -> None:
    """Allocates parameters and buffers of a model and sets their values.

    Args:
        model: a model with the configuration of the weights.
        stored: the weights.
        device: the device.
        precision: precision of the parameters; buffers keep theirs.
        begins: name prefixes of the parameters and buffers to fill.

    Raises:
        NotFiniteError: a value that the weights hold is NaN or inf.
    """
    dtype = DTYPES[precision]
    parameters, initial, buffers = (
        [name for name, _ in named if name.startswith(begins)]
        for named in (model.named_parameters(), model.named_buffers(), persistent_buffers(model))
    )

    def finite(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.numel():
            for extreme in value.aminmax():  # in one pass without a copy; NaN is passed on
                if not extreme.isfinite():
                    raise NotFiniteError(
                        f"{stored.folder}: {name} is not finite: it holds {extreme}"
                    )
        return value

    weights = ((name, finite(name, stored.as_stored(name, dtype))) for name in parameters)
    place(model, weights, device, dtype)
    place(model, ((name, initial_value(model, name, 0)) for name in initial), device)
    place(model, ((name, finite(name, stored.buffer(name))) for name in buffers), device)


class Streamed(Decoder):
    """A decoder that is larger than memory: on the meta device, but for one part at a time.

        begin, *blocks, end = parts_of(model)
        with model.part(*begin):        model.embed(...)
        with model.part(*blocks[3]):    model.blocks[3](...)
        with model.part(*end):          model.score(...)

    Args:
        weights: weights of a decoder without a classification head.
        device: the device of the loaded part.
        precision: precision of its parameters.
    """

    def __init__(self, weights: Weights, device: torch.device, precision: Precision) -> None:
        config = weights.model_config()
        assert isinstance(config, DecoderSettings)
        with torch.device("meta"):
            super().__init__(config)
        self.weights, self.device, self.precision = weights, device, precision
        self.eval()

    @contextmanager
    def part(self, *begins: str) -> Iterator[None]:
        """A context in which some weights are loaded; no file is mapped afterwards.

        Args:
            begins: prefixes of their names.
        """
        meta = {
            name: tensor
            for name, tensor in (*self.named_parameters(), *self.named_buffers())
            if name.startswith(begins)
        }
        fill(self, self.weights, self.device, self.precision, begins)
        try:
            yield
        finally:
            place(self, meta.items(), "meta", DTYPES[self.precision])

    @property
    def largest(self) -> int:
        """Size of its largest part, in bytes."""
        return max(bytes_of(self, self.precision, part) for part in parts_of(self))


def parts_of(model: Decoder) -> list[tuple[str, ...]]:
    """Returns the name prefixes of each part's weights: those before the blocks, each block, and
    those that score the output of the last block."""
    blocks = [(f"blocks.{number}.",) for number in range(len(model.blocks))]
    tied = ("token_embedding.",) if model.config.tied_embeddings else ()
    return [("token_embedding.", "position_embedding."), *blocks, ("final_norm.", "head.", *tied)]


def bytes_of_weights(weights: Weights, precision: Precision) -> int:
    """Returns the size of a model's parameters, in bytes.

    Args:
        weights: the weights of the model.
        precision: precision of the parameters.
    """
    return bytes_of(build_model(weights.model_config()), precision)


def bytes_of(model: nn.Module, precision: Precision, begins: tuple[str, ...] = ("",)) -> int:
    """Returns the size of some parameters of a model, in bytes.

    Args:
        model: a model on any device.
        precision: precision of the parameters.
        begins: prefixes of their names.
    """
    numbers = (p.numel() for name, p in model.named_parameters() if name.startswith(begins))
    return sum(numbers) * DTYPES[precision].itemsize


def device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model computes."""
    return model.device if isinstance(model, Streamed) else next(model.parameters()).device
